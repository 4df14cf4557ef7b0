"""The strict reader: one line with file, key, the value and what was expected, and no hang on anything."""

import json
import math
import os
import sys

import pytest

from ctxext.api import Recipe, convert, load_recipe, verify
from ctxext.errors import CtxextError
from ctxext.files.strict import in_markdown, parse_json, parse_yaml, read_text
from ctxext.methods import Yarn
from small_llama import read_json

YARN = Recipe([Yarn(factor=4)])
# Of 9^4 words: enough to see that it is refused, and few enough for a reader that would not.
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abc", "bcd", strict=True)
)


def nested(levels, inside="", begin="[", end="]") -> str:
    return begin * levels + inside + end * levels


def shown(value) -> str:
    """A test's name holds what of a text can be typed."""
    return "".join(filter(str.isalnum, value[:24].encode("ascii", "ignore").decode())) if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', 'key "a" twice'),
        ('{"x": 1, "a": 1, "b": 1, "b": 2, "a": 2}', 'key "b" twice'),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('[{"\\udfff": 1}]', "lone surrogate"),
        (nested(65), "more than 64 levels"),
        (nested(65, '"\\u0041"'), "more than 64 levels"),
        (nested(33, "1", '{"a":[', "]}"), "more than 64 levels"),
        ("[" * 200_000, "more than 64 levels|not valid JSON"),
        ("1" * 401, "a number with 401 digits"),
        ("1" * 5000, "a number with 5000 digits"),
        ('{"a":\n ', "not valid JSON: Expecting value in line 2"),
    ],
    ids=shown,
)
def test_invalid_json_is_refused(text, message):
    with pytest.raises(CtxextError, match=message) as caught:
        parse_json(text, "x.json")
    assert caught.value.message.startswith('"x.json" ')


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 1.5, null, "é", {"b": true}], "c": {"a": "a"}}',
        nested(64),
        nested(64, '"\\u0041"'),
        nested(32, "1", '{"a":[', "]}"),
        json.dumps([[]] * 100),
        json.dumps("\U0001f600"),
        "1" * 400,
    ],
    ids=shown,
)
def test_valid_json_is_read_as_by_the_standard_library(text):
    assert parse_json(text, "x") == json.loads(text)


def test_a_mark_of_the_byte_order_is_no_content():
    assert parse_json('\ufeff{"a": Infinity}', "x") == {"a": math.inf}


def aliased(count) -> str:
    return f"a: &a 1\nb: [{', '.join(['*a'] * count)}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (aliased(17), "has more than 16 YAML aliases"),
        (BOMB, "has more than 16 YAML aliases"),
        ("a: 1\na: 2", 'key "a" twice'),
        ("x: 1\na: 1\nb: 1\nb: 2\na: 2", 'key "b" twice'),
        (nested(65), "more than 64 levels"),
        (nested(500, begin="[\n"), "more than 64 levels"),
        ("a: &a " + nested(40) + "\nb: " + nested(40, "*a"), "more than 64 levels"),
        ("a: [", "not valid YAML"),
        ("a: !!int ''", "not valid YAML"),
        ("a: !!bool maybe", "not valid YAML: 'maybe'"),
        ("a: 2001-99-99", "not valid YAML: month must be in 1..12"),
        ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ('a: "\\ud800"', "lone surrogate"),
        ("a: &a [*a]", "more than 64 levels"),
    ],
    ids=shown,
)
def test_invalid_yaml_is_refused(text, message):
    with pytest.raises(CtxextError, match=message) as caught:
        parse_yaml(text, "x.yaml")
    assert caught.value.message.startswith('"x.yaml" ')


@pytest.mark.parametrize(
    ("length", "message"), [(4_000_000, "not valid YAML"), (4_000_001, "larger than the limit of 4 MB")]
)
def test_the_largest_yaml_that_is_looked_at(length, message):
    with pytest.raises(CtxextError, match=message):
        parse_yaml("\x01" * length, "x.yaml")  # Its first character is refused, without a look at the others.


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a: &x [1]\nb: *x\nc: {a: 1}", {"a": [1], "b": [1], "c": {"a": 1}}),
        (aliased(16), {"a": 1, "b": [1] * 16}),
        (nested(64), json.loads(nested(64))),
        (json.dumps([[]] * 100), [[]] * 100),
    ],
    ids=shown,
)
def test_valid_yaml_is_read_as_by_the_library(text, content):
    assert parse_yaml(text, "x") == content


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "notes.txt", "recipe.yaml"])
def test_only_regular_files_are_read(kind, name, llama, tmp_path, our_processes):
    """In a process with a time limit, as what is tested against is that it never ends."""
    path = llama / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    words = ["--recipe", str(path)] if name == "recipe.yaml" else ["-m", "pi", "--factor", "2"]
    source = "demo" if name == "recipe.yaml" else str(llama)
    command = [sys.executable, "-m", "ctxext", "convert", source, "out", *words]
    result = our_processes.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, "Traceback" in result.stderr) == (1, False), result.stderr
    assert not (tmp_path / "out").exists()


