"""Texts that are no text, keys that nobody writes, and secrets in every place of a command line."""

import contextlib
import json

from hypothesis import given
from hypothesis import strategies as st

from hostile import FILES, LLAMA, TENSORS, a_folder, fuzzing, weights, write
from test_fuzz import check

fuzz = fuzzing(15)
SECRET = "TopSecretTopSecret"
SECRETS = st.sampled_from(
    [
        f"hf_{SECRET}",
        f"api_org_{SECRET}",
        f"--hf_{SECRET}",
        f"--x=hf_{SECRET}",
        f"postgresql://me:{SECRET}@host/db",
        f"postgresql://me:{SECRET}/x@host:PORT/",
        f"mysql://host/db?password={SECRET}",
        f"https://host/x?api_key={SECRET}&y=1",
    ]
)
LINES: tuple[tuple[str, ...], ...] = (
    (),
    ("inspect", "in"),
    ("convert", "in", "-m", "yarn", "--factor", "4", "--dry-run"),
    ("verify", "in", "--no-load"),
    ("push", "in", "me/x", "--dry-run"),
    ("methods",),
    ("search", "in", "best.yaml", "--target-length", "256", "--trials", "1", "--storage"),
    ("eval", "in", "--task", "nothing"),
    ("merge", "in", "adapter", "out"),
)
WHOLE = {"config.json": LLAMA, **FILES, "tokenizer.json": {"truncation": {"max_length": 128}, "x": "é"}}
KINDS = ("mark", "latin", "utf16", "half", "nan", "empty", "escaped", "nested", "twice", "cut")


@fuzz
@given(st.sampled_from(LINES), SECRETS, st.integers(0, 9), st.booleans())
def test_secrets_in_any_place(line, secret, at, is_told):
    words = [*line[:at], secret, *line[at:]]
    if is_told:  # A token of no known form, which the line names once and holds again.
        words = [*line[:at], SECRET, *line[at:], "--token", SECRET]
    with a_folder() as place, contextlib.chdir(place):
        write(place / "in", {name: json.dumps(content).encode() for name, content in WHOLE.items()})
        check(place, *words, never=(SECRET,))


def as_nobody_writes_it(content: dict, kind: str) -> bytes:
    """A JSON file in an encoding, with keys or with numbers that a reader may stumble over."""
    text = json.dumps(content, ensure_ascii=False)
    if kind in ("nan", "empty", "half", "nested"):
        more = {"nan": {"x": float("nan")}, "empty": {"": {"": 1}}, "half": {"x": "\ud800"}, "nested": {"x": content}}
        return json.dumps({**more[kind], **content}).encode()
    if kind == "escaped":
        return text.replace('"t', '"\\u0074').replace('"m', '"\\u006d').encode()
    if kind == "twice":
        return f"{text[:-1]}, {text[1:]}".encode()
    encoded = {"mark": "\ufeff" + text, "cut": text[: len(text) // 2]}.get(kind, text)
    return encoded.encode({"latin": "latin-1", "utf16": "utf-16"}.get(kind, "utf-8"))


@fuzz
@given(st.sampled_from(sorted(WHOLE)), st.sampled_from(KINDS), st.sampled_from(["yarn", "self-extend"]))
def test_texts_in_unusual_notations(name, kind, method):
    files = {other: json.dumps(content).encode() for other, content in WHOLE.items()}
    files |= {name: as_nobody_writes_it(WHOLE[name], kind), "model.safetensors": weights(TENSORS)}
    with a_folder() as place:
        write(place / "in", files)
        check(place, "inspect", place / "in")
        words = ("convert", place / "in", place / "out", "-m", method, "--factor", 4, "--no-verify")
        check(place, *words, may_write=("out",))
        if (place / "out").exists():
            check(place, "verify", place / "out", "--no-load", never=("✗",))
