"""Our reader of safetensors headers beside the library itself: what one refuses the other refuses too."""

import json
import random
import struct
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from ctxext.errors import CtxextError
from ctxext.files.tensor_files import BITS, read_safetensors_header

ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
WRITTEN = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


def file_of(header, size: int, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(size)


def fault_of(path: Path) -> str:
    try:
        read_safetensors_header(path)
    except CtxextError as error:
        return str(error)
    return ""


def ours(path: Path) -> bool:
    return not fault_of(path)


def theirs(path: Path) -> bool:
    try:
        with safe_open(path, framework="np") as file:
            list(file.keys())
    except (SafetensorError, OSError):
        return False
    return True


SECOND = {**ONE, "data_offsets": [4, 8]}
CASES = {
    "one": file_of({"a": ONE}, 4),
    "two": file_of({"a": ONE, "b": SECOND}, 8),
    "two in another order": file_of({"b": SECOND, "a": ONE}, 8),
    "none": file_of({}, 0),
    "no dimensions": file_of({"a": {**ONE, "shape": []}}, 4),
    "no numbers": file_of({"a": {**ONE, "shape": [0], "data_offsets": [0, 0]}, "b": ONE}, 4),
    "no numbers inside another": file_of({"a": {**ONE, "shape": [0], "data_offsets": [2, 2]}, "b": ONE}, 4),
    "overlapping": file_of({"a": ONE, "b": ONE}, 4),
    "overlapping by half": file_of({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}}, 6),
    "a gap": file_of({"a": ONE, "b": {**ONE, "data_offsets": [8, 12]}}, 12),
    "a gap before": file_of({"b": SECOND}, 8),
    "bytes after": file_of({"a": ONE}, 5),
    "bytes missing": file_of({"a": ONE}, 3),
    "backwards": file_of({"a": {**ONE, "data_offsets": [4, 0]}}, 4),
    "half a byte": file_of({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, 2),
    "too large": file_of({"a": {**ONE, "shape": [2**62, 2**62], "data_offsets": [0, 0]}}, 0),
    "too large on the way": file_of({"a": {**ONE, "shape": [2**40, 2**40, 0], "data_offsets": [0, 0]}}, 0),
    "no entry": file_of({"a": {}}, 0),
    "a number as an entry": file_of({"a": 7}, 0),
    "null as an entry": file_of({"a": None}, 0),
    "a number as a type": file_of({"a": {"dtype": 1, "shape": [], "data_offsets": [0, 0]}}, 0),
    "a type alone": file_of({"a": {"dtype": "F32"}}, 0),
    "an unknown type": file_of({"a": {**ONE, "dtype": "F33"}}, 4),
    "a fraction": file_of({"a": {**ONE, "shape": [1.0]}}, 4),
    "a truth": file_of({"a": {**ONE, "shape": [True]}}, 4),
    "a negative": file_of({"a": {**ONE, "shape": [-1]}}, 4),
    "three offsets": file_of({"a": {**ONE, "data_offsets": [0, 4, 4]}}, 4),
    "more keys": file_of({"a": {**ONE, "more": None}}, 4),
    "NaN": file_of(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":NaN}}', 4),
    "spaces around": file_of(f" {WRITTEN}  ".encode(), 4),
    "a byte-order mark": file_of(f"\ufeff{WRITTEN}".encode(), 4),
    "half a character": file_of(WRITTEN.replace('"a"', '"\\ud800"').encode(), 4),
    "a list": file_of([], 0),
    "no text": file_of(b"\xff\xfe", 0),
    "notes": file_of({"__metadata__": {"format": "pt"}, "a": ONE}, 4),
    "no notes": file_of({"__metadata__": None, "a": ONE}, 4),
    "a number as a note": file_of({"__metadata__": {"format": 1}, "a": ONE}, 4),
    "notes in a list": file_of({"__metadata__": [], "a": ONE}, 4),
    "notes like a tensor": file_of({"__metadata__": ONE}, 4),
    "longer than the file": file_of({"a": ONE}, 4, length=10**6),
    "empty": b"",
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_refuses_is_refused(name, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(CASES[name])
    assert ours(path) == theirs(path)


@pytest.mark.parametrize("dtype", [*BITS, "F8_E3M4", "I4", "C128", "f32", ""])
def test_every_type_has_the_library_s_size(dtype, tmp_path):
    path = tmp_path / "x.safetensors"
    answers = []
    for size in (1, 3, 4, 6, 8, 16, 32, 64):
        path.write_bytes(file_of({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}, size))
        answers.append((ours(path), theirs(path)))
    assert all(one == other for one, other in answers)
    assert any(one for one, _ in answers) == (dtype in BITS)


def test_a_name_twice_is_refused_though_the_library_takes_the_last(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(("{" + f"{WRITTEN[1:-1]},{WRITTEN[1:-1]}" + "}").encode(), 4))
    assert theirs(path)
    assert not ours(path)


def random_header(draw: random.Random) -> tuple[dict[str, object], int]:
    """A valid header with up to two numbers in it changed, and a size that fits or is off by a little."""
    header, at = {}, 0
    for number in range(draw.randrange(4)):
        dtype, shape = draw.choice(list(BITS)), [draw.choice((0, 1, 2, 8)) for _ in range(draw.randrange(3))]
        count = 1
        for side in shape:
            count *= side
        stop = at + -(-count * BITS[dtype] // 8)
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}
        at = stop
    size = max(0, at + draw.choice((0, 0, 0, -1, 1, 4)))
    for _ in range(draw.randrange(3)):
        if header:
            entry = header[draw.choice(list(header))]
            numbers = entry[draw.choice(("shape", "data_offsets"))]
            if numbers:
                place = draw.randrange(len(numbers))
                numbers[place] = max(0, numbers[place] + draw.choice((-8, -4, -1, 1, 4, 8)))
    names = list(header)
    draw.shuffle(names)
    return {name: header[name] for name in names}, size


@pytest.mark.thorough
def test_random_headers_are_judged_as_the_library_judges_them(tmp_path):
    draw, path, accepted = random.Random(0), tmp_path / "x.safetensors", 0
    for _ in range(600):
        header, size = random_header(draw)
        path.write_bytes(file_of(header, size))
        assert ours(path) == theirs(path), (header, size)
        accepted += theirs(path)
    assert 60 < accepted < 540  # Both kinds were seen.


def test_table_does_not_write_from_tensors_that_share_their_bytes(tmp_path, run):
    from transformers import GPT2Config, GPT2LMHeadModel

    source = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=4, n_layer=1, n_head=1)).save_pretrained(source)
    weights = source / "model.safetensors"
    content = weights.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    norms = [name for name in header if name.endswith(("ln_1.weight", "ln_1.bias"))]
    header[norms[0]]["data_offsets"] = header[norms[1]]["data_offsets"]
    weights.write_bytes(file_of(header, 0) + content[8 + length :])
    result = run("convert", source, tmp_path / "out", "--method", "table", "--factor", 2)
    assert result.exit_code == 1
    assert "is truncated or not a safetensors file" in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("dtype", "shape", "overflows"),
    [
        ("U8", [2**32, 2**32, 0], True),
        ("U8", [2**32, 2**32 - 1, 0], False),
        ("U8", [0, 2**32, 2**32], False),
        ("U8", [2**61], True),
        ("U8", [2**61 - 1], False),
        ("F64", [2**58], True),
        ("F64", [2**58 - 1], False),
        ("U8", [1] * 65, True),
        ("U8", [1] * 64, False),
    ],
)
def test_sizes_that_overflow_are_named_as_such(dtype, shape, overflows, tmp_path):
    """Bits are counted in 64 bits, factor by factor, as the library does; numpy has at most 64 dimensions."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}, 0))
    assert ("is too large" in fault_of(path)) == overflows
