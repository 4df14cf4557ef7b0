import bz2
import gzip
import json
import lzma
import os
import random
import re
from itertools import islice

import pytest

from ctxext.converters import calibration
from ctxext.data import prose, records
from ctxext.data.prompt import Pieces
from ctxext.data.prose import read_haystack
from ctxext.data.records import read_records
from ctxext.data.texts import read_texts
from ctxext.errors import CtxextError
from ctxext.tasks.documents import Documents, best_subspan_match, read_questions
from ctxext.tasks.kv import KeyValue
from ctxext.tasks.needle import Needle, PassKey

QUESTION = {
    "question": "Who built the tower?",
    "answers": ["Ada Bell"],
    "ctxs": [
        {"title": "Towers", "text": "Towers are high."},
        {"title": "The tower", "text": "It was built by Ada Bell.", "isgold": True},
        {"title": "Bridges", "text": "Bridges are long."},
    ],
}
TASKS = (
    PassKey(),
    Needle(),
    Needle(num_needles=1, phrasing="any"),
    Needle(text=("One unit.", "Another.")),
    KeyValue(),
    KeyValue(ids="number"),
    Documents(),
)


def questions_file(folder, *lines):
    path = folder / "questions.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def text_of(pieces: Pieces, num_units: int = 5) -> str:
    units = [*islice(pieces.haystack, num_units), *pieces.needles]
    return pieces.opening + "".join(units) + pieces.padding + pieces.questions[0].question + pieces.questions[0].answer


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_same_seed_same_text(task):
    first, second, other = (text_of(task.pieces(random.Random(seed))) for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_answer_is_only_in_the_requested_needle(task):
    for seed in range(50):
        pieces = task.pieces(random.Random(seed))
        bare = pieces.questions[0].answer.strip(' "').removeprefix("Document ")
        assert bare in pieces.needles[0]
        assert all(bare not in distractor for distractor in pieces.needles[1:])
        if not isinstance(task, KeyValue):  # a short number may be a key or a value elsewhere
            assert bare not in pieces.questions[0].question
        if not isinstance(task, Documents | KeyValue):  # a made-up place may be named in other documents
            assert bare not in "".join(islice(pieces.haystack, 100))


def test_passkey_is_the_standard_phrasing():
    text = text_of(PassKey().pieces(random.Random(0)))
    assert text.startswith("There is an important info hidden inside a lot of irrelevant text.")
    assert "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again." in text
    assert "Remember it." in text
    assert "What is the pass key? The pass key is " in text


@pytest.mark.parametrize("ids", ["uuid", "number"])
def test_key_value_text_is_valid_json_with_different_keys(ids):
    pieces = KeyValue(ids=ids).pieces(random.Random(0))
    text = text_of(pieces, 600)
    data, question = text.split("JSON data:\n")[1].split("\n\nKey: ")
    pairs = json.loads(data, object_pairs_hook=list)
    assert len(pairs) == len(dict(pairs)) == 603
    assert dict(pairs)[json.loads(question.split("\n")[0])] == pieces.questions[0].answer.strip(' "')


def test_made_up_documents_have_different_numbers():
    pieces = Documents(ask="which").pieces(random.Random(0))
    numbers = [unit.split("]")[0] for unit in (*pieces.needles, *islice(pieces.haystack, 1200))]
    assert len(numbers) == len(set(numbers))


def test_documents_come_from_a_file(tmp_path):
    second = {**QUESTION, "question": "Who crossed it?", "answers": ["Leo Reed"]}
    second["ctxs"] = [
        {"title": "A", "text": "Leo Reed crossed it.", "hasanswer": True},
        {"title": "B", "text": "Rain."},
    ]
    questions = read_questions(questions_file(tmp_path, QUESTION, "", second))
    assert [question.gold.text for question in questions] == ["It was built by Ada Bell.", "Leo Reed crossed it."]
    pieces = Documents(questions=questions[:1]).pieces(random.Random(0))
    assert re.fullmatch(
        r"Write a high-quality answer for the given question using only the provided search results "
        r"\(some of which might be irrelevant\)\.\n\n(Document \[\d{3}\]\(Title: [\w ]+\) [\w. ]+\n){6}"
        r"\n\nQuestion: Who built the tower\?\nAnswer: Ada Bell",
        text_of(pieces),
    ), "the wording of the Lost in the Middle release"
    assert pieces.questions[0].answer == " Ada Bell"
    assert "Ada Bell" in pieces.needles[0]
    assert "Ada Bell" not in "".join(islice(pieces.haystack, 50))


@pytest.mark.parametrize(
    "line",
    [
        "{not json",
        "[1, 2]",
        '"text"',
        {"question": "?", "answers": ["a"]},
        {**QUESTION, "answers": []},
        {**QUESTION, "answers": ["nowhere"], "ctxs": [{"title": "", "text": "nothing"}]},
        {**QUESTION, "ctxs": [{"title": "no text", "isgold": True}]},
        {**QUESTION, "ctxs": "text"},
        {**QUESTION, "question": 3},
    ],
    ids=repr,
)
def test_a_broken_line_is_named_by_its_number(tmp_path, line):
    with pytest.raises(CtxextError, match="Line 2 of"):
        read_questions(questions_file(tmp_path, QUESTION, line))


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(CtxextError, match="cannot be read"):
        read_questions(tmp_path / "absent.jsonl")
    with pytest.raises(CtxextError, match="no questions"):
        read_questions(questions_file(tmp_path, ""))


def test_files_that_are_no_files_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with (tmp_path / "hole.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    for read in (read_questions, read_haystack, calibration.read_text):
        with pytest.raises(CtxextError, match="not a regular file"):
            read(tmp_path / "pipe.jsonl")
        with pytest.raises(CtxextError, match=r"(larger|longer) than"):
            read(tmp_path / "hole.jsonl")
    with pytest.raises(CtxextError, match="neither a file nor a folder"):
        next(read_records(str(tmp_path / "pipe.jsonl")))


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_broken_archive_is_reported(tmp_path, kind):
    path = tmp_path / f"x.jsonl.{kind}"
    text = b'{"text": "a tower and a bridge"}\n' * 9
    whole = {"gz": gzip, "bz2": bz2, "xz": lzma}[kind].compress(text) if kind != "zst" else b"(\xb5/\xfd" + text
    for content in (whole[: len(whole) // 2], whole[:20] + bytes(9) + whole[29:], b"x" + whole[1:]):
        path.write_bytes(content)
        with pytest.raises(CtxextError, match="cannot be"):
            list(read_records(str(path)))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "txt"])
def test_a_text_without_end_is_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(records, "_MOST_LINE", 1000)
    monkeypatch.setattr(records, "_MOST_TEXT", 2000)
    for size in (5000, 1 << 40):
        with (tmp_path / f"hole.{suffix}").open("wb") as file:
            file.truncate(size)
        with pytest.raises(CtxextError, match=r"longer than|more than"):
            next(read_records(str(tmp_path / f"hole.{suffix}")))
    (tmp_path / f"whole.{suffix}").write_text("[" + "1," * 700 + "1]" if suffix == "jsonl" else "x" * 999)
    list(read_records(str(tmp_path / f"whole.{suffix}")))


@pytest.mark.parametrize("rest", ['["x"]', '[{"text": "x"}]', '["x"]\n["y"]', "[1,", "[" + "1," * 700 + "1]"])
def test_only_the_first_line_begins_an_array(tmp_path, monkeypatch, rest):
    monkeypatch.setattr(records, "_MOST_LINE", 1000)
    (tmp_path / "x.jsonl").write_text('\n{"text": "a"}\n' + rest)
    with pytest.raises(CtxextError, match=r'^Line 3 of ".*" (has no text|is longer|is not valid JSON)'):
        list(read_texts(str(tmp_path / "x.jsonl")))
    (tmp_path / "x.jsonl").write_text('\n[{"text": "a"},\n{"text": "b"}]')
    assert list(read_texts(str(tmp_path / "x.jsonl"))) == ["a", "b"]


@pytest.mark.parametrize("line", ['{"text": "\\ud800"}', '{"messages": [{"content": "\\udc00 \\ud83d"}]}'])
def test_half_a_character_is_named_with_its_line(tmp_path, line):
    (tmp_path / "x.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n' + line + "\n")
    records = read_records(str(tmp_path / "x.jsonl"))
    assert next(records)[1] == {"text": "\U0001f600"}
    with pytest.raises(CtxextError, match=r'^Line 2 of ".*" contains a lone surrogate'):
        next(records)


@pytest.mark.thorough
def test_a_line_of_a_hundred_megabytes_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "' + "x " * 52_500_000 + '"}\n')
    with pytest.raises(CtxextError, match=r'^Line 1 of ".*" is longer than 67108864 characters'):
        next(read_records(str(tmp_path / "x.jsonl")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("It was Ada  Bell.", True), ("the ADA-BELL", False), ("a\nada the bell!", True), ("Ada", False), ("", False)],
)
def test_best_subspan_match(text, expected):
    assert best_subspan_match(text, ["Leo Reed", "Ada Bell"]) is expected


def test_prose_is_varied_and_has_no_digits():
    sentences = list(islice(prose.sentences(random.Random(0)), 2000))
    assert len(set(sentences)) > 1900
    assert not any(character.isdigit() for sentence in sentences for character in sentence)
    assert all(sentence[0].isupper() and sentence.endswith(".") and "  " not in sentence for sentence in sentences)
    assert len({word for sentence in sentences for word in sentence.rstrip(".").split()}) > 300
