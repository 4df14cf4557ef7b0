"""Which documents are trained on: all parts of the data are seen, by their weights, and the counts are right."""

import gzip
import json
from collections import Counter

import pytest
from transformers import AutoTokenizer

from ctxext.data.records import read_records
from ctxext.errors import CtxextError
from ctxext.finetune.data import write_sequences
from ctxext.finetune.documents import Documents, check_sources
from ctxext.finetune.mixture import Source, parse_source
from ctxext.finetune.options import TrainingOptions
from ctxext.finetune.prepare import data_lines


@pytest.fixture
def tokenizer(base):
    return AutoTokenizer.from_pretrained(base)


def write(path, token, count, length=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = " ".join([f"w{token}"] * length)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(count)))
    return str(path)


def sources(*words):
    return [parse_source(str(word)) for word in words]


def test_every_part_is_seen_and_counted(tmp_path, tokenizer):
    """40 documents in two parts, of which 16 are needed: neither part is passed over."""
    first, second = write(tmp_path / "a.jsonl", 5, 20), write(tmp_path / "b.jsonl", 6, 20)
    options = TrainingOptions(length=50, steps=8, batch_size=4, short_share=0.0).settled(window=50, trained_length=50)
    documents = Documents(sources(first, second), tokenizer)
    report = write_sequences(documents, tmp_path, wanted=options.sequences_wanted(), pack="off", end=1)
    assert (report.num_documents, report.num_in_all) == (16, 40)
    assert (report.num_tokens, report.num_tokens_in_all, report.num_sequences) == (1600, 4000, 32)
    assert data_lines(report, options)[0].startswith("data: 16 of 40 documents, 1,600 of about 4,000 tokens →")
    seen = Counter(document.ids[0] for document, _ in zip(documents, range(16), strict=False))
    assert min(seen[5], seen[6]) >= 4


def test_the_order_is_the_seed_s(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": f"w{number}"}) + "\n" for number in range(2, 42)))
    orders = [[document.ids[0] for document in Documents(sources(path), tokenizer, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(2, 42))
    assert orders[0] != sorted(orders[0])


def test_weights_are_shares_of_the_tokens(tmp_path, tokenizer):
    """However long the documents of each are; a small source is read again until the large one is used up."""
    large, small = write(tmp_path / "a.jsonl", 5, 70, length=100), write(tmp_path / "b.jsonl", 6, 40, length=10)
    tokens = Counter()
    for document in Documents(sources(f"{large}:0.7", f"{small}:0.3"), tokenizer):
        tokens[document.ids[0]] += len(document.ids)
    assert tokens[5] == 7000
    assert abs(tokens[6] - 3000) <= 100


def test_long_documents_come_more_often(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    texts = [" ".join(["w5"] * 100)] * 10 + [" ".join(["w6"] * 10)] * 400
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokens = Counter()
    for document in Documents(sources(path), tokenizer, long_length=50, long_share=0.6):
        tokens[document.ids[0]] += len(document.ids)
    assert tokens[6] == 4000
    assert abs(tokens[5] / (tokens[5] + tokens[6]) - 0.6) < 0.02


def test_a_folder_gives_its_training_split(tmp_path, tokenizer):
    folder = tmp_path / "splits"
    write(folder / "train.jsonl", 5, 3)
    write(folder / "test.jsonl", 6, 3)
    assert {document.ids[0] for document in Documents(sources(folder), tokenizer)} == {5}
    assert {document.ids[0] for document in Documents(sources(folder), tokenizer, splits=("test",))} == {6}
    (folder / "train.jsonl").unlink()
    with pytest.raises(CtxextError, match='no split "train"; it has: test') as caught:
        list(Documents(sources(folder), tokenizer))
    assert caught.value.hint == "Name one: --split test"


def test_a_text_file_in_a_folder_is_one_document(tmp_path):
    for name in ("a.txt", "b.txt", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\ntwo\n\nthree\n")
    found = [record["text"] for _, record in read_records(str(tmp_path), ("train",))]
    assert found == ["one\ntwo\n\nthree\n"] * 3


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
    (tmp_path / "b.json").write_text("[{}, 3]")
    assert [place.split(" of ")[0] for place, _ in read_records(str(tmp_path / "b.json"))] == ["Record 1", "Record 2"]
    (tmp_path / "c.jsonl").write_text("{}\n{broken\n")
    with pytest.raises(CtxextError, match=r"Line 2 of .* is not valid JSON"):
        list(read_records(str(tmp_path / "c.jsonl")))


@pytest.mark.parametrize("name", ["nowhere.jsonl", "./nowhere", "/a/b", "a/b/c", "books.txt"])
def test_a_missing_file_is_not_asked_of_the_hub(name, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(CtxextError, match="There is no file"):
        list(read_records(name))


def test_sources_and_weights(tmp_path):
    (tmp_path / "x:0.5").write_text("")
    assert parse_source("a.jsonl:0.7") == Source("a.jsonl", 0.7)
    assert parse_source(f"{tmp_path}/x:0.5") == Source(f"{tmp_path}/x:0.5")
    assert parse_source("user/name:en") == Source("user/name:en")
    with pytest.raises(CtxextError, match='weight of "a" must be above 0'):
        parse_source("a:0")
    with pytest.raises(CtxextError, match="Some of --data have a weight"):
        check_sources(sources("a:0.5", "b"), None)
    with pytest.raises(CtxextError, match="is streamed"):
        check_sources(sources("user/name"), 0.5)
