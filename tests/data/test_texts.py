"""What texts, records and pieces of prompts become, against a plain count of it."""

import gzip
import lzma
import random
import re
import zipfile
from itertools import accumulate, islice

import pytest

from ctxext.data import prose, records, texts
from ctxext.data.encoding import Encoder, explain_tokenizer_errors, split_question
from ctxext.data.prompt import _hide
from ctxext.data.records import read_records
from ctxext.data.texts import read_corpus, read_texts
from ctxext.errors import CtxextError
from hand_made import make_tokenizer


class Letters:
    """An encoder to which every letter is a token, and which begins every document with two of its own."""

    def get_start_tokens(self):
        return [0, 1]

    def encode_document(self, text):
        return [0, 1, *map(ord, text)]

    def encode_pieces(self, given):
        return [[*map(ord, text)] for text in given]


def test_pieces_that_begin_alike_are_remembered_apart():
    sentences = list(islice(prose.sentences(random.Random(3)), 30))
    pieces = [" " + sentence[:size] for sentence in sentences for size in (5, 19, 20, 21, 40)]
    encoder, chosen = Encoder(make_tokenizer()), make_tokenizer()
    wanted = [list(chosen(piece, add_special_tokens=False)["input_ids"]) for piece in pieces]
    assert [encoder.encode_piece(piece) for piece in pieces] == wanted
    assert Encoder(chosen).encode_pieces(pieces) == encoder.encode_pieces(pieces) == wanted


@pytest.mark.parametrize(
    ("question", "asked", "lead_in"),
    [
        ("What is it? It is", "What is it?", "It is"),
        ("Who? And what? It is", "Who? And what?", "It is"),
        ("One\nTwo\nThree", "One\nTwo", "Three"),
        ("Who? \nIt is", "Who?", "It is"),
        ("First\nWho is it? It", "First\nWho is it?", "It"),
        ("Tell me", "Tell me", ""),
        ("What?", "What?", ""),
    ],
)
def test_a_question_ends_at_its_last_mark(question, asked, lead_in):
    assert split_question(question) == (asked, lead_in)


@pytest.mark.parametrize("seed", range(30))
def test_needles_are_inserted_at_the_nearest_boundary_in_tokens(seed):
    """Units are of very different sizes; needles of one place keep their order."""
    rng = random.Random(seed)
    units = [[unit] * rng.choice((1, 2, 30)) for unit in range(rng.randrange(1, 8))]
    depths = [rng.choice((0.0, 1.0, rng.random())) for _ in range(4)]
    tokens = _hide(units, [[-1], [-2], [-3], [-4]], depths)
    ends = [0, *accumulate(map(len, units))]
    assert [token for token in tokens if token >= 0] == [token for unit in units for token in unit]
    for number, depth in enumerate(depths, 1):
        before = sum(token >= 0 for token in tokens[: tokens.index(-number)])
        assert before in ends
        assert abs(before - depth * ends[-1]) == min(abs(end - depth * ends[-1]) for end in ends)
    by_place = sorted(range(4), key=lambda at: min(ends, key=lambda end: abs(end - depths[at] * ends[-1])))
    assert [token for token in tokens if token < 0] == [-1 - at for at in by_place]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_which_records_become_documents(monkeypatch, count):
    sizes = [7, 8, 3, 13, 14, 20, 8]  # Letters; two tokens of the tokenizer's stand before them.
    monkeypatch.setattr(texts, "read_texts", lambda _: iter("x" * size for size in sizes))
    documents = read_corpus("a/set", Letters(), count=count, length=10, most=15, seed=0)
    kept = [size + 2 for size in sizes if size + 2 >= 10]
    assert list(map(len, documents)) == [min(size, 15) for size in kept[:count]]


def test_no_record_is_long_enough(monkeypatch):
    monkeypatch.setattr(texts, "read_texts", lambda _: iter(["xx", "xxxx"]))
    with pytest.raises(CtxextError, match="no document of 10 tokens; the longest has 6"):
        read_corpus("a/set", Letters(), count=1, length=10, most=15, seed=0)


