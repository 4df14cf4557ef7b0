"""Files of tasks with values of other types: errors with the line or key, the value and the expected type."""

import json
from pathlib import Path

import pytest

from ctxext.errors import CtxextError
from ctxext.tasks.documents import best_subspan_match, read_questions
from ctxext.tasks.longppl import _read_file
from ctxext.tasks.nolima import _read_tests
from ctxext.tasks.ruler_files import read_squad, read_words
from ctxext.tasks.settings import Settings

DOCUMENTS = [{"title": "a", "text": "Bob lives in Paris.", "isgold": True}, {"title": "b", "text": "It rains."}]
QUESTION = {"question": "Where is Bob?", "answers": ["Paris"], "ctxs": DOCUMENTS}
NEEDLE = {
    **{"id": "0401", "needle": "A {1} was seen.", "questions": {"direct": "What was seen?"}},
    "tests": {"T1": {"input_args": ["whale"], "gold_answers": ["whale"]}},
}
SPANS = {"sha256": "0" * 64, "characters": 9, "evaluator": "e", "tokens": 9, "window": 1, "step": 1, "first": 0}


def write(path, *lines):
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def message(read, path):
    with pytest.raises(CtxextError) as error:
        read(path)
    return error.value.message.replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"answers": "Paris"}, """Line 2 of "FILE": "answers" is "'Paris'", expected a valid list."""),
        ({"answers": []}, 'Line 2 of "FILE": "answers" is "[]", expected at least 1 entries.'),
        ({"answers": ["Paris", 5]}, 'Line 2 of "FILE": "answers.1" is "5", expected a valid string.'),
        ({"answers": [""]}, """Line 2 of "FILE": "answers.0" is "''", expected text that is not empty."""),
        ({"answers": ["The", "."]}, 'Line 2 of "FILE" has only articles and punctuation in its "answers".'),
        ({"question": None}, 'Line 2 of "FILE": "question" is "None", expected a valid string.'),
        ({"ctxs": [{**DOCUMENTS[0], "title": 1}]}, 'Line 2 of "FILE": "ctxs.0.title" is "1", expected a valid string.'),
        (
            {"ctxs": [{**DOCUMENTS[0], "isgold": "false"}]},
            """Line 2 of "FILE": "ctxs.0.isgold" is "'false'", expected a valid boolean.""",
        ),
        ({"ctxs": DOCUMENTS[1:]}, 'Line 2 of "FILE" has no document with an answer in "ctxs".'),
    ],
)
def test_documents(change, expected, tmp_path):
    assert message(read_questions, write(tmp_path / "a.jsonl", QUESTION, {**QUESTION, **change})) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1]\n", 'Line 2 of "FILE" is "[1]", expected an object.'),
        ('{"question": "a", "question": "b"}\n', 'Line 2 of "FILE" has the key "question" twice.'),
        ("{broken\n", 'Line 2 of "FILE" is not valid JSON: Expecting property name enclosed in double quotes.'),
        ('{"a": ' + "[" * 99 + "]" * 99 + "}\n", 'Line 2 of "FILE" is nested more than 64 levels deep.'),
        ('"' + "a" * (1 << 23) + '"\n', 'Line 2 of "FILE" is longer than 8388608 bytes.'),
    ],
)
def test_lines(line, expected, tmp_path):
    assert message(read_questions, write(tmp_path / "a.jsonl", QUESTION, line)) == expected


def test_a_line_ends_with_a_line_feed_only(tmp_path):
    """U+2028 and others may stand in a string of JSON; a byte-order mark may stand before the first line."""
    marked = {**QUESTION, "question": "Where\u2028is\u2029\x85Bob?"}
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps(marked, ensure_ascii=False) + "\r\n\n" + json.dumps(QUESTION))
    assert [question.question for question in read_questions(path)] == [marked["question"], QUESTION["question"]]
    words = tmp_path / "words.txt"
    words.write_text("\ufeff" + "\r\n".join(f"word{number}" for number in range(50)))
    assert read_words(words).words[0] == "word0"


