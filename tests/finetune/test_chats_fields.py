"""Fields of messages: each is read, or named as ignored."""

import json

import pytest

from chat_tokenizers import answer, tokenizer_for, user
from ctxext.errors import CtxextError
from ctxext.finetune.data import write_sequences
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.prepare import format_data_lines
from tiny_base import documents_of, write_records

KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}


def chat(name="messages", /, **fields):
    role, content = KEYS[name]
    messages = [user("Q1?"), answer("Bad.", **fields), user("Q2?"), answer("Good.")]
    return {name: [{role: m.pop("role"), content: m.pop("content"), **m} for m in messages]}


def read(tmp_path, *records, template="qwen2_5", **more):
    """Return the learned text of each record, and the counts of the data."""
    tokenizer = tokenizer_for(template)
    path = write_records(tmp_path / "data.jsonl", records)
    texts = []
    for document in documents_of(tokenizer, path, **more):
        marks = zip(document.ids, document.is_learned, strict=True)
        texts.append(tokenizer.decode([token for token, is_learned in marks if is_learned]))
    documents = documents_of(tokenizer, path, **more)
    return texts, write_sequences(documents, tmp_path, num_needed={512: 9}, pack="off", end=0)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in ("loss", "train", "weight", "loss_scale", "loss_mask", "trainable")
        for value in (0, 1)
    ]
    + [("loss", False), ("loss", True), ("loss", 0.0), ("train_on_turn", False), ("masked", False), ("masked", True)],
)
def test_a_flag_selects_the_messages_to_learn(name, field, value, tmp_path):
    texts, report = read(tmp_path, chat(name, **{field: value}))
    is_learned = bool(value) != (field == "masked")
    assert [("Bad" in text, "Good" in text) for text in texts] == [(is_learned, True)]
    assert report.unused_fields == {}


@pytest.mark.parametrize("field", ["loss", "weight", "masked", "trainable"])
@pytest.mark.parametrize("value", ["false", 0.5, 2, [], {}, float("nan")])
def test_a_flag_of_another_type_is_an_error_with_its_line(field, value, tmp_path):
    with pytest.raises(CtxextError, match=rf'^Line 2 of ".*data.jsonl" has a {field} of ".*" in message 2'):
        read(tmp_path, chat(), chat(**{field: value}))


def test_contradictory_flags_are_an_error(tmp_path):
    with pytest.raises(CtxextError, match=r"^Line 1 of .* has contradictory weight, loss in message 2"):
        read(tmp_path, chat(weight=1, loss=False))
    assert "Bad" not in read(tmp_path, chat(masked=True, loss=False))[0][0]


IGNORED = {
    **{"training_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}], "name": "Bot", "id": 7},
    **{"audio": {"id": "x"}, "label": "bad", "mask": True, "extra": {"a": [1]}},
}


@pytest.mark.parametrize("name", KEYS)
def test_every_other_field_is_named(name, tmp_path):
    texts, report = read(tmp_path, chat(name, **IGNORED), chat(name))
    assert len(texts) == 2
    assert report.unused_fields == {f"{field} of messages": 1 for field in IGNORED}
    options = TrainingOptions(length=512, steps=1, batch_size=1).resolve(window=512, trained_length=512)
    (line,) = [line for line in format_data_lines(report, options) if "ignored fields" in line]
    assert "audio of messages, extra of messages" in line


def test_a_field_that_the_template_renders_is_not_named(tmp_path):
    """Llama 3's template ignores names, and gpt-oss's needs those of tools."""
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {}}}
    result = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "4"}
    record = {"messages": [user("Q?"), answer("", tool_calls=[call]), result, answer("4.")]}
    for template, expected in (("llama3", {"name", "tool_call_id"}), ("deepseekv3", {"name", "tool_call_id"})):
        assert {*read(tmp_path, record, template=template)[1].unused_fields} == {f"{f} of messages" for f in expected}
    tokenizer = tokenizer_for("x", "{% for m in messages %}{{ m.role }}{{ m.tag }}:{{ m.content }}</s>{% endfor %}")
    path = write_records(tmp_path / "tagged.jsonl", [{"messages": [user("Q?"), answer("A.", tag="x", other="y")]}])
    report = write_sequences(documents_of(tokenizer, path), tmp_path, num_needed={64: 1}, pack="off", end=0)
    assert report.unused_fields == {"other of messages": 1}


def test_fields_of_other_roles_and_of_parts_are_named(tmp_path):
    part = {"type": "text", "text": "Good.", "cache_control": {"type": "ephemeral"}}
    record = {"messages": [{**user("Q?"), "train": True}, answer([part])]}
    assert {*read(tmp_path, record)[1].unused_fields} == {"train of messages", "cache_control of messages"}
    mixed = {"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A.", "content": "Other."}]}
    assert read(tmp_path, mixed)[1].unused_fields == {"content of messages": 1}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": 5}, "has a name of type"),
        ({"reasoning_content": ["Hm."]}, "has a reasoning_content of type"),
        ({"function_call": "add"}, "has a function_call of type"),
        ({"refusal": ["No."]}, "has a refusal of type"),
        ({"content": [{"type": "image", "text": "x"}]}, 'has content of type "image"'),
        ({"content": [{"type": "thinking", "thinking": "x"}]}, 'has content of type "thinking"'),
        ({"content": None, "audio": {"id": "x"}}, 'has no "content"'),
        ({"content": None, "loss": True}, 'has no "content"'),
        ({"content": True}, 'has content of type "bool"'),
    ],
)
def test_a_field_of_another_type_is_an_error_with_its_line(fields, problem, tmp_path):
    messages = [user("Q?"), {**answer("A."), **fields}]
    with pytest.raises(CtxextError) as error:
        read(tmp_path, {"messages": messages})
    assert error.value.message.startswith(f'Line 1 of "{tmp_path / "data.jsonl"}" {problem}')


@pytest.mark.parametrize("content", [None, [{"type": "refusal", "refusal": "No."}]])
def test_a_refusal_is_the_text_of_an_answer(content, tmp_path):
    fields = {"refusal": "No."} if content is None else {}
    texts, report = read(tmp_path, {"messages": [user("Q?"), answer(content, **fields)]})
    assert "No." in texts[0]
    assert report.unused_fields == {}


def test_many_different_fields_take_little_time(tmp_path):
    """Fields that are not rendered take one more rendering, however many there are."""
    record = {"messages": [user("Q?"), answer("A.", **{f"field{number}": number for number in range(3000)})]}
    assert len(json.dumps(record)) > 40_000
    assert len(read(tmp_path, record)[1].unused_fields) == 3000