@pytest.mark.parametrize(("length", "num_documents"), [(1, 4), (7, 4), (8, 3), (10, 3)])
def test_a_text_is_cut_into_pieces_that_all_begin_as_documents_do(tmp_path, length, num_documents):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz123")
    documents = read_corpus(str(path), Letters(), count=9, length=length, most=10, seed=0)
    assert all(ids[:2] == [0, 1] for ids in documents)
    read = "".join(chr(token) for ids in documents for token in ids[2:])
    assert read == "abcdefghijklmnopqrstuvwxyz123"[: 8 * num_documents]
    assert list(map(len, documents)) == [10, 10, 10, 7][:num_documents]


def test_prose_differs_by_document_and_by_seed_alone():
    def made(seed):
        return read_corpus(None, Letters(), count=3, length=1, most=500, seed=seed)

    assert made(1) == made(1)
    assert len({tuple(ids) for ids in made(1) + made(2)}) == 6
    assert {len(ids) for ids in made(1)} == {500}


def test_a_haystack_starts_anywhere_and_wraps_around():
    units = ["a", "b", "c", "d"]
    begun = set()
    for seed in range(40):
        sentences = list(islice(prose.stream_sentences(units, random.Random(seed)), 11))
        start = units.index(sentences[0].strip())
        assert sentences == [" " + units[(start + at) % 4] for at in range(11)]
        begun.add(start)
    assert begun == {0, 1, 2, 3}


def test_sentences_have_their_articles_and_numbers_their_digits():
    text = " ".join(islice(prose.sentences(random.Random(0)), 3000))
    assert re.search(r"\b[Aa]n [aeiou]", text)
    assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text)
    numbers = {prose.random_number(random.Random(seed), 2) for seed in range(2000)}
    assert numbers == {str(number) for number in range(10, 100)}


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_what_is_streamed_is_shuffled_by_any_seed(monkeypatch, seed):
    class Stream(list):
        def shuffle(self, *, seed, buffer_size):
            return [{"seed": seed, "buffer": buffer_size}]

    asked = []
    given = Stream([{"text": "a"}])
    monkeypatch.setattr(records, "open_data_set", lambda *words: asked.append(words) or given)
    read = [record for _, record in read_records("me/set", ("train",), seed=seed)]
    assert read == ([{"text": "a"}] if seed is None else [{"seed": seed, "buffer": 1000}])
    assert asked == [("me/set", ("train",))]


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        (("train", "validation", "test"), "test"),
        (("train", "validation"), "validation"),
        (("train",), "train"),
        (("other",), "other"),
    ],
)
def test_texts_come_from_the_split_that_is_held_out(tmp_path, there, chosen):
    for split in there:
        (tmp_path / f"{split}.jsonl").write_text(f'{{"text": "{split}"}}\n')
    expected = chosen if chosen != "other" else "other"
    assert list(texts.read_texts(str(tmp_path))) == [expected]


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv"])
def test_a_line_that_ends_at_the_limit_is_whole(tmp_path, monkeypatch, name):
    lines = ["text\n", "abcd\n"] if name == "x.csv" else ['{"text": "abcd"}\n'] * 2
    (tmp_path / name).write_text("".join(lines))
    monkeypatch.setattr(records, "_MOST_LINE", len(lines[0]))
    read = [record for _, record in read_records(str(tmp_path / name))]
    assert read == [{"text": "abcd"}] * (1 if name == "x.csv" else 2)
    monkeypatch.setattr(records, "_MOST_LINE", len(lines[0]) - 1)
    with pytest.raises(CtxextError, match=r"Line 1 of .* is longer than"):
        list(read_records(str(tmp_path / name)))


