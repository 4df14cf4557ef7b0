"""NoLiMa and BABILong from small files of the authors' form, against independent versions of their rules."""

import itertools
import json
import random
import re
from types import SimpleNamespace

import numpy
import pytest
from datasets import Dataset

from ctxext.api import Settings, evaluate
from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.models.answers import generate_graded
from ctxext.report.page import render_page
from ctxext.report.report import effective_lengths
from ctxext.tasks import nolima as nolima_module
from ctxext.tasks.babilong import LABELS, is_correct, name_length
from ctxext.tasks.retrieval import make_questions
from hand_made import make_tokenizer

NAMES = ["Yuki", "Stuart", "Katie", "Veronica"]
NEEDLES = [
    {
        "id": "0401",
        "system_prompt": "",
        "needle": "Then {CHAR} told that the {1} is next door.",
        "questions": {"onehop": "Who has been to {2}?", "twohop": "Did {CHAR} or another go to {3}?"},
        "character_set": NAMES,
        "tests": {
            "T01": {"input_args": ["Semper", "Dresden", "Saxony"]},
            "T02": {"input_args": ["Kiasma", "Helsinki", "Uusimaa"]},
        },
    },
    {
        "id": "0402Inv",
        "system_prompt": "",
        "task_template": "Read {haystack}\n\nAnswer {{once}}: {question}",
        "needle": "A {1} was seen.",
        "questions": {"direct": "What was seen?"},
        "tests": {"T05": {"input_args": ["whale"], "gold_answers": ["whale", "Whale"]}},
    },
]


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nolima")
    (folder / "needlesets").mkdir()
    (folder / "needlesets" / "needle_set.json").write_text(json.dumps(NEEDLES))
    (folder / "needlesets" / "needle_set_hard.json").write_text(json.dumps(NEEDLES[1:]))
    (folder / "haystack" / "rand_shuffle").mkdir(parents=True)
    for number in (1, 2):
        rng = random.Random(number)
        lines = [" ".join(prose.sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(150)]
        (folder / "haystack" / "rand_shuffle" / f"rand_book_{number}.txt").write_text("\n".join(lines))
    return folder


def line_ends_by_hand(tokenizer, book):
    ids = tokenizer(book, add_special_tokens=False)["input_ids"]
    return ids, [0] + [n for n, token in enumerate(ids) if "\n" in tokenizer.decode([token])]


def haystack_by_hand(tokenizer, ids, places, needle, length, depth):
    """The place is the first line end that has at least `depth` of `length + 1` tokens before it."""
    place = next(place for place in places if place / (length + 1) - depth >= 0)
    begin = place - int(numpy.round(length * depth))
    before = tokenizer.decode(ids[begin : place + 1])
    before = before[: before.rindex("\n")] if "\n" in before else ""
    return before + " " + needle + "\n" + tokenizer.decode(ids[place + 1 : begin + length])


def filled_by_hand():
    """Needle, question, template and correct answers of each test: questions of a set outside, arguments inside."""
    for group in NEEDLES:
        for question, test in itertools.product(group["questions"].values(), group["tests"].values()):
            filled = [group["needle"], question]
            for number, word in enumerate(test["input_args"], 1):
                filled = [text.replace(f"{{{number}}}", word) for text in filled]
            yield (*filled, group.get("task_template"), test.get("gold_answers"), int(group["id"][:4]))


@pytest.mark.thorough
def test_nolima_prompts_of_200_samples(books):
    tokenizer = make_tokenizer()
    encoder, depths, compared = Encoder(tokenizer), tuple(n / 9 for n in range(10)), 0
    tests, drawn = list(filled_by_hand()), set()
    texts_of_books = [path.read_text() for path in sorted(books.rglob("rand_book_*.txt"))]
    read = [line_ends_by_hand(tokenizer, text) for text in texts_of_books]
    settings = Settings(tasks=("nolima",), nolima=books, samples=10, depths=depths)
    (task,) = settings.retrieval_tasks()
    for length in (100, 400):
        for sample, prompts in enumerate(make_questions(task, encoder, length, range(10), settings)):
            number = sample // 5
            texts = [tokenizer.decode(prompt.ids[1 : -prompt.num_answer]) for prompt in prompts]
            matches = []
            for index, (needle, question, template, gold, seed) in enumerate(tests):
                numpy.random.seed(42 + seed + number)
                expected = []
                for depth in depths:
                    name = str(numpy.random.choice(NAMES)) if gold is None else ""
                    text = haystack_by_hand(tokenizer, *read[number], needle.replace("{CHAR}", name), length, depth)
                    frame = template or nolima_module.TEMPLATE
                    filled = frame.format(haystack=text, question=question.replace("{CHAR}", name))
                    expected.append((filled, tuple(gold or [name])))
                if expected == [(text, prompt.answers) for text, prompt in zip(texts, prompts, strict=True)]:
                    matches.append(index)
            assert len(matches) == 1
            drawn.add((length, number, *matches))
            compared += len(prompts)
            assert all(prompt.num_answer == 192 for prompt in prompts)
            limit = task.fit_to_length(encoder, length).size(task.draw(None, sample), encoder)
            assert all(limit - 64 < len(prompt.ids) <= limit for prompt in prompts)
    assert compared == 200
    assert len(drawn) == 20, "each question once with each book"


def test_a_needle_at_exactly_the_place_of_a_line_end(books):
    tokenizer, book = make_tokenizer(), books / "haystack" / "rand_shuffle" / "rand_book_1.txt"
    ids, places = line_ends_by_hand(tokenizer, book.read_text())
    for place in [place for place in places if place < 400]:
        expected = haystack_by_hand(tokenizer, ids, places, "Here.", 400, place / 400)
        assert nolima_module.hide(Encoder(tokenizer), book, "Here.", 400, place / 400) == expected


def test_a_nolima_message_has_the_system_message_of_the_authors():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    text = tokenizer.decode(Encoder(tokenizer).encode_message("Who?", system=nolima_module.SYSTEM))
    assert text == "<system>You are a helpful assistant<user>Who?<answer>"
    assert tokenizer.decode(Encoder(tokenizer, chat_template=False).encode_message("Who?", system="x")) == "<s>Who?"


def test_nolima_answers_contain_the_name_in_its_case(books):
    (task,) = Settings(tasks=("nolima",), nolima=books).retrieval_tasks()
    rng, right = random.Random(3), 0
    for _ in range(200):
        answers = tuple(rng.sample(NAMES, rng.randint(1, 2)))
        words = rng.choices([*NAMES, *map(str.lower, NAMES), "It", "is", "Yu", "ki."], k=rng.randint(1, 4))
        text = rng.choice((" ", "")).join(words)
        expected = sum(text.count(answer) for answer in answers) > 0
        assert task.grade(text, SimpleNamespace(answers=answers)) == expected, text
        right += expected
    assert 50 < right < 150


def base_by_hand(scores, longest_base):
    """`scores[length][question]`: the mean over questions of the best score, and the longest length near it."""
    short = [length for length in scores if length <= longest_base] or [min(scores)]
    questions = scores[short[0]]
    base = sum(max(scores[length][q] for length in short) for q in questions) / len(questions)
    mean = {length: sum(of.values()) / len(of) for length, of in scores.items()}
    return base, max((length for length in mean if mean[length] >= 0.85 * base), default=None)


@pytest.mark.thorough
def test_the_effective_length_of_nolima_is_relative_to_the_base_score_of_each_question():
    rng, lengths, seen = random.Random(0), (250, 500, 1000, 2000, 4000), set()
    for _ in range(50):
        scores = {n: {q: rng.randint(0, 10) / 10 * rng.choice((1, n < 2000)) for q in range(6)} for n in lengths}
        cells = [
            {"task": "nolima", "length": n, "depth": depth, "correct": 5 * sum(of.values()), "samples": 30}
            | {"texts": [[q, 5 * score, 5] for q, score in of.items()]}
            for n, of in scores.items()
            for depth in (0.0, 1.0)
        ]
        effective = effective_lengths(cells)
        base, longest = base_by_hand(scores, 1024)
        assert (effective["figure"], effective["length"]) == (pytest.approx(base), longest)
        seen.add(longest)
    assert len(seen) >= 3
    long_only = [cell for cell in cells if cell["length"] > 1024]
    base, _ = base_by_hand({n: scores[n] for n in (2000, 4000)}, 1024)
    assert effective_lengths(long_only)["figure"] == pytest.approx(base)


PROMPTS = """
TASK_TEMPLATE = '{{instruction}}'
raise SystemExit("this file is only read")
DEFAULT_PROMPTS = {{{}}}
"""
ENTRY = "'{0}': {{'instruction': 'Do {0}. '\n'Well.', 'examples': '<example>{0}</example>\\n', 'post_prompt': 'Now.'}},"


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """The tasks in each form of the Hub: JSON, parquet in two layouts, and arrow."""
    folder = tmp_path_factory.mktemp("babilong")
    (folder / "prompts.py").write_text(PROMPTS.format("\n".join(ENTRY.format(task) for task in LABELS)))
    for length in ("0k", "1k"):
        for task in ("qa1", "qa2", "qa3", "qa4", "qa5"):
            rows = rows_of(task, length)
            if task == "qa1":
                (folder / "data" / task).mkdir(parents=True, exist_ok=True)
                (folder / "data" / task / f"{length}.json").write_text(json.dumps(rows))
            elif task == "qa2":
                (folder / task).mkdir(exist_ok=True)
                for part in range(2):
                    name = folder / task / f"{length}-0000{part}-of-00002.parquet"
                    Dataset.from_list(rows[10 * part : 10 * part + 10]).to_parquet(name)
            elif task == "qa3":
                Dataset.from_list(rows).save_to_disk(folder / length / task)
            else:
                (folder / length).mkdir(exist_ok=True)
                Dataset.from_list(rows).to_parquet(folder / length / f"{task}-00000-of-00001.parquet")
    return folder


def rows_of(task, length):
    rng = random.Random(f"{task} {length}")
    return [
        {
            "input": f" {' '.join(prose.sentence(rng) for _ in range(3))}\n",
            "question": f"Where is {prose.person_name(rng)}? ",
            "target": rng.choice(LABELS[task]),
        }
        for _ in range(20)
    ]


def test_babilong_prompts_of_200_questions(facts):
    tokenizer, compared = make_tokenizer(), 0
    settings = Settings(tasks=("babilong",), babilong=facts, samples=4)
    tasks = settings.retrieval_tasks()
    assert [task.name for task in tasks] == [f"babilong-qa{n}" for n in range(1, 6)]
    for task, length in itertools.product(tasks, (600, 1024)):
        name = task.name.removeprefix("babilong-")
        questions = make_questions(task, Encoder(tokenizer), length, range(20), settings)
        for row, (prompt,) in zip(rows_of(name, "0k" if length == 600 else "1k"), questions, strict=True):
            expected = "\n\n".join([f"Do {name}. Well.", f"<example>{name}</example>\n", "Now."])
            expected += f"\n\n<context>\n{row['input'].strip()}\n</context>\n\nQuestion: {row['question'].strip()}"
            assert tokenizer.decode(prompt.ids[:-20]) == f"<s>{expected}"
            assert (prompt.num_answer, prompt.answers) == (20, (row["target"],))
            compared += 1
    assert compared == 200


def correct_by_hand(target, text, question, labels):
    """The text up to the first full stop or tag names the target, or all of its parts, and no other answer."""
    sentence = re.match(r"(?s)((?!\.|<context>|<example>).)*", text.lower()).group()
    possible = [label for label in labels if label not in question.lower()]
    named = sorted(label for label in possible if label in sentence)
    is_list = "," in target and len(target) > 3
    return named == sorted(target.lower().split(",") if is_list else [target.lower()])


def test_babilong_scores_of_200_answers_of_each_task():
    rng, right = random.Random(1), 0
    for task, labels in LABELS.items():
        for _ in range(200):
            target = rng.choice(labels).capitalize()
            if task == "qa8" and rng.random() < 0.5:
                target = "apple,milk"
            words = [*labels, target, *target.split(","), ". ", "<context>", "<example>", "It is", "\n"]
            text = rng.choice((" ", "")).join(rng.choices(words, k=rng.randint(1, 4)))
            question = rng.choice(("Where is it?", f"Where was it before the {rng.choice(labels)}?"))
            expected = correct_by_hand(target, text, question, labels)
            assert is_correct(text, target, question, labels) == expected, (task, text, question, target)
            right += expected
    assert right > 500


def test_lengths_have_the_names_of_the_data_set():
    assert [name_length(n) for n in (600, 1024, 131072, 1 << 20, 10 << 20)] == ["0k", "1k", "128k", "1M", "10M"]


@pytest.mark.thorough
def test_both_run_and_the_report_names_the_material(books, facts, checkpoint, tmp_path):
    folders = {"nolima": books, "babilong": facts}
    settings = Settings(
        tasks=("nolima", "babilong-qa1"), lengths=(60, 100), depths=(0.0, 1.0), samples=2, allow_beyond=True, **folders
    )
    report = evaluate([str(checkpoint)], settings, out=tmp_path)
    cells = report["models"][0]["cells"]
    assert [(c["task"], c["length"], c["depth"], c["samples"]) for c in cells] == [
        *(("nolima", length, depth, 2) for length in (60, 100) for depth in (0.0, 1.0)),
        *(("babilong-qa1", length, None, 4) for length in (60, 100)),
    ]
    assert [report["settings"][name]["name"] for name in folders] == [books.name, facts.name]
    assert len(report["settings"]["nolima"]["sha256"]) == 64
    assert books.name in render_page(report)
    again = evaluate([str(checkpoint)], settings, out=tmp_path, resume=True)
    assert again["models"][0]["cells"] == cells


@pytest.mark.thorough
def test_prompts_of_different_lengths_are_written_one_by_one(books, checkpoint):
    from ctxext.models.checkpoint_info import open_infos
    from ctxext.models.model import Loading, load_model

    loaded = load_model(open_infos([str(checkpoint)])[0], Loading())
    settings = Settings(tasks=("nolima",), nolima=books, samples=3, depths=(0.2, 0.9))
    (task,) = settings.retrieval_tasks()
    questions = make_questions(task, loaded.encoder, 40, range(3), settings)
    assert len({len(prompt.ids) for question in questions for prompt in question}) > 1
    scored = generate_graded(loaded, questions, [0, 1], lambda text, _: text)
    together = {each.depth: each.scores for each in scored}
    for depth, row in itertools.product((0, 1), range(3)):
        (alone,) = generate_graded(loaded, [[questions[row][depth]]], [0], lambda text, _: text)
        assert [together[depth][row]] == [*alone.scores]


def test_missing_files_are_reported_with_the_download_command(books, facts, checkpoint, tmp_path):
    def refusal(tasks, **more):
        options = {"lengths": (60,), "samples": 1, "allow_beyond": "lengths" in more, **more}
        with pytest.raises(CtxextError) as error:
            evaluate([str(checkpoint)], Settings(tasks=tasks, **options))
        return f"{error.value.message} {error.value.hint}".replace(str(tmp_path), "")

    assert refusal(("nolima",)) == (
        'The task "nolima" needs the files of its authors, which ctxext does not contain. hf download amodaresi/NoLiMa '
        "--repo-type dataset --local-dir DIR && ctxext eval … --nolima DIR"
    )
    assert "--babilong DIR" in refusal(("babilong",))
    assert refusal(("nolima",), nolima=tmp_path).startswith('"" contains no file needle_set.json.')
    assert refusal(("nolima",), nolima=tmp_path / "no").startswith('There is no folder "/no".')
    assert "contains 5 questions and 2 books" in refusal(("nolima",), nolima=books, samples=11)
    assert "has only" in refusal(("nolima",), nolima=books, lengths=(90000,))
    assert "up to" in refusal(("nolima",), nolima=books, lengths=(500,), allow_beyond=False)
    assert "contains no file of qa1 at 4k" in refusal(("babilong-qa1",), babilong=facts, lengths=(4096,))
    assert "contains 20 questions of qa1 at 0k" in refusal(("babilong-qa1",), babilong=facts, samples=5)
    assert "uses --repeat-question" in refusal(("nolima",), nolima=books, repeat_question=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "needle_set.json").write_text('[{"questions": {"onehop": "Who?"}, "needle": ""}]')
    assert 'lacks "0.id"' in refusal(("nolima",), nolima=tmp_path / "other")
