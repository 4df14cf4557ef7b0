"""RULER: prompts, budgets and scores by an independent writing of its rules, and original material from files."""

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import ruler_rules as rules
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.data.encoding import Encoder, open_tokenizer
from ctxext.errors import CtxextError
from ctxext.tasks.registry import GROUPS, RETRIEVAL_TASKS
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings

PARAGRAPHS = [
    [f"Text {article}-{number} is about {'ab'[number % 2] * 9}." for number in range(3)] for article in range(9)
]
SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": context,
                    "qas": [
                        {"question": f"{context} What?", "answers": [{"text": "It {x}"}, {"text": context[:8]}]},
                        {"question": "None?", "answers": [], "is_impossible": True},
                        {"question": "Plausible?", "answers": [{"text": "No"}], "is_impossible": True},
                    ],
                }
                for context in contexts
            ]
        }
        for contexts in PARAGRAPHS
    ]
}
HOTPOT = [
    {
        "question": f"Who is {number}?",
        "answer": f"Ann {number}",
        "supporting_facts": [[f"t{number}-2", 0], [f"t{number}-5", 0]],
        "context": [[f"t{number}-{place}", [f"One {number}.", f" Two {place}."]] for place in range(6)],
    }
    for number in range(20)
]
ESSAYS = "Begin here.  It was\n\nnot long. " + " ".join(f"Sentence {number} follows." for number in range(500))
WORDS = {
    "adjectives": [f"adj{n}" for n in range(300)],
    "nouns": [f"noun{n}" for n in range(400)],
    "verbs": ["run", "go"],
}


@pytest.fixture
def files(tmp_path):
    contents = {"squad": SQUAD, "hotpot": HOTPOT, "essays": {"text": ESSAYS}, "words": WORDS}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return {name: tmp_path / f"{name}.json" for name in contents}


def texts_of(settings, name, tokenizer, length, count=3):
    """Yield prompts with the text of each, without the padding before the question."""
    (task,) = (task for task in settings.retrieval_tasks() if task.name == name)
    check_fits(task, Encoder(tokenizer), [length], replace(settings, samples=count))
    questions = make_questions(task, Encoder(tokenizer), length, range(count), settings)
    for prompt in itertools.chain.from_iterable(questions):
        assert len(prompt.ids) == length
        text = tokenizer.decode(prompt.ids[: -prompt.num_answer], skip_special_tokens=True)
        blank = r"\n+(?=\n\nAnswer the)" if "qa" in name else r"\n+(?=\n(Question|What))"
        yield prompt, re.sub(blank, "", text)


@pytest.mark.parametrize("length", [900, 2600, 8200])
@pytest.mark.parametrize("name", GROUPS["ruler"])
def test_prompts_are_what_the_rules_make_of_their_words(name, length, tokenizer):
    """The vocabulary of the test has few words, so some answers have more tokens than the budget."""
    settings = Settings(tasks=("ruler",), depths=(0.0, 0.3, 1.0), seed=length)
    for prompt, text in texts_of(settings, name, tokenizer, length):
        written, correct = rules.rewrite(name, text, length, length)
        assert re.sub("(?<=afterwards.\n) | (?=\nWhat)", "", text) == written, (
            "spaces around prose are not those of RULER"
        )
        if correct is not None:
            assert sorted(prompt.required) == sorted(correct)
        answer = Encoder(tokenizer).encode_piece(f" {prompt.answers[0].lstrip()}")
        assert prompt.num_answer == rules.budget(name) or len(answer) >= rules.budget(name) - 1


def test_the_example_of_vt_fills_500_tokens_and_only_its_names_change():
    tokenizer = open_tokenizer(open_checkpoint("demo").folder)
    places = []
    for _, text in texts_of(Settings(tasks=("ruler",), depths=(0.5,)), "ruler-vt", tokenizer, 2600):
        example = text.split("they are: ")[0] + "they are: "
        lines = text.split("\n\nMemorize")[0].split("\n")
        places.append([index for index, line in enumerate(lines) if line.startswith("VAR")])
        size = len(Encoder(tokenizer).encode_piece(example))
        assert 465 < size <= 510, "names of other samples have some tokens more"
        assert len(lines) > 15, "there are several ways to place five lines"
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("name", ["ruler-cwe", "ruler-fwe", "ruler-vt"])
def test_orders_are_those_of_the_seed(name, tokenizer):
    def text(seed):
        ((_, text),) = texts_of(Settings(tasks=("ruler",), depths=(0.5,), seed=seed), name, tokenizer, 2600, 1)
        return text

    assert rules.rewrite(name, text(1), 2600, 1)[0] == text(1)
    if name != "ruler-vt":
        assert not follows(name, text(1), 2600, 2)


