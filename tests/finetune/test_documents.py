"""Conversion of records to documents, and their learned tokens."""

import json

import pytest
from transformers import AutoTokenizer

from ctxext.errors import CtxextError
from ctxext.finetune.chats import RecordReader
from ctxext.finetune.documents import Document, TrainingData, to_training_data
from ctxext.finetune.options import TrainingOptions
from tiny_base import documents_of, write_records

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' w9 ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant w9 {% endif %}"
)
CHAT = [
    {"role": "user", "content": "w2 w3"},
    {"role": "assistant", "content": "w4"},
    {"role": "user", "content": "w5"},
    {"role": "assistant", "content": "w6 w7"},
]


@pytest.fixture
def tokenizer(base):
    tokenizer_with_template = AutoTokenizer.from_pretrained(base)
    tokenizer_with_template.chat_template = TEMPLATE
    return tokenizer_with_template


def read(tmp_path, tokenizer, *records, **options):
    return list(documents_of(tokenizer, write_records(tmp_path / "data.jsonl", records), **options))


def learned(document):
    return [token for token, is_learned in zip(document.ids, document.is_learned, strict=True) if is_learned]


def test_a_completion_is_learned_with_its_end(tmp_path, tokenizer):
    (document,) = read(tmp_path, tokenizer, {"prompt": "w2 w3", "completion": " w4"})
    assert list(document.ids) == [2, 3, 4, 1]
    assert learned(document) == [4, 1]
    (document,) = read(tmp_path, tokenizer, {"prompt": "w2 w3", "completion": " w4"}, learn="all")
    assert document == Document([2, 3, 4, 1])


