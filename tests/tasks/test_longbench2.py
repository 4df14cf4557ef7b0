"""LongBench v2 from small files of the authors' form, against independent versions of their rules."""

import functools
import hashlib
import io
import json
import random
import re
from types import SimpleNamespace

import pytest
from datasets import Dataset
from rich.console import Console

from ctxext.api import Settings, evaluate
from ctxext.cli.eval_tables import report_tables
from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.models.model import Written
from ctxext.report import tables
from ctxext.report.page import render_page
from ctxext.report.report import heat_map
from ctxext.tasks.longbench2 import LongBench2, extract_answer
from ctxext.tasks.retrieval import check_fits, make_questions
from hand_made import make_tokenizer

COUNT = 24
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>\n"
CHOICES = "ABCD"
AGAIN = "What is the correct answer to this question: "
FORM = 'Format your response as follows: "The correct answer is (insert answer here)".'
STEPS = "Let’s think step by step:"


def made_row(number):
    """A question; every third text has a mark of the authors' template, and the last one is that of the first."""
    text_number = 0 if number == COUNT - 1 else number
    rng = random.Random(text_number)
    sentences = [prose.sentence(rng) for _ in range(rng.choice((1, 3, 12, 20)))]
    sentences.insert(rng.randrange(len(sentences)), ("é, 日本", "$Q$ and $C_B$", "**x** <s>")[text_number % 3])
    context = f"\n {' '.join(sentences)} \t\n"
    rng = random.Random(number)
    return {
        **{"_id": f"{number:x}", "domain": "Papers", "sub_domain": "None"},
        **{"difficulty": rng.choice(("easy", "hard")), "length": rng.choice(("short", "medium", "long"))},
        "question": f"Who is {prose.person_name(rng)}, number {number}?\n",
        **{f"choice_{letter}": f" {prose.person_name(rng)}, {letter} of $C_D$" for letter in CHOICES},
        **{"answer": rng.choice(CHOICES), "context": context},
    }