def follows(name, text, length, seed):
    try:
        return rules.rewrite(name, text, length, seed)[0] == text
    except (AssertionError, StopIteration):
        return False


def test_200_answers_score_as_by_the_rules():
    rng = random.Random(3)
    for case in range(200):
        parts = tuple(f"{rng.choice(['Blue', 'red', 'GREEN'])}-{rng.randrange(30)}" for _ in range(rng.randrange(1, 6)))
        text = " ".join(f"{rng.choice(['blue', 'Red', 'green'])}-{rng.randrange(30)}" for _ in range(rng.randrange(40)))
        text = f"{text}{rng.choice(['', chr(9), chr(0)])}{rng.choice(parts) if case % 3 == 0 else ''}"
        prompt = SimpleNamespace(required=parts, answers=parts)
        for name in GROUPS["ruler"]:
            rule = rules.string_match_part if "qa" in name else rules.string_match_all
            assert RETRIEVAL_TASKS[name].grade(text, prompt) == pytest.approx(rule(text, parts))
    ends_with_space = SimpleNamespace(required=("blue ",), answers=("blue ",))
    assert RETRIEVAL_TASKS["ruler-vt"].grade("blue ", ends_with_space) == 0.0, "answers are stripped first"
    assert RETRIEVAL_TASKS["ruler-qa-1"].grade("a\tblue ", ends_with_space) == 0.0


def test_essays_are_read_from_their_first_word(files, tokenizer):
    settings = Settings(tasks=("ruler",), depths=(0.0, 0.6), essays=files["essays"])
    for name in ("niah-single-2", "niah-multivalue"):
        for _, text in texts_of(settings, name, tokenizer, 2600):
            rules.rewrite(name, text, 2600, 0, ESSAYS)
            assert "Begin here. It was not long. Sentence 0" in rules.NEEDLE.sub("", text).replace("  ", " ")
    plain = files["essays"].with_suffix(".txt")
    plain.write_text(ESSAYS)
    assert replace(settings, essays=plain).retrieval_tasks()[1].essays == settings.retrieval_tasks()[1].essays, (
        "JSON or plain text"
    )


def marks_of(text):
    """The article and number of each document of SQuAD in a prompt, in order."""
    return re.findall(r"^Text (\d-\d) is", text, re.MULTILINE)


def squad_related(text):
    """The documents of the question's article that do not answer it."""
    article, gold = re.search(r"Question: Text (\d)-(\d)", text).groups()
    return {f"{article}-{number}" for number in range(3)} - {f"{article}-{gold}"}