def test_cells_of_parquet_without_a_value_are_no_fields(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": ["a", None], "more": [None, 2]})
    __import__("pyarrow.parquet").parquet.write_table(table, tmp_path / "x.parquet")
    records = list(read_records(str(tmp_path / "x.parquet")))
    assert [record for _, record in records] == [{"text": "a"}, {"more": 2}]
    assert [place.split(" of ")[0] for place, _ in records] == ["Row 1", "Row 2"]


def test_a_tokenizer_panic_is_reported_and_an_exit_is_not_caught():
    class PanicException(BaseException):
        pass

    for error in (PanicException("index\nout"), ValueError("index\nout"), KeyError("index")):
        with pytest.raises(CtxextError, match=r"^It fails: '?index'?$"), explain_tokenizer_errors("It fails"):
            raise error
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), explain_tokenizer_errors("It fails"):
            raise error
    with pytest.raises(CtxextError, match="as it was"), explain_tokenizer_errors("It fails"):
        raise CtxextError("as it was")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "--data is empty"),
        (" ", "--data is empty"),
        (",", "--data is empty"),
        ("one.txt,", "contains an empty name"),
        (",one.txt", "contains an empty name"),
        (":", 'There is no file ":"'),
        (":x", 'There is no file ":x"'),
        ("a b", 'There is no file "a b"'),
        ("https://me:hunter2@host/x.jsonl", "is a URL"),
        ("hf://me:hunter2@datasets/x", "is a URL"),
        ("s3:/key:hunter2@bucket/x", "is a URL"),
        ("https://host/x.jsonl?token=hunter2", "is a URL"),
        ("me:hunter2@host", "There is no file"),
        ("one.txt,https://me:hunter2@host/x.jsonl", "is a URL"),
    ],
)
def test_data_that_name_nothing_are_refused_without_their_secrets(data, message, run, tmp_path, monkeypatch):
    """Issue: an empty name was the current folder, ":" an internal error, and a password was in report.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("Text. " * 2000)
    commands = (
        ("eval", "demo", "--data", data, "--out", "report"),
        ("eval", "demo", "--data", data, "--task", "perplexity", "--out", "report"),
        ("compare", "demo", "--target-length", "2k", "--data", data),
        ("search", "demo", "best.yaml", "--target-length", "2k", "--data", data),
        ("finetune", "demo", "out", "--data", data, "--dry-run"),
        ("finetune", "demo", "out", "--data", "one.txt", "--eval-data", data, "--dry-run"),
    )
    for command in commands:
        if command[0] != "eval" and "," in data:
            continue
        result = run(*command)
        assert isinstance(result.exception, CtxextError), (command, result.exception, result.output)
        assert message in result.exception.message, command
        assert "hunter2" not in result.output + str(result.exception) + result.exception.hint
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]


RECORDS = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.jsonl.zip", 'is a ".zip" file'),
        ("x.zip", 'is a ".zip" file'),
        ("x.json.lz4", 'is a ".lz4" file'),
        ("x.jsonl.lzma", 'is a ".lzma" file'),
        ("x.csv.tar", 'is a ".tar" file'),
        ("x.tar.gz", 'is a ".tar" file'),
        ("x.tgz", 'is a ".tgz" file'),
        ("x.jsonl.bak", 'instead of ".jsonl"'),
        ("x.jsonl.1", 'instead of ".jsonl"'),
        ("x.parquet.part", 'instead of ".parquet"'),
        ("records", "contains JSON lines"),
        ("records.data", "contains JSON lines"),
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_records_are_never_read_as_one_text(name, message, is_folder, tmp_path):
    """Issue: `x.jsonl.zip` was trained on as one text of raw JSON."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / name
    if name.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.jsonl", RECORDS)
    elif name.endswith(".lzma"):
        path.write_bytes(lzma.compress(RECORDS.encode(), lzma.FORMAT_ALONE))
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(RECORDS.encode()))
    else:
        path.write_text(RECORDS)
    with pytest.raises(CtxextError, match=re.escape(message)):
        list(read_texts(str(folder if is_folder else path)))
