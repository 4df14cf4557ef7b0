"""Questions about the texts of a training: their share, their sources, and data for which there are none."""

import dataclasses
from collections import Counter
from importlib import import_module

import pytest
from transformers import AutoTokenizer

import tiny_tables
from ctxext.api import TrainingData, finetune
from ctxext.errors import CtxextError
from ctxext.finetune.data import write_sequences
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.prepare import format_data_lines
from question_texts import PARAGRAPHS, UNKNOWN, write_story
from tiny_base import QUICK, documents_of, write_records

LENGTH = 400


@pytest.fixture
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


@pytest.fixture
def stories(tmp_path):
    return write_records(tmp_path / "stories.jsonl", [write_story(120, start=1000 * number) for number in range(40)])


def tokens_of(documents):
    """The number of tokens of questions and of texts."""
    counts = Counter()
    for document in documents:
        counts[document.is_learned is not None] += len(document.ids)
    return counts


@pytest.mark.parametrize("share", [0.1, 0.5, 0.85])
def test_questions_have_their_share_of_the_tokens(tokenizer, stories, share):
    counts = tokens_of(documents_of(tokenizer, stories, num_needed={LENGTH: 1 << 40}, questions=share))
    assert abs(counts[True] / counts.total() - share) < 0.03


@pytest.mark.parametrize("lengths", [{LENGTH: 60}, {LENGTH: 40, LENGTH // 2: 40}], ids=["one", "two"])
@pytest.mark.parametrize("share", [0.3, 0.8])
def test_questions_have_their_share_of_the_sequences(tokenizer, stories, tmp_path, lengths, share):
    documents = documents_of(tokenizer, stories, num_needed=lengths, questions=share)
    folder = tmp_path / "out"
    folder.mkdir()
    report = write_sequences(documents, folder, num_needed=lengths, pack="off", end=1)
    num_tokens = sum(length * count for length, count in lengths.items())
    assert report.num_sequences == lengths[LENGTH]
    # Padding and the turns' words are not learned; of the texts, each token is.
    num_of_texts = num_tokens - report.questions["num_tokens"]
    assert abs(num_of_texts / num_tokens - (1 - share)) < 0.12


def test_many_documents_supply_a_sequence_each(tokenizer, stories, tmp_path):
    """Also if most sequences are questions: a document supplies its share of the few sequences of texts."""
    documents = documents_of(tokenizer, stories, num_needed={LENGTH: 60}, questions=0.8)
    report = write_sequences(documents, tmp_path, num_needed={LENGTH: 60}, pack="off", end=1)
    assert report.num_documents - report.questions["num_conversations"] >= 10


def test_without_the_option_nothing_changes(tokenizer, stories):
    assert {document.is_learned for document in documents_of(tokenizer, stories, questions=0.0)} == {None}
    assert "questions" not in TrainingData((str(stories),)).describe()


def test_every_source_has_its_weight(tokenizer, tmp_path):
    """Within the texts, and within the texts of the questions."""
    large = write_records(tmp_path / "a.jsonl", [write_story(200, start=1000 * number) for number in range(30)])
    other = write_records(tmp_path / "b.jsonl", [PARAGRAPHS["de"] * 5] * 40)
    documents = documents_of(tokenizer, f"{large}:0.75", f"{other}:0.25", num_needed={LENGTH: 1 << 40}, questions=0.5)
    weights, languages = Counter(), Counter()
    for conversation in documents.iterate_conversations():
        languages[conversation.language] += len(conversation.messages[0]["content"])
        if languages.total() > 600_000:
            break
    assert abs(languages["German"] / languages.total() - 0.25) < 0.06
    for document in documents:
        weights[len(document.ids) if document.is_learned is None else None] += len(document.ids)
    german = max((size for size in weights if size), key=lambda size: size < 1000 and weights[size])
    texts = weights.total() - weights[None]
    assert abs(weights[german] / texts - 0.25) < 0.05


def test_streamed_data_has_its_share_too(tokenizer, monkeypatch):
    """It is read twice, once for each kind, and only as far as needed."""
    read = []

    def records(*_, **__):
        for number in range(3000):
            read.append(number)
            yield f"record {number}", {"text": write_story(60, start=100 * number)}

    monkeypatch.setattr(import_module("ctxext.finetune.documents"), "read_records", records)
    documents = documents_of(tokenizer, "user/stream", num_needed={LENGTH: 100}, questions=0.6)
    counts = tokens_of(document for document, _ in zip(documents, range(300), strict=False))
    assert counts[True] > 0
    assert len(read) < 1500
    read.clear()
    short = documents_of(tokenizer, "user/stream", num_needed={1300: 1 << 20}, questions=0.6)
    counts = tokens_of(document for document, _ in zip(short, range(400), strict=False))
    assert abs(counts[True] / counts.total() - 0.6) < 0.03


def test_questions_repeat_for_the_same_seed(tokenizer, stories):
    first, again, other = (
        [
            list(document.ids)
            for document, _ in zip(
                documents_of(tokenizer, stories, num_needed={LENGTH: 50}, questions=0.5, seed=seed),
                range(60),
                strict=False,
            )
        ]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_counts_of_questions_are_in_the_lines(tokenizer, stories, tmp_path):
    more = write_records(tmp_path / "more.jsonl", [UNKNOWN["Danish"] * 20] * 10)
    options = TrainingOptions(length=LENGTH, steps=30, batch_size=4, short_share=0.0).resolve(
        window=LENGTH, trained_length=LENGTH
    )
    documents = documents_of(
        tokenizer, stories, more, num_needed=options.count_sequences(), questions=0.8, skip_bad_rows=True
    )
    report = write_sequences(documents, tmp_path, num_needed=options.count_sequences(), pack="off", end=1)
    first, second, third, *_ = format_data_lines(report, options)
    counts = report.questions
    assert f"of 50 documents ({100 * (report.num_documents - counts['num_conversations']) / 50:.1f} %)" in first
    conversations = (
        f"and {counts['num_conversations']:,} conversations with {counts['num_questions']:,} questions about"
    )
    assert second.strip().startswith(conversations)
    assert 70 < float(second.rpartition("(")[2].partition(" %")[0]) < 90
    assert third.strip() == f"no questions about {counts['num_unknown']} documents in other languages"


def test_data_without_texts_is_refused(tokenizer, tmp_path, stories):
    chats = write_records(
        tmp_path / "chats.jsonl", [{"messages": [{"role": r, "content": "w2"} for r in ("user", "assistant")]}]
    )
    with pytest.raises(CtxextError, match=r'Line 1 of ".*chats.jsonl" is not a text, so no questions') as refused:
        list(documents_of(tokenizer, stories, chats, questions=0.5))
    assert refused.value.hint == "Use only texts, or remove --questions."
    table = write_records(tmp_path / "table.jsonl", [UNKNOWN["table"]])
    with pytest.raises(CtxextError, match=r'The language of line 1 of ".*table.jsonl" is not one of English'):
        list(documents_of(tokenizer, table, questions=0.5))
    with pytest.raises(CtxextError, match="--questions cannot be combined with --data demo"):
        TrainingData(("demo",), questions=0.5).reader(TrainingOptions())
    with pytest.raises(CtxextError, match="--questions must be a share from 0 to 1"):
        TrainingData((str(stories),), questions=1.0).reader(TrainingOptions())


def test_a_training_records_the_share(base, tmp_path, stories):
    data = TrainingData((str(stories),), questions=0.85)
    options = dataclasses.replace(QUICK, length=128, steps=2, save_every=2, short_share=0.0)
    lines = []
    result = finetune(base, tmp_path / "out", data, options, notify=lines.append)
    assert result.data.questions["num_questions"] > 0
    assert any("questions about them" in line for line in lines)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "stories.jsonl, questions 0.85" in card
    assert data.describe()["questions"] == 0.85


def test_a_masked_model_is_refused(tmp_path, stories):
    base = tiny_tables.make_base(tmp_path, "bert")
    with pytest.raises(CtxextError, match="--questions needs a model that generates text") as refused:
        finetune(base, tmp_path / "out", TrainingData((str(stories),), questions=0.5), tiny_tables.OPTIONS)
    assert refused.value.hint == "Remove --questions."
    assert not (tmp_path / "out").exists()
