"""What strangers wrote, before the commands that load models: adapters, data, options, journals, studies, reports.

Each runs in a fork of a process that has loaded everything (`tests/kills/fork_server.py`), so that processor's time and
memory are its own: below ten seconds, and below a gigabyte beyond what is loaded. What needs no torch runs in a fork of
a process without, with a limit of a gigabyte in all.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forks import Server, lay_models
from hostile import BAD, LOOKING, ODD, TENSORS, TEXTS, a_folder, checkpoints, fuzzing, mutated, weights, write

pytestmark = pytest.mark.slow
SECONDS, BYTES = 10, 1 << 30
fuzz = fuzzing(3)
TRAINED = ("--length", "64", "--steps", "1", "--batch-size", "2", "--rank", "2", "--save-every", "1", "-q")
ASKED = ("-t", "passkey", "--lengths", "200", "--samples", "1", "--depths", "1", "-q")
TALK = [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w3"}]
ROW = {"text": "w2 w3 w4 " * 40, "messages": TALK}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server(LOOKING)
    yield started
    started.end()


@pytest.fixture(scope="module")
def light() -> Iterator[Server]:
    started = Server(LOOKING, light=True)
    yield started
    started.end()


@pytest.fixture(scope="module")
def made(server, tmp_path_factory) -> Path:
    """A base with an adapter, a report, a study, and a training that was stopped."""
    place = lay_models(tmp_path_factory.mktemp("made"))
    searched = ("--target-length", "640", "--trials", "1", "--samples", "1", "--checked", "2", "--keep-short", "1")
    for words in (
        ["finetune", place / "base", place / "tuned", "--data", place / "numbers.jsonl", *TRAINED, "--no-merge"],
        ["eval", place / "tiny", *ASKED, "--out", place / "report"],
        ["search", place / "tiny", place / "best.yaml", *searched, "-q"],
    ):
        done = server(words)
        assert done["code"] == 0, done["said"]
    words = ["finetune", place / "base", place / "whole", "--data", place / "numbers.jsonl", *TRAINED]
    whole = server(words)
    words[2] = place / "stopped"
    stopped = server(words, events=whole["events"] // 2)
    assert stopped["code"] == -9, whole
    assert (place / "stopped.training" / "settings.json").is_file()
    return place


def check(server: Server, place: Path, *words: object, may_write: tuple[str, ...] = (), **given: object) -> None:
    """Run a command line and hold the invariant."""
    before = set(place.rglob("*"))
    done = server(list(words), **{"in": str(place)}, seconds=120, **given)
    said = done["said"]
    assert done["code"] in (0, 1, 2), said[-3000:]
    assert not [bad for bad in BAD if bad in said], said[-3000:]
    if done["code"] == 1 and words[0] != "verify":
        assert "error: " in said, said[-3000:]
        after = said[said.rindex("error: ") :]
        assert after.count("\n") <= 2, after
    assert done["busy"] < SECONDS, done
    assert done["grown"] < BYTES, done
    new = [path.relative_to(place) for path in place.rglob("*") if path not in before]
    assert not [path for path in new if not path.parts[0].startswith(may_write)], new


def lines(content: list[object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in content).encode("utf-8", "surrogatepass")


TEXT = st.one_of(
    st.sampled_from(TEXTS), st.text(max_size=40), st.binary(max_size=40).map(lambda b: b.decode("latin-1"))
).map(lambda text: text.encode("utf-8", "surrogatepass"))
ROWS = mutated([ROW] * 3).map(lambda rows: lines(rows) if isinstance(rows, list) else lines([rows]))


@fuzz
@given(st.data(), st.sampled_from(["config", "header", "bytes"]))
def test_adapters(server, made, data, kind):
    with a_folder() as place:
        folder = place / "adapter"
        shutil.copytree(made / "tuned" / "adapter", folder)
        config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        if kind == "config":
            config.write_text(json.dumps(data.draw(mutated(json.loads(config.read_text())))))
        elif kind == "header":
            tensors.write_bytes(weights(data.draw(mutated(TENSORS))))
        else:
            path = data.draw(st.sampled_from([config, tensors]))
            content = path.read_bytes()
            cut = data.draw(st.integers(0, len(content)))
            rest = content[cut + data.draw(st.integers(0, 9)) :]
            path.write_bytes(content[:cut] + data.draw(st.binary(max_size=9)) + rest)
        check(server, place, "merge", made / "base", folder, place / "out", may_write=("out",))


@fuzz
@given(st.one_of(TEXT, ROWS), st.sampled_from(["jsonl", "json", "txt", "parquet", "csv", "yaml"]))
def test_training_data(server, made, content, suffix):
    with a_folder() as place:
        (place / f"data.{suffix}").write_bytes(content)
        words = ("finetune", made / "base", place / "out", "--data", place / f"data.{suffix}", *TRAINED)
        check(server, place, *words, may_write=("out",))


RUN = {"steps": 1, "rank": 2, "data": ["x.jsonl"], "learning-rate": 1e-3, "merge": True, "keep-short": True}
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 2}


@fuzz
@given(st.one_of(mutated(RUN), mutated(ACCELERATE), mutated({**RUN, "fsdp_config": ACCELERATE}), TEXT))
def test_options(server, made, content):
    with a_folder() as place:
        text = content if isinstance(content, bytes) else yaml.safe_dump(content).encode("utf-8", "surrogatepass")
        (place / "run.yaml").write_bytes(text)
        words = ("finetune", made / "base", place / "out", "--config", place / "run.yaml")
        check(server, place, *words, "--data", made / "numbers.jsonl", *TRAINED, may_write=("out",))


@fuzz
@given(st.data())
def test_unfinished_trainings(server, made, data):
    with a_folder() as place:
        shutil.copytree(made / "stopped.training", place / "out.training")
        saved = [path for path in sorted((place / "out.training").rglob("*")) if path.suffix in (".json", ".jsonl")]
        path = data.draw(st.sampled_from(saved))
        changed(path, data)
        words = ("finetune", made / "base", place / "out", "--data", made / "numbers.jsonl", *TRAINED, "--resume")
        check(server, place, *words, may_write=("out",))


@fuzz
@given(st.data())
def test_unfinished_evaluations(server, made, data):
    with a_folder() as place:
        shutil.copytree(made / "report", place / "report")
        changed(place / "report" / "cells.jsonl", data)
        words = ("eval", made / "tiny", *ASKED, "--out", place / "report", "--resume")
        check(server, place, *words, may_write=("report",))


@fuzz
@given(st.one_of(TEXT, ROWS), st.sampled_from(["txt", "jsonl"]), st.sampled_from(["perplexity", "documents"]))
def test_broken_texts_for_tasks(server, made, content, suffix, task):
    with a_folder() as place:
        (place / f"data.{suffix}").write_bytes(content)
        option = "--data" if task == "perplexity" else "--documents"
        words = ("eval", made / "tiny", "-t", task, option, place / f"data.{suffix}", "--lengths", "200")
        check(server, place, *words, "--samples", 1, "--out", place / "out", "-q", may_write=("out",))


@fuzz
@given(st.data())
def test_studies(server, made, data):
    with a_folder() as place:
        shutil.copy(made / "best.db", place / "best.db")
        if data.draw(st.booleans()):
            content = (place / "best.db").read_bytes()
            cut = data.draw(st.integers(0, len(content)))
            (place / "best.db").write_bytes(content[:cut] + data.draw(st.binary(max_size=99)) + content[cut + 99 :])
        else:
            with sqlite3.connect(place / "best.db") as base:
                table = data.draw(st.sampled_from(["study_user_attributes", "trial_user_attributes"]))
                rows = base.execute(f"select key, value_json from {table}").fetchall()
                key, value = data.draw(st.sampled_from(rows))
                value = json.dumps(data.draw(st.one_of(mutated(json.loads(value)), ODD)))
                base.execute(f"update {table} set value_json = ? where key = ?", (value, key))
            base.close()
        words = ("search", made / "tiny", place / "best.yaml", "--target-length", 640, "--trials", 1, "--samples", 1)
        check(server, place, *words, "--checked", 2, "--keep-short", 1, "--resume", "-q", may_write=("best",))


@fuzz
@given(st.data())
def test_reports(light, made, data):
    with a_folder() as place:
        shutil.copytree(made / "report", place / "report")
        changed(place / "report" / "report.json", data)
        words = ("push", made / "base", "me/x", "--report", place / "report", "--dry-run")
        check(light, place, *words, limits={"RLIMIT_AS": BYTES})


@fuzz
@given(checkpoints(), st.sampled_from(["yarn", "ntk", "self-extend", "mspoe"]))
def test_checkpoints_within_a_gigabyte(light, files, method):
    with a_folder() as place:
        write(place / "in", files)
        limits = {"RLIMIT_AS": BYTES}
        for words in (["inspect", place / "in"], ["verify", place / "in", "--no-load"]):
            check(light, place, *words, limits=limits)
        words = ["convert", place / "in", place / "out", "-m", method, *([] if method == "mspoe" else ["--factor", 4])]
        words += ["--head-order", "fixed"] if method == "mspoe" else []
        check(light, place, *words, "--no-verify", limits=limits, may_write=("out",))


@fuzz
@given(checkpoints(large=False))
def test_checkpoints_that_are_to_be_loaded(server, made, files):
    """Weights that fit none of these configurations: a load must fail in one line, or not be tried."""
    with a_folder() as place:
        write(place / "in", files)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(made / "base" / name, place / "in" / name)
        check(server, place, "eval", place / "in", *ASKED, "--out", place / "out", may_write=("out",))
        words = ("finetune", place / "in", place / "out2", "--data", made / "numbers.jsonl", *TRAINED)
        check(server, place, *words, may_write=("out",))


def changed(path: Path, data: st.DataObject) -> None:
    """Mutate a JSON file, or one line of a file of lines; or its bytes."""
    content = path.read_text()
    if not data.draw(st.integers(0, 3)):
        cut = data.draw(st.integers(0, len(content)))
        path.write_text(content[:cut] + data.draw(st.sampled_from(TEXTS[:3])) + content[cut + 3 :])
    elif path.suffix == ".jsonl":
        rows = content.splitlines()
        number = data.draw(st.integers(0, len(rows) - 1))
        rows[number] = json.dumps(data.draw(mutated(json.loads(rows[number]))))
        path.write_text("\n".join(rows) + "\n")
    else:
        path.write_text(json.dumps(data.draw(mutated(json.loads(content)))))