def test_recipes_are_read_strictly(tmp_path):
    (tmp_path / "bomb.yaml").write_text(BOMB)
    with pytest.raises(CtxextError, match="aliases"):
        load_recipe(str(tmp_path / "bomb.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(CtxextError, match="not valid UTF-8"):
        load_recipe(str(tmp_path / "bytes.yaml"))


def test_a_bomb_in_a_card_is_left_out(llama, tmp_path):
    (llama / "README.md").write_text(f"---\n{BOMB}---\n# x\n")
    convert(str(llama), tmp_path / "out", YARN)


def test_files_larger_than_any(tmp_path):
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 200_000_001)
    with pytest.raises(CtxextError, match="larger than the limit of 200 MB"):
        read_text(tmp_path / "config.json")


def test_the_largest_text_that_is_read(tmp_path):
    (tmp_path / "x").write_text("12345678")
    assert read_text(tmp_path / "x", 8) == "12345678"
    with pytest.raises(CtxextError, match="larger than"):
        read_text(tmp_path / "x", 7)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(CtxextError, match=r'none" cannot be read: No such file or directory\.') as caught:
        read_text(tmp_path / "none")
    assert caught.value.hint == "Check its path."
    (tmp_path / "x").write_bytes(b"ab\xff")
    with pytest.raises(CtxextError, match=r'x" is not valid UTF-8: invalid byte at position 2\.'):
        read_text(tmp_path / "x")


def statuses(folder, **options) -> dict[str, str]:
    return {finding.check: finding.status for finding in verify(str(folder), load=False, **options)}


@pytest.mark.parametrize("link", ["auto", "hard"])
def test_verify_notices_an_edit_without_digests(link, llama, tmp_path):
    convert(str(llama), tmp_path / "out", YARN, link=link)
    path = tmp_path / "out" / "model.safetensors"
    assert statuses(tmp_path / "out", against=str(llama))["weights"] == "not checked"
    path.chmod(0o644)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert statuses(tmp_path / "out")["weights"] == "failed"
    by_check = statuses(tmp_path / "out", against=str(llama))
    assert "failed" in (by_check["weights"], by_check["against"])


def test_a_record_without_stamps_leaves_weights_unchecked(llama, tmp_path):
    convert(str(llama), tmp_path / "out", YARN)
    record = read_json(tmp_path / "out" / "ctxext.json")
    del record["stamps"]
    (tmp_path / "out" / "ctxext.json").write_text(json.dumps(record))
    assert statuses(tmp_path / "out")["weights"] == "not checked"


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"PK\x03\x04broken", b"\x80\x04K\x01."])
def test_verify_reports_broken_older_weights(content, llama, tmp_path):
    convert(str(llama), tmp_path / "out", YARN)
    for folder in (llama, tmp_path / "out"):
        (folder / "model.safetensors").unlink()
    (llama / "pytorch_model.bin").write_bytes(b"other")
    (tmp_path / "out" / "pytorch_model.bin").write_bytes(content)
    assert statuses(tmp_path / "out", against=str(llama))["against"] == "failed"


def test_words_on_a_page():
    assert in_markdown("a\n\n# b <img src=x> ![y](z) | \x1b[31m") == "a # b &lt;img src=x> !&#91;y](z) &#124; [31m"


def test_a_folder_s_name_is_a_word_on_the_card(llama, tmp_path):
    odd = llama.rename(tmp_path / "odd\n# title <img src=x>")
    convert(str(odd), tmp_path / "out", YARN)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "<img" not in card
    assert "\n# title" not in card


@pytest.mark.skipif(os.name != "posix", reason="names are text there")
def test_a_name_that_is_no_text(llama, run):
    """Neither a record nor the Hub can hold it: a file is refused by name, a folder is called otherwise."""
    odd = llama.with_name("\udcff")
    llama.rename(odd)
    assert run("convert", odd, odd.with_name("out"), "-m", "pi", "--factor", 2).exit_code == 0
    (odd / "notes\udcff.txt").write_text("x")
    result = run("convert", odd, odd.with_name("out2"), "-m", "pi", "--factor", 2)
    assert "has a name that is not valid UTF-8" in result.exception.message


def test_a_file_that_no_disk_has_room_for(llama, run):
    """A sparse file of a terabyte is refused at once and not copied until the disk is full."""
    with (llama / "notes.txt").open("wb") as file:
        file.truncate(1 << 42)
    result = run("convert", llama, llama.with_name("out"), "-m", "pi", "--factor", 2)
    assert "No space left" in result.exception.message
    assert not llama.with_name("out").exists()