def test_messages_of_the_assistant_are_learned(tmp_path, tokenizer):
    (document,) = read(tmp_path, tokenizer, {"messages": CHAT})
    whole = tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    assert list(document.ids) == whole
    assert learned(document) == [4, 1, 6, 7, 1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "w2"},
            'Line 1 .*unknown format: it has "prompt", but needs "text", or "messages", or "prompt" with',
        ),
        ([1], "it has no fields"),
        ({"content": "a text", "id": "7"}, 'it has "content", "id", but needs'),
        ({"text": None}, 'unknown format: its "text" is null'),
        ({"prompt": CHAT[:1], "completion": "b"}, "of different types"),
        ({"messages": [*CHAT[:1], {"content": "b"}]}, 'has no "role" in message 2'),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 'type "image" in message 1'),
        (
            {"messages": [{**CHAT[1], "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "invalid JSON arguments in message 1",
        ),
        ({"messages": CHAT, "tools": "none"}, "tools that are not a list"),
        ({"text": "w2", "messages": CHAT}, "fits several formats .text, chat."),
        ({"prompt": "w2", "chosen": "w3", "rejected": "w4"}, "another task .preferences."),
        ({"prompt": "w2", "completion": "w3", "label": False}, "another task .judged answers."),
        ({"messages": [{"role": "user", "content": "w2", "weight": 0.5}]}, 'weight of "0.5" in message 1'),
        ({"conversations": [{"from": "owner", "value": "w2"}]}, 'role "owner" in message 1'),
        ({"messages": [*CHAT[:1], {**CHAT[1], "weight": 0}]}, "no assistant message to learn"),
        ({"messages": CHAT[:1]}, "no assistant message"),
        ({"messages": [{"role": "assistant"}]}, 'no "content" in message 1'),
        ({"messages": [{"role": "assistant", "content": "w2"}]}, "cannot be rendered"),
    ],
)
def test_other_records_are_refused(tmp_path, tokenizer, record, message):
    with pytest.raises(CtxextError, match=message) as refused:
        read(tmp_path, tokenizer, record)
    ways = ("--skip-bad-rows", "--text-field content", 'Use a "prompt" and a "completion"')
    assert any(way in refused.value.hint for way in ways)


def test_a_template_that_changes_messages_is_refused(tmp_path, tokenizer):
    """For example those that drop earlier thoughts: the wrong tokens would be marked."""
    tokenizer.chat_template = "{{ messages | length }} " + TEMPLATE
    with pytest.raises(CtxextError, match="no answer that the chat template renders the same as during generation"):
        read(tmp_path, tokenizer, {"messages": CHAT})
    tokenizer.chat_template = None
    with pytest.raises(CtxextError, match="no chat template"):
        read(tmp_path, tokenizer, {"messages": CHAT})


def test_messages_of_weight_zero_are_read_and_not_learned(tmp_path, tokenizer):
    weighted = [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[2], {**CHAT[3], "weight": 1}]
    (document,) = read(tmp_path, tokenizer, {"messages": weighted})
    (plain,) = read(tmp_path, tokenizer, {"messages": CHAT})
    assert document.ids == plain.ids
    assert learned(document) == [6, 7, 1]


def test_records_of_alpaca_become_messages_with_a_template(tmp_path, tokenizer):
    asked = {"instruction": "w2 w3", "input": "", "output": "w4"}
    assert read(tmp_path, tokenizer, asked) == read(tmp_path, tokenizer, {"messages": CHAT[:2]})
    tokenizer.chat_template = None
    (document,) = read(tmp_path, tokenizer, asked)
    assert learned(document) == [4, 1]


def test_bad_records_are_counted_on_request(tmp_path, tokenizer):
    rows = [{"text": "w2"}, {"txt": "w3"}, {"messages": [{"role": "assistant"}]}, {"text": "w4", "id": 7}]
    documents = documents_of(tokenizer, write_records(tmp_path / "data.jsonl", rows), skip_bad_rows=True)
    assert sorted(list(document.ids) for document in documents) == [[2], [4]]
    assert documents.reader.num_bad == 2
    assert "Line 2" in documents.reader.first_bad
    assert documents.reader.unused == {"id": 1}


def test_the_text_may_be_in_another_field(tmp_path, tokenizer):
    assert read(tmp_path, tokenizer, {"content": "w2 w3"}, text_field="content") == [Document([2, 3])]
    both = {"text": "w2", "messages": CHAT}
    assert read(tmp_path, tokenizer, both, record_format="text") == [Document([2])]
    with pytest.raises(CtxextError, match='is not alpaca: it has "text", but needs "instruction" with "output"'):
        read(tmp_path, tokenizer, {"text": "w2"}, record_format="alpaca")


def test_data_in_memory_is_read_as_a_file_with_the_same_records(tmp_path, tokenizer):
    records = [{"prompt": "w2 w3", "completion": " w4"}, {"text": "w5 w6 w7"}, {"messages": CHAT}]
    path = write_records(tmp_path / "data.jsonl", records)
    options, wanted = TrainingOptions(length=4), {4: 2}
    forms = [
        path,
        str(path),
        [path],
        TrainingData((str(path),)),
        records,
        ["w5 w6 w7"],
        (text for text in ["w5 w6 w7"]),
    ]
    of_file, *others = [list(to_training_data(form).reader(options)(tokenizer, wanted)) for form in forms]
    assert others[:4] == [of_file] * 4
    assert len(of_file) == 3
    assert others[4:] == [[Document([5, 6, 7])]] * 2
    descriptions = [to_training_data(form).describe() for form in (["w5"], [{"text": "w5"}], ["w6"])]
    assert descriptions[0] == descriptions[1] != descriptions[2]
    assert descriptions[0]["name"] == "1 record"
    with pytest.raises(CtxextError, match="Record 2 of the data has an unknown format"):
        list(to_training_data([{"text": "w5"}, {"body": "w5"}]).reader(options)(tokenizer, wanted))
    with pytest.raises(CtxextError, match=r'data\.jsonl" in a list is read as text, but is the name of a file'):
        to_training_data([str(path)])
    for wrong in ([], [path, "w5"], [7]):
        with pytest.raises(CtxextError, match="A list of data must contain"):
            to_training_data(wrong)
    demo = TrainingData(("demo",)).reader(TrainingOptions(learn="all"))(tokenizer, {8: 1})
    assert next(iter(demo)).is_learned is None
    with pytest.raises(CtxextError, match="named or in memory, not both"):
        TrainingData(("demo",), records=({"text": "w5"},)).reader(options)


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOLD = {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}
RECORDS = [
    ({"text": "a", "id": 1}, {"text": "a"}, {"id"}),
    ({"prompt": "a", "completion": "b", "x": 1}, {"prompt": "a", "completion": "b"}, {"x"}),
    (
        {"messages": MESSAGES, "tools": [{"f": 1}], "x": 1},
        {"messages": [{**one, "weight": 1} for one in MESSAGES], "tools": [{"f": 1}]},
        {"x"},
    ),
    (
        {"messages": [{**MESSAGES[1], "train": False, "name": None, "call": 2}]},
        {"messages": [{**MESSAGES[1], "weight": 0, "call": 2}]},
        set(),
    ),
    (
        {"conversations": [{"from": one, "value": one} for one in ("human", "gpt", "chatgpt", "bing", "system")]},
        {
            "messages": [
                {"role": role, "content": one, "weight": 1}
                for role, one in zip(
                    ("user", *["assistant"] * 3, "system"), ("human", "gpt", "chatgpt", "bing", "system"), strict=True
                )
            ]
        },
        set(),
    ),
    *(
        (
            {"messages": [{"role": "assistant", **said}], "tools": json.dumps([{"name": "f"}])},
            {"messages": [{"role": "assistant", "weight": 1, **read}], "tools": [{"name": "f"}]},
            set(),
        )
        for said, read in (
            ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": "ab"}),
            ({"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}),
            ({"content": "", "tool_calls": json.dumps([TOLD])}, {"content": "", "tool_calls": [CALL]}),
        )
    ),
]


@pytest.mark.parametrize(("record", "read", "unused"), RECORDS)
def test_records_in_the_documented_fields(record, read, unused):
    reader = RecordReader()
    assert reader.read(record, "line 1") == read
    assert set(reader.unused) == unused


def test_alpaca_s_wording_with_and_without_an_input():
    reader = RecordReader()
    bare, full = (
        reader.read({"instruction": "Do.", "output": "Done.", **more}, "line 1") for more in ({}, {"input": "This."})
    )
    assert bare["prompt"].endswith("request.\n\n### Instruction:\nDo.\n\n### Response:\n")
    assert full["prompt"].endswith("### Instruction:\nDo.\n\n### Input:\nThis.\n\n### Response:\n")
    assert "further context" in full["prompt"]
    assert "further context" not in bare["prompt"]
    assert [one["messages"][0]["content"] for one in (bare, full)] == ["Do.", "Do.\n\nThis."]
    assert {one["completion"] for one in (bare, full)} == {"Done."}
    assert not reader.unused
