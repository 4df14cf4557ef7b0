"""Files of questions: their content, their names and what they replace."""

import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ctxext.api import TrainingData
from ctxext.errors import CtxextError
from ctxext.files.output_directory import OverwriteOptions
from ctxext.finetune import question_file
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.question_file import QuestionOptions, write_questions
from question_texts import UNKNOWN, write_story
from tiny_base import write_records

KEEP = OverwriteOptions()
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' w9 ' + message['content'] + ' </s> ' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant w9 {% endif %}"


@pytest.fixture
def chat_tokenizer(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def stories(tmp_path):
    folder = tmp_path / "stories"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(write_story(100, start=1000 * number), encoding="utf-8")
    return folder


def records_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_file_has_as_many_conversations_as_requested(base, stories, tmp_path):
    options = QuestionOptions(length="400", count=30)
    done = write_questions(base, str(stories), tmp_path / "made" / "q.jsonl", options, overwrite=KEEP)
    records = records_of(done.path)
    assert [{*record} for record in records] == [{"messages"}] * 30
    assert done.counts.num_conversations == 30
    assert done.counts.num_questions == sum(len(record["messages"]) // 2 for record in records)
    assert len({record["messages"][0]["content"] for record in records}) == 30, "the texts are read again"
    again = write_questions(base, str(stories), tmp_path / "again.jsonl", options, overwrite=KEEP)
    assert records_of(again.path) == records
    assert [path.name for path in done.path.parent.iterdir()] == ["q.jsonl"]


def test_a_file_can_be_trained_on(base, stories, tmp_path, chat_tokenizer):
    done = write_questions(
        base, str(stories), tmp_path / "q.jsonl", QuestionOptions(length=400, count=9), overwrite=KEEP
    )
    data = TrainingData((str(done.path),))
    documents = list(data.reader(TrainingOptions())(chat_tokenizer, {400: 1 << 40}))
    assert len(documents) == 9
    assert all(any(document.is_learned) for document in documents)


def test_only_files_of_conversations_are_replaced(base, stories, tmp_path):
    out, options = tmp_path / "q.jsonl", QuestionOptions(length=400, count=2)

    def write(**flags):
        return write_questions(base, str(stories), out, options, overwrite=OverwriteOptions(**flags))

    write()
    with pytest.raises(CtxextError, match="exists"):
        write()
    write(overwrite=True)
    out.write_text('{"text": "mine"}\n')
    with pytest.raises(CtxextError, match="something else than conversations"):
        write(overwrite=True)
    assert out.read_text() == '{"text": "mine"}\n'
    write(overwrite_anything=True)
    assert len(records_of(out)) == 2


@pytest.mark.parametrize(
    ("out", "message", "hint"),
    [
        ("q.json", r'OUT "q.json" is not named NAME.jsonl', "Name it q.json.jsonl."),
        ("folder.jsonl", "is a folder", "Specify a file name."),
    ],
)
def test_other_names_are_refused(base, stories, tmp_path, monkeypatch, out, message, hint):
    monkeypatch.chdir(tmp_path)
    Path("folder.jsonl").mkdir()
    with pytest.raises(CtxextError, match=message) as refused:
        write_questions(base, str(stories), Path(out), QuestionOptions(), overwrite=KEEP)
    assert refused.value.hint == hint


def test_nothing_is_left_of_a_stopped_file(base, stories, tmp_path, monkeypatch):
    def stop(conversation):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return {}

    calls = itertools.count()
    monkeypatch.setattr(question_file, "_as_record", stop)
    with pytest.raises(KeyboardInterrupt):
        write_questions(base, str(stories), tmp_path / "q.jsonl", QuestionOptions(length=400), overwrite=KEEP)
    assert [path.name for path in tmp_path.iterdir()] == ["stories"]


def test_data_without_texts_is_refused(base, tmp_path):
    (tmp_path / "table.csv.txt").write_text(UNKNOWN["table"])
    for data, message in (("demo", '"demo" contains no texts'), (str(tmp_path / "table.csv.txt"), "is not one of")):
        with pytest.raises(CtxextError, match=message):
            write_questions(base, data, tmp_path / "q.jsonl", QuestionOptions(length=400), overwrite=KEEP)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv.txt"]


def test_the_command_suggests_a_training(base, stories, tmp_path, run, chat_tokenizer):
    out = tmp_path / "q.jsonl"
    result = run("questions", base, stories, out, "--length", "400", "--count", "4", "--json")
    assert json.loads(result.stdout)["num_conversations"] == 4
    assert "writing conversations" in result.stderr
    assert "the model has no chat template" in result.stderr
    assert f"Next: ctxext finetune {base} OUT --data {stories} --questions 0.85" in result.stderr
    model = tmp_path / "chat"
    model.mkdir()
    for path in base.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    chat_tokenizer.save_pretrained(model)
    result = run("questions", model, stories, out, "--length", "400", "--count", "4", "--overwrite")
    assert "✓" in result.stdout
    assert f"Next: ctxext finetune {model} OUT --data {out}:0.85 --data {stories}:0.15" in result.stderr
    danish = write_records(tmp_path / "danish.jsonl", [UNKNOWN["Danish"]] * 3 + [write_story(40)])
    result = run("questions", model, danish, out, "--length", "400", "--count", "2", "--overwrite")
    assert "texts in other languages" in result.stderr
