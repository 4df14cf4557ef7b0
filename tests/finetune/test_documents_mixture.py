"""Choice of documents: all parts of the data are used by their weights, and the counts are right."""

import csv
import gzip
import json
import random
from collections import Counter
from importlib import import_module

import numpy as np
import pytest
from transformers import AutoTokenizer

from ctxext.data.records import read_records
from ctxext.errors import CtxextError
from ctxext.finetune.batches import Sequences
from ctxext.finetune.data import START, write_sequences
from ctxext.finetune.documents import Documents, Source, TrainingData, parse_source
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.prepare import format_data_lines
from tiny_base import documents_of, write_records


@pytest.fixture
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def write(path, token, count, length=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(write_records(path, [" ".join([f"w{token}"] * length)] * count))


def test_every_part_is_seen_and_counted(tmp_path, tokenizer):
    """40 documents in two parts, and 32 needed sequences: neither part is skipped."""
    first, second = write(tmp_path / "a.jsonl", 5, 20), write(tmp_path / "b.jsonl", 6, 20)
    options = TrainingOptions(length=50, steps=8, batch_size=4, short_share=0.0).resolve(window=50, trained_length=50)
    num_needed = options.count_sequences()
    documents = documents_of(tokenizer, first, second, num_needed=num_needed)
    report = write_sequences(documents, tmp_path, num_needed=num_needed, pack="off", end=1)
    assert (report.num_documents, report.num_used, report.num_in_all) == (32, 32, 40)
    assert (report.num_tokens, report.num_tokens_in_all, report.num_sequences) == (3200, 4000, 32)
    line = "data: 32 of 40 documents (80.0 %), 3,200 of about 4,000 tokens → 32 sequences of 50; 0 tokens dropped"
    assert format_data_lines(report, options) == [line]
    again = documents_of(tokenizer, first, second, num_needed=num_needed)
    seen = Counter(document.ids[0] for document, _ in zip(again, range(32), strict=False))
    assert min(seen[5], seen[6]) >= 8


def books(path, lengths, seed=0):
    """Documents with their number in each token."""
    rng = random.Random(seed)
    texts = [" ".join([f"w{2 + number % 62}", f"w{2 + number // 62}"] * (length // 2)) for number, length in lengths]
    rng.shuffle(texts)
    return write_records(path, texts)


def written(folder, tokenizer, path, **chosen):
    given = {"length": 16, "batch_size": 1, "short_share": 0.0, **chosen}
    options = TrainingOptions(**given).resolve(window=16, trained_length=16)
    num_needed = options.count_sequences()
    documents = documents_of(tokenizer, path, seed=options.seed, num_needed=num_needed)
    folder.mkdir(exist_ok=True)
    report = write_sequences(documents, folder, num_needed=num_needed, pack=options.pack, end=1)
    return report, options, np.fromfile(folder / "sequences-16.bin", dtype=np.int32).reshape(-1, 16) & (START - 1)


def names_of(rows):
    return [tuple(row[2:4].tolist()) for row in rows]


@pytest.mark.parametrize("pack", ["off", "run-on", "restart"])
def test_a_short_run_sees_many_documents(tmp_path, tokenizer, pack):
    """1,500 documents and 100 steps of one sequence: consecutive pieces used very few documents."""
    rng = random.Random(1)
    lengths = [(number, 2 * int(rng.lognormvariate(4, 1)) + 32) for number in range(1500)]
    path = books(tmp_path / "books.jsonl", lengths)
    report, options, rows = written(tmp_path / "one", tokenizer, path, steps=100, pack=pack)
    assert len(rows) == 100
    assert len(set(names_of(rows))) >= 90
    assert report.num_used >= 90
    lines = format_data_lines(report, options)
    assert f"of 1,500 documents ({100 * report.num_documents / 1500:.1f} %)" in lines[0]
    assert "      less than a tenth of the documents is used" in "\n".join(lines)
    _, _, again = written(tmp_path / "two", tokenizer, path, steps=100, pack=pack)
    assert (rows == again).all()
    # Two processes never use the same sequence: a batch is divided by position.
    data = Sequences(tmp_path / "one", options)
    seen = [names_of(data[step]["input_ids"].numpy())[0] for step in range(100)]
    assert Counter(seen) == Counter(names_of(rows))


@pytest.mark.thorough
def test_documents_are_sampled_by_their_length(tmp_path, tokenizer):
    """A tenth of the documents has ten times the tokens, so about half of the sequences."""
    lengths = [(number, 1600 if number % 10 == 0 else 160) for number in range(600)]
    path = books(tmp_path / "books.jsonl", lengths)
    shares = []
    for seed in range(5):
        _, _, rows = written(tmp_path / f"{seed}", tokenizer, path, steps=60, seed=seed)
        numbers = [first - 2 + 62 * (second - 2) for first, second in (row[2:4].tolist() for row in rows)]
        shares.append(sum(number % 10 == 0 for number in numbers) / len(numbers))
    expected = 60 * 1600 / (60 * 1600 + 540 * 160)
    assert abs(sum(shares) / 5 - expected) < 0.12


def test_each_document_gives_its_share_of_the_sequences(tmp_path, tokenizer):
    """A quarter of the data is needed: a quarter of every document is used, not all of the first ones."""
    path = write_records(tmp_path / "data.jsonl", [" ".join([f"w{10 + number}"] * 640) for number in range(10)])
    report, _, rows = written(tmp_path / "out", tokenizer, path, steps=100)
    assert (report.num_sequences, report.num_used) == (100, 10)
    assert sorted(Counter(int(row[-1]) for row in rows).values()) == [10] * 10


def test_only_the_first_piece_of_a_document_begins_it(tmp_path, tokenizer):
    """A piece from the middle of a document continues it: positions and attention do not restart."""
    texts = [" ".join(f"w{2 + number}" for number in range(48))] * 20
    path, num_needed = write_records(tmp_path / "data.jsonl", texts), {16: 30}
    write_sequences(
        documents_of(tokenizer, path, num_needed=num_needed), tmp_path, num_needed=num_needed, pack="off", end=1
    )
    rows = np.fromfile(tmp_path / "sequences-16.bin", dtype=np.int32).reshape(-1, 16)
    first = int(tokenizer("w2", add_special_tokens=False)["input_ids"][0])
    is_first = (rows[:, 0] & (START - 1)) == first
    assert 0 < is_first.sum() < len(rows) == 30
    assert (((rows[:, 0] & START) != 0) == is_first).all()
    assert not (rows[:, 1:] & START).any()


def test_pieces_are_distinct_and_all_are_there_when_needed(tmp_path, tokenizer):
    """If the share was too small, because short documents have no sequences, the rest of the long ones is used."""
    long = [" ".join(f"w{2 + (start + token) % 60}" for token in range(160)) for start in range(4)]
    short = [" ".join(["w7"] * 8)] * 200
    path = write_records(tmp_path / "mixed.jsonl", [*long, *short])
    report, _, rows = written(tmp_path / "out", tokenizer, path, steps=30)
    assert report.num_sequences == 30
    assert report.num_dropped <= 200 * 8
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"sequences-16.bin", "sequences.json"}
    assert len({tuple(row) for row in rows}) == 30


def test_a_stream_is_sampled_too(tmp_path, tokenizer, monkeypatch):
    """Its size is unknown: a document of average length supplies one sequence, a longer one more."""
    records = [{"text": " ".join([f"w{2 + number % 62}", f"w{2 + number // 62}"] * 160)} for number in range(400)]
    monkeypatch.setattr(
        import_module("ctxext.finetune.documents"),
        "read_records",
        lambda *_, **__: ((f"record {number}", record) for number, record in enumerate(records)),
    )
    _, _, rows = written(tmp_path / "out", tokenizer, "user/stream", steps=100)
    assert len(set(names_of(rows))) >= 90


@pytest.mark.thorough
def test_what_the_run_does_not_need_is_not_copied(tmp_path, tokenizer, monkeypatch):
    path = books(tmp_path / "books.jsonl", [(number, 64) for number in range(600)])
    copied = []
    real = Documents._copy

    def copy(self, group, numbers, path):
        copied.append(len(numbers))
        return real(self, group, numbers, path)

    monkeypatch.setattr(Documents, "_copy", copy)
    written(tmp_path / "out", tokenizer, path, steps=20)
    assert copied == [20 + 64]
    seen = sorted(tuple(document.ids) for document in documents_of(tokenizer, path, num_needed={16: 20}))
    everything = sorted(tuple(document.ids) for document in documents_of(tokenizer, path))
    assert seen == everything
    assert copied[1:] == [84, 600, 600]


def test_the_order_is_the_seed_s(tmp_path, tokenizer):
    path = write_records(tmp_path / "data.jsonl", [f"w{number}" for number in range(2, 42)])
    orders = [[document.ids[0] for document in documents_of(tokenizer, path, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(2, 42))


def test_weights_are_shares_of_the_tokens(tmp_path, tokenizer):
    """For any document length; a small source is read again, in another order, until the large one is used up."""
    large = write(tmp_path / "a.jsonl", 5, 70, length=100)
    small = write_records(tmp_path / "b.jsonl", [f"w6 w{10 + number} " * 5 for number in range(40)])
    tokens, again = Counter(), []
    for document in documents_of(tokenizer, f"{large}:0.7", f"{small}:0.3"):
        tokens[document.ids[0]] += len(document.ids)
        again += [document.ids[1]] if document.ids[0] == 6 else []
    assert tokens[5] == 7000
    assert abs(tokens[6] - 3000) <= 100
    assert sorted(again[:40]) == sorted(again[40:80])
    assert again[:40] != again[40:80]


def test_a_folder_gives_its_training_split(tmp_path, tokenizer):
    folder = tmp_path / "splits"
    write(folder / "train.jsonl", 5, 3)
    write(folder / "test.jsonl", 6, 3)
    assert {document.ids[0] for document in documents_of(tokenizer, folder)} == {5}
    assert {document.ids[0] for document in documents_of(tokenizer, folder, split="test")} == {6}
    (folder / "train.jsonl").unlink()
    with pytest.raises(CtxextError, match=r'no split "train"\. Splits: test') as caught:
        list(documents_of(tokenizer, folder))
    assert caught.value.hint == "Choose one: --split test"


def test_a_page_named_test_is_not_all_that_a_folder_gives(tmp_path, tokenizer):
    folder = tmp_path / "manual"
    for word, name in enumerate(("errors", "test", "zlib"), start=5):
        write(folder / f"{name}.jsonl", word, 3)
    assert {document.ids[0] for document in documents_of(tokenizer, folder)} == {5, 7}
    assert {document.ids[0] for document in documents_of(tokenizer, folder, split="test")} == {6}


def test_a_text_file_in_a_folder_is_one_document(tmp_path):
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\ntwo\n\nthree\n")
    texts = [record["text"] for _, record in read_records(str(tmp_path), ("train",))]
    assert texts == ["one\ntwo\n\nthree\n"] * 3


RECORDS = [{"text": "w2 – ü"}, {"text": "w3"}]


def write_zst(path):
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(zstandard.compress(lines().encode()))


def lines():
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)


WRITERS = {
    "data.jsonl": lambda path: path.write_text(lines(), encoding="utf-8-sig"),
    "data.json": lambda path: path.write_text(json.dumps(RECORDS, indent=2)),
    "data.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines().encode())),
    "data.jsonl.zst": write_zst,
    "data.csv": lambda path: path.write_text("text\nw2 – ü\nw3\n", encoding="utf-8-sig"),
    "data.tsv": lambda path: path.write_text("n\ttext\n1\tw2 – ü\n2\tw3\n"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_records(tmp_path, name):
    WRITERS[name](tmp_path / name)
    assert [record["text"] for _, record in read_records(str(tmp_path / name))] == ["w2 – ü", "w3"]


def test_places_name_the_line(tmp_path):
    (tmp_path / "a.csv").write_text('text\n"one\ntwo"\nthree\n')
    assert [place.split(" of ")[0] for place, _ in read_records(str(tmp_path / "a.csv"))] == ["Line 3", "Line 4"]
    # Python limits a field to 128 KB, less than a long document.
    long, limit = "word " * 60_000, csv.field_size_limit(1 << 17)
    try:
        for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
            csv.field_size_limit(1 << 17)
            (tmp_path / f"long.{suffix}").write_text(f'text{delimiter}more\n"{long}"{delimiter}x\n')
            assert [record["text"] for _, record in read_records(str(tmp_path / f"long.{suffix}"))] == [long]
    finally:
        csv.field_size_limit(limit)
    (tmp_path / "b.json").write_text("[{}, 3]")
    assert [place.split(" of ")[0] for place, _ in read_records(str(tmp_path / "b.json"))] == ["Record 1", "Record 2"]


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/a/b", "a/b/c", "books.txt"])
def test_a_missing_file_is_not_requested_from_the_hub(name, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(CtxextError, match="There is no file"):
        list(read_records(name))


def test_what_cannot_be_mixed_is_refused():
    assert parse_source("user/name:en") == Source("user/name:en")
    with pytest.raises(CtxextError, match="Only some of --data have a weight"):
        TrainingData(("a:0.5", "b")).reader(TrainingOptions())