def test_an_answer_of_articles_alone_never_matches():
    assert not best_subspan_match("Anything.", ("The", "a"))
    assert best_subspan_match("The Eiffel tower", ("The", "eiffel tower"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"id": "x"}, '"0.id"'),
        ({"needle": ""}, '"0.needle"'),
        ({"tests": {"T": {"input_args": "whale"}}}, '"0.tests.T.input_args"'),
        (
            {"tests": {"T": {"input_args": ["whale"], "gold_answers": "whale"}}},
            '"0.tests.T.gold_answers" is "\'whale\'"',
        ),
        ({"tests": {"T": {"input_args": ["whale"]}}}, '"gold_answers" is missing'),
        ({"needle": "{CHAR} was seen."}, '"character_set" is missing'),
        ({"distractors": {}}, "has distractors"),
        *(
            ({"task_template": template}, '"0.task_template"')
            for template in (
                *("{haystack:>2000000000} {question}", "{haystack.__class__} {question}", "{haystack!r} {question}"),
                *(
                    "{haystack} {question} {0}",
                    "{haystack}",
                    "{question}",
                    "{",
                    "{haystack[0]} {question}",
                    "{} {question}",
                ),
            )
        ),
    ],
)
def test_needle_sets(change, expected, tmp_path):
    assert expected in message(_read_tests, write(tmp_path / "needle_set.json", [{**NEEDLE, **change}]))


@pytest.mark.parametrize("seed", [0, (1 << 32) - 1])
def test_any_seed_draws_characters(seed, tmp_path):
    from ctxext.data.encoding import Encoder
    from ctxext.tasks.retrieval import make_questions
    from hand_made import make_tokenizer

    write(tmp_path / "needle_set.json", [{**NEEDLE, "needle": "{CHAR} saw it.", "character_set": ["Ann"]}])
    (tmp_path / "rand_shuffle").mkdir()
    (tmp_path / "rand_shuffle" / "book.txt").write_text("It rains.\n" * 99)
    settings = Settings(tasks=("nolima",), nolima=tmp_path, seed=seed, depths=(0.5,))
    (task,) = settings.retrieval_tasks()
    ((prompt,),) = make_questions(task, Encoder(make_tokenizer()), 40, [0], settings)
    assert prompt.answers == ("Ann",)


@pytest.mark.parametrize(
    "change",
    [
        *({"tokens": value} for value in ("9", -1, 1.5, float("nan"), None, 10**300)),
        *({"spans": value} for value in (None, "ab", [[1]], [["1", 2]], [[2, 1]], [[3, 4], [1, 2]], [[0, 1e400]])),
        *({"sha256": value} for value in ("", "x" * 64, 5)),
    ],
)
def test_key_tokens(change, tmp_path):
    good = {**SPANS, "spans": [[0, 2], [4, 5]]}
    assert _read_file(write(tmp_path / "keys.jsonl", good))[0].spans == ((0, 2), (4, 5))
    found = message(_read_file, write(tmp_path / "keys.jsonl", good, {**good, **change}))
    assert found.startswith('Line 2 of "FILE"')
    assert f'"{next(iter(change))}' in found


@pytest.mark.parametrize("value", ["Ann", [{"text": ""}], [{"text": None}], [5]])
def test_squad(value, tmp_path):
    question = {"question": "Who?", "answers": value}
    content = {"data": [{"paragraphs": [{"context": "Ann.", "qas": [question]}]}]}
    found = message(read_squad, write(tmp_path / "squad.json", content))
    assert found.startswith('"FILE": "data.0.paragraphs.0.qas.0.answers')


@pytest.mark.thorough
def test_values_of_any_size_are_shown_in_part(tmp_path):
    found = message(read_squad, write(tmp_path / "squad.json", [{"a": "b" * 100_000}] * 1000))
    assert len(found) < 300
    assert Path(tmp_path / "squad.json").stat().st_size > 90_000_000