def test_questions_have_the_order_of_the_file(files, tokenizer):
    settings = Settings(tasks=("ruler",), depths=(0.0, 1.0), squad=files["squad"], hotpot=files["hotpot"])
    known = {context for contexts in PARAGRAPHS for context in contexts}
    squad = {
        f"{context} What?": (
            ["It {x}", context[:8]],
            [context],
            [other for other in contexts if other != context],
            known,
        )
        for contexts in PARAGRAPHS
        for context in contexts
    }
    documents = {e["question"]: [f"{title}\n{''.join(lines)}" for title, lines in e["context"]] for e in HOTPOT}
    all_documents = {text for texts in documents.values() for text in texts}
    hotpot = {e["question"]: ([e["answer"]], documents[e["question"]], [], all_documents) for e in HOTPOT}
    for name, source, length in (("ruler-qa-1", squad, 420), ("ruler-qa-1", squad, 700), ("ruler-qa-2", hotpot, 900)):
        prompts = [*texts_of(settings, name, tokenizer, length, 4)]
        if length == 700:
            golds = [re.search(r"Question: Text (\d-\d)", text)[1] for _, text in prompts]
            kinds = [
                "".join("o" if mark in squad_related(text) else "x" for mark in marks_of(text) if mark != gold)
                for gold, (_, text) in zip(golds, prompts, strict=True)
            ]
            assert any(re.search("x.*o", kind) for kind in kinds), "documents are shuffled"
        for number, (prompt, text) in enumerate(prompts):
            written, answers = rules.rewrite(name, text, length, 0, source)
            assert text == written
            assert [*prompt.answers] == answers
            assert f"Question: {[*source][number // 2]} Answer:" in text
            first = source[[*source][number // 2]][1][2 if name == "ruler-qa-2" else 0]
            documents_in_order = re.split(
                r"\n\nDocument \d+:\n", text.split("Document 1:")[0] + "\n\n" + text[text.index("Document 1:") :]
            )
            at = next(i for i, document in enumerate(documents_in_order) if first in document)
            assert at == 1 if number % 2 == 0 else at > 1, "the document with the answer is at its depth"
    (task,) = (task for task in settings.retrieval_tasks() if task.name == "ruler-qa-1")
    assert task.draw(random.Random(0), 27).questions == task.draw(random.Random(0), 0).questions


def test_words_are_those_of_the_file(files, tokenizer, tmp_path):
    settings = Settings(tasks=("ruler",), depths=(0.5,), words=files["words"])
    for _, text in texts_of(settings, "niah-multikey-2", tokenizer, 900, 2):
        assert all(re.fullmatch(r"adj\d+-noun\d+", key) for _, key, _ in rules.NEEDLE.findall(text))
    for _, text in texts_of(settings, "ruler-cwe", tokenizer, 2600, 2):
        assert {*re.findall(r"\d+\. (\S+)", text)} <= {word for words in WORDS.values() for word in words}
    (tmp_path / "lines.txt").write_text("\n".join(f"w{number}" for number in range(50)))
    (tmp_path / "english.json").write_text(json.dumps({number: f"w{number}" for number in range(50)}))
    (tmp_path / "list.json").write_text(json.dumps([f"w{number}" for number in range(50)]))
    tasks = [
        Settings(tasks=("niah-single-1",), words=tmp_path / file).retrieval_tasks()
        for file in ("lines.txt", "english.json", "list.json")
    ]
    assert tasks[0] == tasks[1] == tasks[2]
    assert tasks[0][0].words.nouns == tasks[0][0].words.words


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("essays", '{"texts": "a"}', 'lacks "text"'),
        ("essays", "[1]", "expected an object"),
        ("essays", '{"text": " "}', "contains no text"),
        (
            "squad",
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            'lacks "data.0.paragraphs.0.context"',
        ),
        ("squad", "[]", "expected an object"),
        ("squad", '{"data": []}', "contains no questions with answers"),
        ("hotpot", '{"data": []}', "expected a valid list"),
        ("hotpot", '[{"question": 1, "answer": "a", "context": []}]', '"0.question" is "1", expected'),
        ("hotpot", "[]", "contains no questions"),
        ("words", '{"a": 1}', '"a" is "1", expected a valid list'),
        ("words", '["a", "b"]', "contains 2 different words"),
        ("words", json.dumps(["a " * 40] * 50), "expected a word of at most 50 characters"),
        ("words", "{", "is not valid JSON"),
    ],
)
def test_files_of_another_form_are_one_clear_line(name, content, message, tmp_path):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(CtxextError, match=re.escape(message)) as error:
        Settings(tasks=("ruler",), **{name: tmp_path / "file.json"}).retrieval_tasks()
    assert "\n" not in error.value.message
    assert error.value.hint or "JSON" in message


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("essays", ("niah-single-1", "needle")),
        ("squad", ("ruler-qa-2", "documents")),
        ("hotpot", ("ruler-qa-1",)),
        ("words", ("niah-multikey-3", "ruler-fwe")),
    ],
)
def test_files_that_no_task_uses_are_refused(name, tasks):
    with pytest.raises(CtxextError, match=f"No selected task uses --{name}"):
        Settings(tasks=tasks, **{name: Path("file.json")})
    Settings(tasks=("ruler",), **{name: Path("file.json")})


def test_reports_name_the_files(files):
    written = Settings(tasks=("ruler",), **files).to_dict()
    for name in files:
        assert written[name]["name"] == f"{name}.json"
        assert len(written[name]["sha256"]) == 64
