"""More of what strangers leave about: configurations of every family, files that are no files, names, options."""

import contextlib
import gzip
import json
import os
from pathlib import Path

import typer
from hypothesis import given
from hypothesis import strategies as st

from ctxext.cli.app import app
from hostile import FILES, LENGTHS, LLAMA, ODD, TENSORS, a_folder, family_configs, fuzzing, weights, write
from test_fuzz import METHOD, check

fuzz = fuzzing(8)
WHOLE = {
    "config.json": json.dumps(LLAMA).encode(),
    "model.safetensors": weights(TENSORS),
    "README.md": b"---\nlicense: mit\n---\n# x\n",
    "tokenizer.json": b"{}",
    "ctxext.json": b"{}",
    **{name: json.dumps(content).encode() for name, content in FILES.items()},
}
NAMES: tuple[str, ...] = ("a b", "it's", 'say "x"', "a\nb", "-x", "--help", "é\u202e", "x" * 250, "[bold]", "%s{}")
NAMES += ("~", "a;b", "\udcff", ".x", "demo", "in.y")
NUMBERS = st.one_of(st.sampled_from(LENGTHS), ODD.map(str), st.integers().map(str), st.text(max_size=9))
SAFE = NUMBERS.map(lambda text: text.replace("/", "_").replace("\x00", "_"))
"""What may be taken for a path stays in the folder."""


@fuzz
@given(family_configs(), METHOD, st.booleans())
def test_families(config, method, replace):
    with a_folder() as place:
        write(place / "in", {"config.json": json.dumps(config).encode(), "model.safetensors": weights(TENSORS)})
        check(place, "inspect", place / "in")
        words = ["convert", place / "in", "-m", method, *(["--replace-scaling"] * replace)]
        check(place, *words, *([] if method == "mspoe" else ["--factor", 4]), "--dry-run")
        check(place, "verify", place / "in", "--no-load")


def swap(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "nowhere":
        path.symlink_to("nothing")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.write_bytes({"empty": b"", "gz": gzip.compress(content), "utf16": content.decode().encode("utf-16")}[kind])


@fuzz
@given(
    st.sampled_from(sorted(set(WHOLE) - {"model.safetensors"})) | st.just("model.safetensors"),
    st.sampled_from(["folder", "loop", "nowhere", "pipe", "device", "large", "empty", "gz"]),
    st.sampled_from(["yarn", "self-extend"]),
)
def test_files_that_are_something_else(name, kind, method):
    with a_folder() as place:
        write(place / "in", WHOLE)
        swap(place / "in" / name, kind)
        words = ("convert", place / "in", place / "out", "-m", method, "--factor", 4, "--no-verify")
        check(place, *words, "--dry-run")
        check(place, *words, may_write=("out",))
        check(place, "inspect", place / "in")
        check(place, "verify", place / "in", "--no-load")
        check(place, "push", place / "in", "me/x", "--dry-run")
        check(place, "convert", place / "in", "--recipe", place / "in" / name, "--dry-run")


@fuzz
@given(st.sampled_from(NAMES), st.sampled_from(NAMES), st.booleans())
def test_names(source, out, is_inside):
    with a_folder() as place:
        write(place / source, WHOLE)
        (place / source / "tokenizer.json").unlink()
        if is_inside:
            (place / source / out).write_bytes(b"x")
        words = ("convert", place / source, place / f"{out}2"[-250:], "-m", "yarn", "--factor", 4, "--no-verify")
        check(place, *words, may_write=(f"{out}2"[-250:],))
        for word in ("inspect", "verify", "push"):
            more = {"verify": ["--no-load"], "push": ["me/x", "--dry-run"]}.get(word, [])
            check(place, word, place / source, *more)
        check(place, "inspect", source)
        check(place, "convert", source, out, "-m", "yarn", "--factor", 4, "--dry-run")


COMMANDS = typer.main.get_command(app).commands
LIGHT = {
    "inspect": ["in"],
    "convert": ["in", "-m", "yarn", "--dry-run"],
    "verify": ["in", "--no-load"],
    "push": ["in", "me/x", "--dry-run"],
    "methods": [],
    "env": [],
}
OPTIONS = [
    (name, max(option.opts, key=len), bool(getattr(option, "is_flag", False)))
    for name in LIGHT
    for option in COMMANDS[name].params
    if option.opts[0].startswith("-") and "--help" not in option.opts
]


@fuzz
@given(st.lists(st.tuples(st.sampled_from(OPTIONS), SAFE), min_size=1, max_size=3))
def test_options_of_all_kinds(chosen):
    command = chosen[0][0][0]
    words = [option if is_flag else f"{option}={value}" for (name, option, is_flag), value in chosen if name == command]
    with a_folder() as place, contextlib.chdir(place):
        write(place / "in", WHOLE)
        (place / "in" / "tokenizer.json").unlink()
        check(place, command, *LIGHT[command], *words)


def test_every_option_is_tried():
    assert len(OPTIONS) > 60
    assert {name for name, _, _ in OPTIONS} == set(LIGHT)
