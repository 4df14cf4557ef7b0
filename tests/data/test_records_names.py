"""A name is a name: patterns, protocols and other spellings in the name of a file or folder are characters."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ctxext.data.records import files_of, read_records
from ctxext.errors import CtxextError
from ctxext.finetune.documents import TrainingData
from ctxext.tasks.settings import Settings

NAMES = {
    **{"data[1]": "data1", "data[!2]": "data1", "a*": "ab", "a?": "ab", "{a,b}": "a", "**": "x"},
    **{"simplecache::d": "d", "filecache::d": "d", "file:d": "d", "memory:d": "d", "zip::d": "d", "a::b": "b"},
    **{
        "a%20b": "a b",
        "e\u0301": "\u00e9",
        "\u00e9": "e\u0301",
        "~": "x",
        "~root": "x",
        "-x": "x",
        "@x": "x",
        "#x": "x",
    },
    **{"a:0.5": "a", "a,b": "a", " a": "a", "$HOME": "x", "a&b": "a", "train": "test", "a'b": "a", 'a"b': "a"},
}
"""Names, each with the name of a neighbour that it must not be taken for."""


@pytest.fixture(params=NAMES)
def name(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return request.param


def read(place, splits=("train",)):
    return [record["text"] for _, record in read_records(place, splits)]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".txt", ".csv", ".parquet"])
def test_a_file(name, suffix):
    import pandas

    for content in (NAMES[name], name):  # In a file system without capitals or accents, the name's content stays.
        table, path = pandas.DataFrame({"text": [content]}), content + suffix
        if suffix == ".txt":
            Path(path).write_text(content)
        elif suffix == ".parquet":
            with Path(path).open("wb") as file:
                table.to_parquet(file)
        elif suffix == ".csv":
            Path(path).write_text(table.to_csv(index=False))
        else:
            with Path(path).open("wb") as file:
                table.to_json(file, orient="records", lines=True, compression="gzip" if ".gz" in suffix else None)
    assert read(name + suffix) == [name]
    assert read(str(Path(name + suffix).resolve())) == [name]


def test_a_folder_and_the_files_in_it(name):
    for folder in (NAMES[name], name):
        Path(folder).mkdir()
        for file in ("train.jsonl", f"{name}.jsonl"):
            (Path(folder) / file).write_text(json.dumps({"text": folder}) + "\n")
    assert {*read(name)} == {name}
    assert {*read(f"{name}/")} == {name}
    assert {*read(str(Path(name).resolve()))} == {name}


def test_training_data(name):
    for file in (NAMES[name], name):
        Path(f"{file}.jsonl").write_text(json.dumps({"text": file}) + "\n")
    for word, weight in ((f"{name}.jsonl", None), (f"{name}.jsonl:0.7", 0.7)):
        (source,) = TrainingData((word,)).sources()
        assert source.weight == weight
        assert [record["text"] for _, record in source.read(("train",), 0)] == [name]
    assert TrainingData((f"{name}.jsonl",)).describe()["name"] == f"{name}.jsonl"


def test_files_of_tasks(name):
    for file in (NAMES[name], name):
        Path(f"{file}.txt").write_text("\n".join(f"{file}{number}" for number in range(60)))
        Path(f"{file}.json").write_text(json.dumps({"text": f"{file}."}))
    words, essays = Settings(tasks=("ruler",), words=Path(f"{name}.txt"), essays=Path(f"{name}.json")), None
    options = {key: value for task in words.retrieval_tasks() for key, value in vars(task).items()}
    assert {re.sub(r"\d+$", "", word) for word in options["words"].words} == {re.sub(r"\d+$", "", name.strip())}
    (essays,) = {task.essays for task in words.retrieval_tasks() if getattr(task, "essays", ())}
    assert essays == (f"{' '.join(name.split())}.",)
    Path(f"{name}.md").write_text(name)
    assert Settings(tasks=("perplexity",), data=f"{name}.md").to_dict()["data"]["name"] == f"{name}.md"


def test_texts_of_several_kinds_keep_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in (" a.txt", "a.txt", "b.txt"):
        Path(file).write_text(file)
    from ctxext.data.texts import kinds_of_text

    assert [*kinds_of_text(" a.txt,b.txt").values()] == [" a.txt", "b.txt"]
    assert [*kinds_of_text("a.txt, b.txt").values()] == ["a.txt", "b.txt"]


def test_a_folder_is_not_the_data_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("squad").mkdir()
    with pytest.raises(CtxextError, match='"squad" is on this machine'):
        read("squad:plain_text")


LAYOUTS = (
    ("train.jsonl", "test.jsonl", "other.jsonl"),
    ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/dev-00000-of-00001.parquet"),
    ("train/a.txt", "validation/b.txt", "c.txt"),
    ("a.txt", "sub/b.txt", ".hidden/c.txt", "__pycache__/d.txt", ".e.txt", "README.md", "sub/config.json"),
    ("my_train_file.csv", "my-test.csv", "sub/val.1.csv"),
    ("training/eval.txt", "eval/x.txt"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_files_of_a_split_are_those_of_the_datasets_library(layout, tmp_path):
    from datasets.data_files import DataFilesDict, get_data_patterns

    for file in layout:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x")
    expected = DataFilesDict.from_patterns(get_data_patterns(str(tmp_path)), base_path=str(tmp_path))
    for split, files in expected.items():
        assert files_of(tmp_path, (str(split),)) == [*map(Path, dict.fromkeys(files))]
    copy = tmp_path.with_name(f"{tmp_path.name} [1]::x")
    shutil.copytree(tmp_path, copy)
    for split, files in expected.items():
        assert files_of(copy, (str(split),)) == [
            copy / Path(file).relative_to(tmp_path) for file in dict.fromkeys(files)
        ]
