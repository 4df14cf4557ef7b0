"""Records to documents: what the loss counts of each."""

import json

import pytest
from transformers import AutoTokenizer

from ctxext.errors import CtxextError
from ctxext.finetune.documents import Document, read_documents

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
    found = AutoTokenizer.from_pretrained(base)
    found.chat_template = TEMPLATE
    return found


def read(tmp_path, tokenizer, *records, **options):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_documents(str(path), tokenizer, **options))


def learned(document):
    return [token for token, is_learned in zip(document.ids, document.is_learned, strict=True) if is_learned]


def test_text_is_learned_whole_and_may_be_cut(tmp_path, tokenizer):
    assert read(tmp_path, tokenizer, {"text": "w2 w3"}) == [Document([2, 3])]


def test_a_completion_is_learned_with_its_end(tmp_path, tokenizer):
    (document,) = read(tmp_path, tokenizer, {"prompt": "w2 w3", "completion": " w4"})
    assert list(document.ids) == [2, 3, 4, 1]
    assert learned(document) == [4, 1]
    (document,) = read(tmp_path, tokenizer, {"prompt": "w2 w3", "completion": " w4"}, learn="all")
    assert document == Document([2, 3, 4, 1])


def test_what_the_assistant_says_is_learned(tmp_path, tokenizer):
    (document,) = read(tmp_path, tokenizer, {"messages": CHAT})
    whole = tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    assert list(document.ids) == whole
    assert learned(document) == [4, 1, 6, 7, 1]


def test_parquet_has_the_same_fields(tmp_path, tokenizer):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"prompt": ["w2"], "completion": ["w3"], "id": [1]})
    parquet.write_table(table, tmp_path / "data.parquet")
    (document,) = read_documents(str(tmp_path / "data.parquet"), tokenizer)
    assert learned(document) == [3, 1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "w2"}, 'Line 1 .* has no "text", no "prompt" with a "completion", and no "messages"'),
        ([1], 'has no "text"'),
        ({"messages": CHAT[:1]}, "no message of the assistant"),
        ({"messages": [{"role": "assistant"}]}, "cannot be rendered"),
    ],
)
def test_other_records_are_refused(tmp_path, tokenizer, record, message):
    with pytest.raises(CtxextError, match=message):
        read(tmp_path, tokenizer, record)


def test_a_template_that_changes_what_was_said_is_refused(tmp_path, tokenizer):
    """As those that drop earlier thoughts do: the marks would lie on the wrong tokens."""
    tokenizer.chat_template = "{{ messages | length }} " + TEMPLATE
    with pytest.raises(CtxextError, match="otherwise once others follow"):
        read(tmp_path, tokenizer, {"messages": CHAT})
    tokenizer.chat_template = None
    with pytest.raises(CtxextError, match="no chat template"):
        read(tmp_path, tokenizer, {"messages": CHAT})