ROWS = [made_row(number) for number in range(COUNT)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("longbench") / "data.json"
    path.write_text(json.dumps(ROWS, ensure_ascii=False, indent=2), encoding="utf-8")
    return path


def settings_of(file, **more):
    return Settings(**{"tasks": ("longbench-v2",), "longbench_v2": file, "samples": COUNT, "depths": (0.5,), **more})


def order_of(file, **more):
    """The index in the file of each sample, from the answers' texts."""
    (task,) = settings_of(file, **more).retrieval_tasks()
    ids = [row["question"].strip() for row in ROWS]
    return [ids.index(task.draw(None, sample).row.values[1]) for sample in range(COUNT)]


def filled_by_hand(form, row, **last):
    """One mark after another, so that a mark inside a text is filled too, unless its turn is over."""
    marks = {"$DOC$": "context", "$Q$": "question", **{f"$C_{letter}$": f"choice_{letter}" for letter in CHOICES}}
    values = {mark: row[name].strip() for mark, name in marks.items()} | last
    return functools.reduce(lambda text, mark: values[mark].join(text.split(mark)), values, "\n".join(form))


QUESTION = [f"{AGAIN}$Q$", "Choices:", *(f"({letter}) $C_{letter}$" for letter in CHOICES), ""]
TEXT = ["", "<text>", "$DOC$", "</text>", ""]
DIRECT = ["Please read the following text and answer the question below.", *TEXT, *QUESTION, FORM]
FIRST = ["Please read the following text and answer the questions below.", *TEXT, *QUESTION, STEPS]
SECOND = [FIRST[0], "", "The text is too long and omitted here.", "", *QUESTION, f"{STEPS} $COT$", ""]
SECOND += [f"Based on the above, what is the single, most likely answer choice? {FORM}"]


def cut_by_hand(tokenizer, text, most):
    """Leave out the tokens from the first half up to the last half, which has one more if the number is odd."""
    ids = tokenizer(text)["input_ids"]
    if len(ids) <= most:
        return text, False
    kept = [token for place, token in enumerate(ids) if place < most // 2 or len(ids) - place <= (most + 1) // 2]
    assert len(kept) == most
    return tokenizer.decode(kept, skip_special_tokens=True), True


def tokens_by_hand(tokenizer, text):
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return [0, *tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.fixture(scope="module")
def tokenizers(words):
    """With and without a chat template, and one with an end token after every text."""
    chat = make_tokenizer()
    chat.chat_template = CHAT
    return {"chat": chat, "plain": make_tokenizer(), "end": words}


@pytest.mark.parametrize("kind", ["chat", "plain", "end"])
@pytest.mark.parametrize("length", [200, 333, 10_000])
@pytest.mark.parametrize("steps", [False, True])
def test_prompts_are_those_of_the_authors(kind, length, steps, tokenizers, file):
    tokenizer = tokenizers[kind]
    encoder, settings = Encoder(tokenizer), settings_of(file, chain_of_thought=steps)
    (task,) = settings.retrieval_tasks()
    limit = check_fits(task, encoder, [length], settings)
    num_cut, room = 0, 1024 if steps else 128
    for number, (prompt,) in zip(
        order_of(file), make_questions(task, encoder, length, range(COUNT), settings), strict=True
    ):
        row = ROWS[number]
        text, is_cut = cut_by_hand(tokenizer, filled_by_hand(FIRST if steps else DIRECT, row), length)
        assert prompt.ids[:-room] == tokens_by_hand(tokenizer, text)
        assert (prompt.num_answer, prompt.answers) == (room, (row["answer"],))
        assert prompt.groups == (row["difficulty"], row["length"], *["cut"] * is_cut)
        assert len(prompt.ids) <= limit
        num_cut += is_cut
    assert num_cut == {200: COUNT, 10_000: 0}.get(length, num_cut)
    assert length != 333 or 0 < num_cut < COUNT


def stated_by_hand(text):
    """The letter after the first mention of a correct answer with a letter in parentheses, else without them."""
    text = "".join(character for character in text if character != "*")
    mentions = text.split("The correct answer is ")[1:]
    in_parentheses = [part[1] for part in mentions if part[:1] == "(" and part[1:2] in CHOICES and part[2:3] == ")"]
    bare = [part[0] for part in mentions if part and part[0] in CHOICES]
    return (in_parentheses + bare + [None])[0]


def test_scores_of_400_answers(file):
    (task,) = settings_of(file).retrieval_tasks()
    rng, right, stated = random.Random(5), 0, 0
    parts = [
        "The correct answer is ",
        "The correct answer is",
        "the correct answer is ",
        "So ",
        "\n",
        "(insert here). ",
    ]
    for _ in range(400):
        letters = [rng.choice(("{}", "({})", "**{}**", "(**{}**)", "({}", "[{}]")).format(c) for c in "ABCDEab"]
        text = "".join(rng.choices([*parts, "The correct answer is "], k=2) + rng.choices(letters, k=1))
        text += rng.choice(("", ".", " The correct answer is (B)", "\nThe correct answer is C"))
        answer, expected = rng.choice(CHOICES), stated_by_hand(text)
        assert extract_answer(text) == expected, text
        assert task.grade(text, SimpleNamespace(answers=(answer,))) == (expected == answer), text
        right += expected == answer
        stated += expected is not None
    assert 30 < right < stated
    assert 100 < stated < 350
    assert not task.grade("", SimpleNamespace(answers=("A",))), "no answer is wrong, without a share for guessing"


def test_the_first_questions_in_a_seeded_order(file):
    order = order_of(file)
    assert sorted(order) == [*range(COUNT)] != order == order_of(file)
    assert order_of(file, samples=3) == order
    assert order_of(file, seed=1) not in (order, [*range(COUNT)])
    (task,) = settings_of(file).retrieval_tasks()
    same = {order.index(0), order.index(COUNT - 1)}
    assert {task.number_text(sample) for sample in same} == {0}, "two questions about one text"
    assert len({task.number_text(sample) for sample in range(COUNT)}) == COUNT - 1


class Writer:
    """Generates given texts, and records its prompts."""

    def __init__(self, tokenizer, texts):
        self.encoder, self.texts, self.questions = Encoder(tokenizer), texts, []

    def may_share(self, common, length):
        return False

    def write(self, questions, depths, form):
        self.questions.append([question[0] for question in questions])
        written = [self.encoder.encode_piece(text) for text in self.texts.pop(0)]
        yield 0, [Written(ids, is_cut=False) for ids in written]


def test_an_answer_follows_the_reasoning_without_the_text(tokenizers, file):
    reasons = [f"\n So $Q$, {letter}. The correct answer is (A)\n" for letter in CHOICES]
    numbers = order_of(file)[:4]
    answers = [f"The correct answer is ({ROWS[number]['answer']})" for number in numbers]
    answers[1] = "None."
    for kind, length in (("chat", 10_000), ("plain", 151)):
        settings = settings_of(file, chain_of_thought=True)
        (task,) = settings.retrieval_tasks()
        writer = Writer(tokenizers[kind], [reasons, answers])
        questions = make_questions(task, writer.encoder, length, range(4), settings)
        task = task.fit_to_length(writer.encoder, length)
        assert [*task.score(writer, questions, [0], generate=False)] == [(0, [1, 0, 1, 1], (), (), ())]
        first, second = writer.questions
        assert first == [prompt for (prompt,) in questions]
        for number, reason, prompt in zip(numbers, reasons, second, strict=True):
            text = filled_by_hand(SECOND, ROWS[number], **{"$COT$": reason.strip()})
            text, is_cut = cut_by_hand(tokenizers[kind], text, length)
            assert prompt.ids[:-128] == tokens_by_hand(tokenizers[kind], text)
            assert is_cut == (length == 151)


def test_every_form_of_the_data_set_has_the_same_questions(file, tmp_path):
    (expected,) = settings_of(file).retrieval_tasks()
    rows = [expected.draw(None, sample).row for sample in range(COUNT)]
    (tmp_path / "json" / ".cache").mkdir(parents=True)
    (tmp_path / "json" / "data.json").write_text(json.dumps(ROWS))
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for part in range(2):
        name = tmp_path / "parquet" / "data" / f"train-0000{part}-of-00002.parquet"
        Dataset.from_list(ROWS[12 * part : 12 * part + 12]).to_parquet(name)
    Dataset.from_list(ROWS).to_parquet(tmp_path / "all.parquet")
    for place in ("json", "json/data.json", "parquet", "all.parquet"):
        (task,) = settings_of(tmp_path / place).retrieval_tasks()
        assert [task.draw(None, sample).row for sample in range(COUNT)] == rows, place


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([{**ROWS[0], "answer": "E"}], "Record 1 of \"FILE\": \"answer\" is \"'E'\", expected 'A', 'B', 'C' or 'D'."),
        ([ROWS[0], {**ROWS[1], "difficulty": "Easy"}], 'Record 2 of "FILE": "difficulty" is'),
        ([{**ROWS[0], "length": 5}], 'Record 1 of "FILE": "length" is "5"'),
        ([{**ROWS[0], "choice_C": None}], 'Record 1 of "FILE": "choice_C" is "None"'),
        ([{**ROWS[0], "context": " \n"}], '"context" is "\' \\n\'", expected text that is not empty.'),
        ([{key: ROWS[0][key] for key in ROWS[0] if key != "choice_A"}], 'Record 1 of "FILE" lacks "choice_A".'),
        (["text"], 'Record 1 of "FILE" lacks "difficulty".'),
        ([], '"FILE" contains no questions.'),
        ({"data": ROWS}, 'Line 1 of "FILE" lacks "difficulty".'),
        ("[{", '"FILE" is not valid JSON'),
    ],
)
def test_malformed_files(content, expected, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    (task,) = settings_of(path).retrieval_tasks()
    with pytest.raises(CtxextError) as error:
        task.pieces(random.Random(0))
    message = error.value.message.replace(str(path), "FILE")
    assert expected in message
    assert "\n" not in message


def test_missing_files_and_too_many_samples(file, tmp_path):
    def check(settings):
        check_fits(*settings.retrieval_tasks(), Encoder(make_tokenizer()), [200], settings)

    def refusal(path, **more):
        with pytest.raises(CtxextError) as error:
            check(settings_of(path, **more))
        return f"{error.value.message} {error.value.hint}".replace(f"{tmp_path}/", "")

    download = "hf download THUDM/LongBench-v2 --repo-type dataset --local-dir DIR"
    assert refusal(None) == (
        'The task "longbench-v2" needs the files of its authors, which ctxext does not contain. '
        f"{download} && ctxext eval … --longbench-v2 DIR"
    )
    assert refusal(tmp_path / "no") == f'There is no file or folder "no". {download}'
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == f'"empty" contains no file data.json. {download}'
    too_many = refusal(file, samples=9, depths=(0.0, 0.2, 0.4, 0.6, 0.8)).replace(str(file), "FILE")
    assert too_many == (
        f'"FILE" contains {COUNT} questions. Samples times depths must not exceed that number: --samples {COUNT} '
        "--depths 1"
    )


def test_a_run_reports_each_group_and_the_cut_prompts(file, checkpoint, tokenizer, tmp_path, monkeypatch):
    """Answers count as correct for A and B, and the score of each group is computed as in the authors' result.py."""
    monkeypatch.setattr(LongBench2, "grade", lambda self, text, prompt: float(prompt.answers[0] in "AB"))
    monkeypatch.setattr("ctxext.tasks.longbench2._ANSWER_ROOM", 2)
    monkeypatch.setattr("ctxext.tasks.longbench2._REASONING_ROOM", 3)
    settings = settings_of(file, samples=12, lengths=(333,), allow_beyond=True, chain_of_thought=True)
    report = evaluate([str(checkpoint)], settings, out=tmp_path / "out")
    (cell,), rows = report["models"][0]["cells"], [ROWS[number] for number in order_of(file)[:12]]
    counts = {}
    for row in rows:
        is_cut = cut_by_hand(tokenizer, filled_by_hand(FIRST, row), 333)[1]
        for group in ("all", row["difficulty"], row["length"], *["cut"] * is_cut):
            correct, samples = counts.get(group, (0, 0))
            counts[group] = (correct + (row["answer"] in "AB"), samples + 1)
    assert (cell["depth"], (cell["correct"], cell["samples"])) == (None, counts.pop("all"))
    assert 0 < counts["cut"][1] < 12
    table = tables.tabulate_groups(heat_map(report["models"], "longbench-v2"))
    order = [group for group in ("easy", "hard", "short", "medium", "long", "cut") if group in counts]
    assert [row[:5] for row in table.rows if row[3] != "0 of 0"] == [
        ["tiny", "333", name, f"{correct} of {samples}", f"{100 * correct / samples:.1f} %"]
        for name, (correct, samples) in ((group, counts[group]) for group in order)
    ]
    assert len(table.rows) == 6
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*report_tables(report, 80))
    page, terminal = render_page(report), console.export_text()
    correct, samples = counts["cut"]
    assert re.search(rf"tiny +333 +cut +{correct} of {samples} +{100 * correct / samples:.1f} %", terminal)
    assert f'<td class="text">cut</td><td>{correct} of {samples}</td>' in page
    assert "The model first writes its reasoning" in page
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert report["settings"]["longbench_v2"] == {"name": "data.json", "sha256": digest}
    again = evaluate([str(checkpoint)], settings, out=tmp_path / "out", resume=True)
    assert again["models"][0]["cells"] == report["models"][0]["cells"]
