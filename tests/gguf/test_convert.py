"""GGUF files: changed and unchanged parts, the result in llama.cpp, and errors."""

import dataclasses
import errno
import json
import math
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from by_hand import ramp
from ctxext.api import METHODS, Recipe
from ctxext.converters.convert import convert
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import copy_range
from ctxext.gguf import convert as converting
from ctxext.gguf.convert import convert_gguf, plan_gguf
from ctxext.gguf.export import export_gguf
from ctxext.gguf.header import read_header
from ctxext.gguf.model import FACTORS, RECIPE_KEY, open_gguf
from ctxext.gguf.verify import verify_gguf
from ctxext.methods import (
    AdjustedBase,
    DynamicNtk,
    Llama3,
    LongRope,
    MsPoE,
    Ntk,
    NtkByParts,
    PositionInterpolation,
    Yarn,
)
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import attention_scaling
from ctxext.recipes.methods.mrrope import MrRope
from ctxext.recipes.methods.self_extend import SelfExtend
from ctxext.recipes.model_config import model_config
from gguf_files import TENSORS, gguf_bytes, keys_of

RISING = tuple(1.0 + 3.0 * number / 7 for number in range(8))
BY_KEYS = [
    PositionInterpolation(factor=4),
    Ntk(factor=4),
    AdjustedBase(theta=3e5, factor=4),
    Yarn(factor=4),
    Yarn(factor=4, attention_factor=1.2),
    NtkByParts(factor=4),
]
BY_FACTORS = [
    Llama3(factor=4),
    MrRope(factor=4),
    LongRope(factor=4, long_factor=RISING, short_factor=RISING),
    Yarn(factor=4, beta_fast=16),
]


@pytest.fixture
def gguf(tmp_path):
    """Write a GGUF file, by default of a small Llama."""

    def write(name="m.gguf", values=None, tensors=TENSORS, **more):
        path = tmp_path / name
        path.write_bytes(gguf_bytes(values or keys_of(), tensors, **more))
        return path

    return write


def contents(path):
    """Read every key with the bytes of its value, and every tensor with its bytes."""
    header, raw = read_header(path), path.read_bytes()
    tensors = {tensor.name: raw[header.data_start + tensor.offset :][: tensor.size] for tensor in header.tensors}
    return {key: value.raw for key, value in header.values.items()}, tensors


def name_of(step):
    return f"{step.name}-{'-'.join(f'{key}={value}' for key, value in step.to_dict().items() if key != 'method')}"[:60]


@pytest.mark.parametrize("step", [*BY_KEYS, *BY_FACTORS], ids=name_of)
def test_only_the_schedule_changes(gguf, tmp_path, step):
    source, out = gguf(), tmp_path / "out.gguf"
    convert_gguf(source, out, Recipe([step]))
    keys, tensors = contents(out)
    keys_before, tensors_before = contents(source)
    changed = {key for key in {*keys, *keys_before} if keys.get(key) != keys_before.get(key)}
    assert changed <= {RECIPE_KEY, "llama.context_length", *(key for key in keys if key.startswith("llama.rope."))}
    assert {name: tensors[name] for name in tensors_before} == tensors_before
    assert set(tensors) - set(tensors_before) == ({FACTORS} if step in BY_FACTORS else set())


@pytest.mark.parametrize("step", [*BY_KEYS, *BY_FACTORS], ids=name_of)
def test_llama_cpp_rotates_as_transformers(gguf, tmp_path, step):
    """Compute the rotation of ggml_rope_yarn from the keys of the file."""
    conversion = convert_gguf(gguf(), tmp_path / "out.gguf", Recipe([step]))
    header, raw = read_header(conversion.out), conversion.out.read_bytes()
    get = {key.removeprefix("llama.rope."): header.get(key) for key in header.values}.get
    divisors = [1.0] * 8
    for tensor in header.tensors:
        if tensor.name == FACTORS:
            divisors = struct.unpack("<8f", raw[header.data_start + tensor.offset :][:32])
    plain = [get("freq_base") ** (-pair / 8) / divisors[pair] for pair in range(8)]
    factor, attention = get("scaling.factor") or 1.0, get("scaling.attn_factor") or 1.0
    kind = get("scaling.type")
    if kind == "yarn":
        parts = ramp(10000, 16, 8, get("scaling.original_context_length"), 32, 1, truncate=True)
        plain = [angle / factor * part + angle * (1 - part) for angle, part in zip(plain, parts, strict=True)]
        attention *= 1 + 0.1 * math.log(factor)
    elif kind == "linear":
        plain = [angle / factor for angle in plain]
    else:
        assert kind in (None, "none")
    # The checkpoint of the same model, converted with the same step.
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
    }
    model = model_config(config)
    wanted = Recipe([step]).resolve(model).edit(model).rotary
    assert plain == pytest.approx(inverse_frequencies(wanted), rel=1e-6)
    assert attention == pytest.approx(attention_scaling(wanted), rel=1e-6)
    assert header.get("llama.context_length") == wanted.claimed_length
    assert open_gguf(conversion.out).model.encoding.usable_length == wanted.usable_length


def test_partial_rotation_and_a_separate_head_length(gguf, tmp_path):
    values = keys_of("stablelm", rope__dimension_count=8)
    conversion = convert_gguf(gguf(values=values), tmp_path / "out.gguf", Recipe([Yarn(factor=4)]))
    assert conversion.plan.model.rotary.dim == 8
    values = keys_of("qwen3", attention__key_length=32)
    assert open_gguf(gguf("q.gguf", values)).model.rotary.dim == 32


@pytest.mark.parametrize(
    ("step", "architecture", "says"),
    [
        (MsPoE(), "llama", "llama.cpp does not run"),
        (SelfExtend(factor=4), "llama", "llama.cpp does not run"),
        (DynamicNtk(factor=4), "llama", "depends on the length"),
        (LongRope(factor=4, long_factor=RISING), "llama", "depends on the length"),
        (MrRope(factor=4), "qwen2", "needs a list of frequencies"),
        (NtkByParts(factor=4), "gemma3", "sliding-window layers"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_unsupported_schedules_are_refused_for_llama_cpp(gguf, tmp_path, step, architecture, says):
    source = gguf(values=keys_of(architecture))
    with pytest.raises(CtxextError, match=says):
        convert_gguf(source, tmp_path / "out.gguf", Recipe([step]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]


def test_every_method_is_supported_or_has_a_reason(gguf):
    reasons = converting.check_methods(open_gguf(gguf()))
    names = {method.name for method in METHODS if method.encoding == "rotary" and not method.is_experimental}
    assert set(reasons) == names
    assert {name for name, why in reasons.items() if not why} >= {"pi", "ntk", "abf", "yarn", "ntk-by-parts", "mrrope"}


def test_small_numbers_are_refused_and_not_divided_by(gguf):
    """A base of one pair, and the logarithm of one token."""
    one_pair = open_gguf(gguf(values=keys_of(rope__dimension_count=2)))
    assert "one rotating pair" in converting.check_methods(one_pair)["ntk"]
    for name in ("context_length", "rope__scaling__original_context_length"):
        with pytest.raises(CtxextError, match="an invalid value"):
            open_gguf(
                gguf(values={**keys_of(rope__scaling__type="yarn", rope__scaling__factor=4.0), **keys_of(**{name: 1})})
            )
    with pytest.raises(CtxextError, match="is too short"):
        open_gguf(gguf(), original_length=1)


def test_a_schedule_is_not_put_on_another(gguf, tmp_path):
    first = convert_gguf(gguf(), tmp_path / "a.gguf", Recipe([MrRope(factor=4)])).out
    with pytest.raises(CtxextError, match="already extended: mrrope"):
        plan_gguf(first, Recipe([Yarn(factor=8)]))
    second = convert_gguf(first, tmp_path / "b.gguf", Recipe([Yarn(factor=8)]), replace_scaling=True).out
    direct = convert_gguf(gguf(), tmp_path / "c.gguf", Recipe([Yarn(factor=8)])).out
    keys, tensors = contents(second)
    keys_direct, tensors_direct = contents(direct)
    for content in (keys, keys_direct):
        content.pop(RECIPE_KEY)
    assert keys == keys_direct
    assert struct.unpack("<8f", tensors.pop(FACTORS)) == (1.0,) * 8  # Divisors of 1 keep the layout of the file.
    assert tensors == tensors_direct
    before = open_gguf(gguf()).model.rotary
    assert open_gguf(second).plain.rotary == dataclasses.replace(before, length_origin="--original-length")
    with pytest.raises(CtxextError, match="the result would have 1024"):
        plan_gguf(second, Recipe([Yarn(factor=2)]), replace_scaling=True)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_schedule_of_the_source(gguf, kind):
    values = keys_of(rope__scaling__type=kind, rope__scaling__factor=4.0, rope__scaling__original_context_length=128)
    model = open_gguf(gguf(values=values))
    assert (model.model.rotary.rope_type, model.model.encoding.trained_length) == (kind, 128)
    with pytest.raises(CtxextError, match=f"already extended: {kind} ×4 from 128 tokens"):
        plan_gguf(model.path, Recipe([Yarn(factor=8)]))
    plan = plan_gguf(model.path, Recipe([Yarn(factor=8)]), replace_scaling=True)
    assert plan.header.get("llama.context_length") == 1024


@pytest.mark.parametrize(("factor", "kind"), [(0.0, "default"), (1.0, "default"), (2.0, "linear")])
def test_the_old_name_of_the_factor_is_read_without_the_new_one(gguf, factor, kind):
    """As in llama.cpp (`llama_model_base::load_hparams`), 0 means "not scaled"."""
    both = keys_of(rope__scaling__factor=factor, rope__scale_linear=4.0)
    rotary = open_gguf(gguf(values=both)).model.rotary
    assert (rotary.rope_type, rotary.parameters.get("factor", 1.0)) == (kind, max(factor, 1.0))
    alone = open_gguf(gguf(values=keys_of(rope__scale_linear=4.0))).model.rotary
    assert (alone.rope_type, alone.parameters["factor"]) == ("linear", 4.0)


def test_the_divisors_of_a_source_are_its_schedule(gguf, tmp_path):
    """As in files of Llama 3.1."""
    made = convert_gguf(gguf(), tmp_path / "llama3.gguf", Recipe([Llama3(factor=4)])).out
    raw = made.read_bytes().replace(RECIPE_KEY.encode(), b"another.names")
    (tmp_path / "stranger.gguf").write_bytes(raw)
    with pytest.raises(CtxextError, match="already extended: longrope"):
        plan_gguf(tmp_path / "stranger.gguf", Recipe([Yarn(factor=8)]))
    plan = plan_gguf(tmp_path / "stranger.gguf", Recipe([Yarn(factor=8)]), replace_scaling=True, original_length=512)
    assert plan.factors == (1.0,) * 8


@pytest.mark.parametrize("step", BY_FACTORS, ids=name_of)
def test_phi3_takes_the_divisors_in_both_its_lists(gguf, tmp_path, step):
    """llama.cpp uses one of them for a whole run, by the configured length."""
    source = gguf(values={**keys_of("phi3"), "split.tensors.count": 3})
    out = convert_gguf(source, tmp_path / "out.gguf", Recipe([step])).out
    tensors, before = contents(out)[1], contents(source)[1]
    lists = [tensors.pop(f"rope_factors_{kind}.weight") for kind in ("long", "short")]
    assert tensors == before
    llama = contents(convert_gguf(gguf("l.gguf"), tmp_path / "l-out.gguf", Recipe([step])).out)[1]
    assert lists == [llama[FACTORS]] * 2
    assert read_header(out).get("split.tensors.count") == 5
    assert all(check.is_passed for check in verify_gguf(out, source))
    again = convert_gguf(out, tmp_path / "b.gguf", Recipe([Yarn(factor=8)]), replace_scaling=True).out
    assert set(
        struct.unpack("<16f", b"".join(contents(again)[1][f"rope_factors_{kind}.weight"] for kind in ("long", "short")))
    ) == {1.0}
    raw = bytearray(out.read_bytes())
    raw[read_header(out).data_start + read_header(out).tensors[-1].offset + 1] ^= 1
    out.write_bytes(raw)
    with pytest.raises(CtxextError, match="different lists for long and short"):
        open_gguf(out)


@pytest.fixture
def split(tmp_path):
    """Write a model in three parts: keys and a tensor in the first, a tensor in each of the others."""

    def write(stem="m", values=(), tensors=({"a.weight": b"1" * 40}, {"b.weight": b"2" * 50}, {"c.weight": b"3" * 60})):
        number = len(tensors)
        for no, content in enumerate(tensors):
            keys = {**keys_of(), "split.tensors.count": sum(map(len, tensors))} if no == 0 else {}
            more = values[no] if no < len(values) else {}
            keys |= {"split.no": no, "split.count": number, **more}
            place = tmp_path / f"{stem}-{no + 1:05d}-of-{number:05d}.gguf"
            place.write_bytes(gguf_bytes(keys, content))
        return tmp_path / f"{stem}-00001-of-{number:05d}.gguf"

    return write


def with_divisors(path, divisors):
    """Turn the tensor of 32 bytes in a part into a list of eight float32."""
    raw = path.read_bytes()
    at = raw.index(FACTORS.encode()) + len(FACTORS)
    raw = raw[:at] + struct.pack("<IQI", 1, 8, 0) + raw[at + 16 :]
    start = read_header(path).data_start
    path.write_bytes(raw[:start] + struct.pack("<8f", *divisors) + raw[start + 32 :])


def test_divisors_in_a_later_part_are_its_schedule(split, tmp_path):
    """If it were missed, two schedules would apply at once."""
    first = split(tensors=({"a.weight": b"1" * 40}, {FACTORS: bytes(32), "b.weight": b"2" * 50}))
    later = tmp_path / "m-00002-of-00002.gguf"
    with_divisors(later, RISING)
    model = open_gguf(first)
    assert model.model.rotary.parameters["long_factor"] == pytest.approx(RISING)
    with pytest.raises(CtxextError, match="already extended: longrope"):
        plan_gguf(first, Recipe([Yarn(factor=4)]))
    for step in (Yarn(factor=4), MrRope(factor=4)):
        out = convert_gguf(
            first, tmp_path / f"{step.name}.gguf", Recipe([step]), replace_scaling=True, original_length=512
        ).out
        plain = model_config(open_gguf(first).unscaled_model.config, 512)
        wanted = Recipe([step]).resolve(plain).edit(plain).rotary
        written = struct.unpack("<8f", contents(tmp_path / f"{step.name}-00002-of-00002.gguf")[1][FACTORS])
        expected = [1.0] * 8
        if step.name == "mrrope":
            pairs = zip([10000 ** (-pair / 8) for pair in range(8)], inverse_frequencies(wanted), strict=True)
            expected = [a / b for a, b in pairs]
        assert written == pytest.approx(expected, rel=1e-6)
        assert all(check.is_passed for check in verify_gguf(out, first))
    with_divisors(tmp_path / "yarn-00002-of-00002.gguf", RISING)
    with pytest.raises(CtxextError, match="two schedules at once"):
        verify_gguf(tmp_path / "yarn-00001-of-00002.gguf")


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("empty", "truncated or damaged"),
        ("truncated", "ends after the end|truncated"),
        ("no GGUF", "not a GGUF file"),
        ("whole model", "does not belong"),
        ("other number", "specifies part 8 of 3"),
        ("other count", "of 4"),
        ("other architecture", "it is a qwen2"),
        ("same tensor", 'tensor "a.weight" is in another part'),
        ("more tensors", "specifies 3 tensors, but its 3 parts have 4"),
        ("link elsewhere", "link to a file outside the folder"),
        ("link to another part", "does not belong"),
        ("folder", "missing"),
        ("gone", "missing"),
    ],
)
def test_every_part_belongs_to_the_model(split, tmp_path, kind, says, number):
    first = split()
    part = tmp_path / f"m-{number:05d}-of-00003.gguf"
    keys = {"split.no": number - 1, "split.count": 3}
    raw = part.read_bytes()
    part.unlink()
    contents = {
        "empty": b"",
        "truncated": raw[:-40],
        "no GGUF": b"secret" * 9,
        "whole model": gguf_bytes(keys_of(), TENSORS),
        "other number": gguf_bytes({**keys, "split.no": 7}, {"d.weight": b"1"}),
        "other count": gguf_bytes({**keys, "split.count": 4}, {"d.weight": b"1"}),
        "other architecture": gguf_bytes({**keys, "general.architecture": "qwen2"}, {"d.weight": b"1"}),
        "same tensor": gguf_bytes(keys, {"a.weight": b"1"}),
        "more tensors": gguf_bytes(keys, {"d.weight": b"1", "e.weight": b"1"}),
    }
    if kind in contents:
        part.write_bytes(contents[kind])
    elif kind == "link elsewhere":
        (tmp_path.parent / f"{tmp_path.name}-other.gguf").write_bytes(raw)
        part.symlink_to(tmp_path.parent / f"{tmp_path.name}-other.gguf")
    elif kind == "link to another part":
        part.symlink_to(tmp_path / f"m-{5 - number:05d}-of-00003.gguf")
    elif kind == "folder":
        part.mkdir()
    with pytest.raises(CtxextError, match=says):
        open_gguf(first)
    with pytest.raises(CtxextError, match=says):
        convert_gguf(first, tmp_path / "out.gguf", Recipe([Yarn(factor=4)]))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"split.no": 1}, "part 2 of 3"),
        ({"split.count": 2}, "but has another name"),
        ({"split.count": True}, "True for split.count"),
        ({"split.no": 0.0}, "0.0 for split.no"),
        ({"split.no": False}, "False for split.no"),
        ({"split.count": 0}, "belongs to a model of 3 tensors, but its header has 0 for split.count"),
        ({"split.count": 1}, "belongs to a model of 3 tensors, but its header has 1 for split.count"),
        ({"split.count": 1, "split.tensors.count": 1}, "belongs to a model of 3 parts, but its header has 1"),
        ({"split.tensors.count": 4}, "specifies 4 tensors, but its 3 parts have 3"),
        ({"split.tensors.count": "3"}, "3 for split.tensors.count"),
        ({"split.tensors.count": ["3"]}, "a list for split.tensors.count"),
    ],
)
def test_the_numbers_of_a_split_model_agree(split, values, says):
    with pytest.raises(CtxextError, match=says):
        open_gguf(split(values=[values]))


def test_a_part_in_the_hubs_cache_is_followed(split, tmp_path):
    first = split()
    snapshot, blobs = (tmp_path / "models--a--b" / name for name in ("snapshots/c", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for part in sorted(tmp_path.glob("m-*.gguf")):
        part.rename(blobs / part.name)
        (snapshot / part.name).symlink_to(blobs / part.name)
    assert len(open_gguf(snapshot / first.name).parts) == 3


def test_split_output_of_ours_may_be_replaced(split, tmp_path):
    first, out, step = split(), tmp_path / "out.gguf", Recipe([Yarn(factor=4)])
    made = convert_gguf(first, out, step).out
    with pytest.raises(CtxextError, match="exists"):
        convert_gguf(first, out, step)
    other = split("other", tensors=({"a.weight": b"9" * 40}, {"b.weight": b"8" * 50}, {"c.weight": b"7" * 60}))
    again = convert_gguf(other, made, Recipe([Yarn(factor=8)]), overwrite=True).out  # Named by its first part too.
    assert again == made
    assert all(check.is_passed for check in verify_gguf(made, other))
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
    # Parts of another model are kept, and so are parts without a first part of ctxext.
    later = tmp_path / "out-00002-of-00003.gguf"
    later.write_bytes(gguf_bytes({"split.no": 0, "split.count": 1}, TENSORS))
    with pytest.raises(CtxextError, match="was not created by ctxext"):
        convert_gguf(first, out, step, overwrite=True)
    convert_gguf(first, out, step, overwrite_anything=True)
    convert_gguf(other, out, step, overwrite=True)
    made.unlink()
    with pytest.raises(CtxextError, match="was not created by ctxext"):
        convert_gguf(first, out, step, overwrite=True)
    convert_gguf(other, out, step, overwrite=True)  # The same content, as after a killed run.
    assert all(check.is_passed for check in verify_gguf(made, other))


@pytest.mark.parametrize("ends", [KeyboardInterrupt, None], ids=["interrupted", "killed"])
@pytest.mark.parametrize("is_there", [False, True], ids=["new", "overwritten"])
def test_first_parts_and_parts_of_another_run_are_not_mixed(split, tmp_path, monkeypatch, is_there, ends):
    """After any rename, a file with the name of the first part loads only with its own parts."""
    first = split(tensors=({"a.weight": b"1" * 40}, {FACTORS: bytes(32)}, {"c.weight": b"3" * 60}))
    with_divisors(tmp_path / "m-00002-of-00003.gguf", (1.0,) * 8)
    out, places = tmp_path / "out.gguf", [tmp_path / f"out-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    old, new = Recipe([Yarn(factor=4)]), Recipe([MrRope(factor=4)])
    convert_gguf(first, out, new)
    whole = [place.read_bytes() for place in places]
    for last in range(7):
        for place in places:
            place.unlink(missing_ok=True)
        before = []
        if is_there:
            convert_gguf(first, out, old)
            before = [place.read_bytes() for place in places]
        done, real = [], Path.rename

        def rename(self, target, done=done, real=real, last=last):
            if len(done) == last:
                done.append(None)
                if ends is None:
                    os._exit(9)
                raise ends
            done.append(target)
            return real(self, target)

        process = os.fork() if ends is None else 0
        if process == 0:
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(Path, "rename", rename)
                    convert_gguf(first, out, new, overwrite=True)
            except KeyboardInterrupt:
                pass
            finally:
                if ends is None:
                    os._exit(0)
        else:
            os.waitpid(process, 0)
        if places[0].exists():
            assert [place.read_bytes() for place in places] in (before, whole)
        if ends is not None:
            assert before == [] or places[0].exists()
            assert not list(tmp_path.glob(".*"))
        convert_gguf(first, out, new, overwrite=True)
        assert [place.read_bytes() for place in places] == whole
        assert not list(tmp_path.glob(".*.ctxext-*"))


def numbered(key, kind, form, number):
    """Return the bytes of a key with a number of some type."""
    name = f"llama.{key}".encode()
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{form}", kind, number)


def file_with(key, kind, form, number):
    """Write a file with a number of some type in a key."""
    raw = gguf_bytes({name: value for name, value in keys_of().items() if name != f"llama.{key}"}, {})
    count = struct.unpack("<Q", raw[16:24])[0]
    head = (
        raw[:16] + struct.pack("<Q", count + 1) + numbered(key, kind, form, number) + raw[24:].rstrip(b"\0") + b"\x01"
    )
    return head + bytes(-len(head) % 32)


WHOLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}


@pytest.mark.parametrize("kind", [2, 3, 4, 5, 10, 11])
def test_a_length_of_any_whole_type_is_written_as_llama_cpp_reads_it(tmp_path, kind):
    """400 × 100 overflows an int16, which would be negative."""
    source = tmp_path / "m.gguf"
    source.write_bytes(file_with("context_length", kind, WHOLE[kind], 400))
    assert open_gguf(source).model.encoding.trained_length == 400
    out = convert_gguf(source, tmp_path / "out.gguf", Recipe([Yarn(factor=100)])).out
    value = read_header(out).values["llama.context_length"]
    assert (value.kind, value.content) == (4, 40_000)
    assert all(check.is_passed for check in verify_gguf(out, source))


@pytest.mark.parametrize("key", ["context_length", "embedding_length", "block_count"])
@pytest.mark.parametrize(
    ("kind", "form", "number"),
    [
        (6, "f", 512.0),
        (12, "d", 512.0),
        (7, "?", True),
        (3, "h", -512),
        (11, "q", -1),
        (4, "I", 0),
        (10, "Q", 1 << 63),
        (11, "q", 1 << 40),
    ],
)
def test_numbers_that_llama_cpp_does_not_read_are_refused(tmp_path, key, kind, form, number):
    source = tmp_path / "m.gguf"
    source.write_bytes(file_with(key, kind, form, number))
    with pytest.raises(CtxextError, match=f"an invalid value for llama.{key}: "):
        open_gguf(source)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", ["yarn"]),
        ("rope.scaling.factor", ["4"]),
        ("rope.scaling.type", 1),
        ("rope.freq_base", ["1"]),
        ("rope.freq_base", 1.0),
        ("rope.freq_base", 1e31),
        ("rope.freq_base", 0.0),
        ("rope.freq_base", float("nan")),
        ("rope.scaling.factor", False),
        ("rope.scaling.factor", "4"),
        ("rope.scaling.factor", -4.0),
        ("rope.scaling.attn_factor", "1"),
        ("rope.dimension_count", 7),
        ("rope.dimension_count", 4_000_000_000),
        ("block_count", 4_294_967_295),  # Checked before memory is allocated per layer.
        ("rope.scaling.yarn_beta_fast", 16.0),
        ("attention.head_count_kv", ["2"]),
    ],
)
def test_values_that_are_not_understood_are_refused(gguf, key, value):
    """A list is not a missing key, and no key of a schedule is ignored."""
    with pytest.raises(CtxextError, match=f"llama.{key}|rotated dimensions"):
        open_gguf(gguf(values={**keys_of(), f"llama.{key}": value}))


def test_texts_that_are_not_utf_8(gguf, tmp_path):
    """Unread values stay unchanged; for the others the error contains the value."""
    path = gguf(values={**keys_of(), "general.name": "Zoë's"})
    path.write_bytes(path.read_bytes().replace("Zoë's".encode(), "Zoë's".encode("latin-1") + b"!"))
    out = convert_gguf(path, tmp_path / "out.gguf", Recipe([Yarn(factor=4)])).out
    assert all(check.is_passed for check in verify_gguf(out, path))
    assert open_gguf(out).model.encoding.usable_length == 2048
    for key in ("general.architecture", "llama.rope.scaling.type", RECIPE_KEY):
        path = gguf(values={**keys_of(), key: "Zoë's"})
        path.write_bytes(path.read_bytes().replace("Zoë's".encode(), "Zoë's".encode("latin-1") + b"!"))
        with pytest.raises(CtxextError, match="Zo�'s!\", which is not UTF-8"):
            open_gguf(path)


@pytest.mark.parametrize(
    ("architecture", "more", "length", "known"),
    [
        ("qwen3", {"context_length": 40960, "rope__freq_base": 1e6}, 32768, "Qwen/Qwen3-8B"),
        ("qwen3moe", {"context_length": 40960, "rope__freq_base": 1e6}, 32768, "Qwen/Qwen3-8B"),
        ("qwen3", {"context_length": 40961, "rope__freq_base": 1e6}, 40961, ""),
        ("llama", {"context_length": 40960, "rope__freq_base": 1e6}, 40960, ""),
        (
            "llama",
            {"context_length": 32768, "embedding_length": 4096, "block_count": 32},
            8192,
            "mistralai/Mistral-7B-v0.1",
        ),
        (
            "gemma3",
            {
                "context_length": 131072,
                "embedding_length": 2560,
                "block_count": 34,
                "rope__freq_base": 1e6,
                "rope__scaling__type": "linear",
                "rope__scaling__factor": 8.0,
            },
            32768,
            "google/gemma-3-4b-pt",
        ),
    ],
)
def test_published_models_are_known_in_gguf_too(gguf, run, architecture, more, length, known):
    path = gguf(values=keys_of(architecture, **more))
    rotary = open_gguf(path).model.rotary
    assert rotary.trained_length == length
    assert rotary.length_origin.startswith(f"published for {known}" if known else "max_position_embeddings")
    shown = json.loads(run("inspect", path, "--json").stdout)["rotary"]
    assert (shown["trained_length"], shown["trained_length_from"]) == (length, rotary.length_origin)
    if known:
        assert known in " ".join(run("inspect", path).stdout.split())
        plan = plan_gguf(path, Recipe([Yarn(factor=4)]), replace_scaling=True, allow_shorter=True)
        assert plan.header.get(f"{architecture}.context_length") == 4 * length
        assert plan.header.get(f"{architecture}.rope.scaling.original_context_length") == length
    assert open_gguf(path, 1024).model.rotary.trained_length == 1024


def test_a_schedule_without_an_original_length_requires_it(gguf, tmp_path, run):
    """As for a checkpoint: with 512 tokens as the original length, ×4 would be ×16."""
    linear = gguf(values=keys_of(rope__scaling__type="linear", rope__scaling__factor=4.0))
    listed = convert_gguf(gguf("p.gguf"), tmp_path / "a.gguf", Recipe([Llama3(factor=4)])).out
    lists = tmp_path / "lists.gguf"
    lists.write_bytes(listed.read_bytes().replace(RECIPE_KEY.encode(), b"another.names"))
    for path, what in ((linear, "linear ×4"), (lists, f"longrope by {FACTORS}")):
        with pytest.raises(CtxextError, match=f"already extended: {what}[.]"):
            plan_gguf(path, Recipe([Yarn(factor=8)]))
        with pytest.raises(CtxextError, match="from an unknown original length") as caught:
            plan_gguf(path, Recipe([Yarn(factor=8)]), replace_scaling=True)
        assert ("--original-length 128." in caught.value.hint) == (path == linear)
        assert "with --original-length" in " ".join(run("inspect", path).stdout.split())
        plan = plan_gguf(path, Recipe([Yarn(factor=16)]), replace_scaling=True, original_length=128)
        assert plan.header.get("llama.context_length") == 2048
        now = open_gguf(path).model.encoding.usable_length
        assert plan.cautions[0] == f"--replace-scaling removed {what}: from {now} tokens to 2048.".replace(
            what, f"{what} from 128 tokens" if path == linear else "longrope ×1 from 128 tokens"
        )


def test_what_replace_scaling_took_away_is_reported(gguf, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = keys_of(
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=128,
        rope__scaling__attn_factor=1.5,
    )
    gguf(values=values)
    words = ("convert", "m.gguf", "out.gguf", "--method", "yarn", "--factor", "8", "--replace-scaling")
    says = "--replace-scaling removed yarn ×4 from 128 tokens with attention factor 1.5: from 512 tokens to 1024."
    assert json.loads(run(*words, "--dry-run", "--json").stdout)["cautions"] == [says]
    assert says in " ".join(run(*words, "--dry-run").output.split())
    assert says in " ".join(run(*words).output.split())
    again = ("convert", "out.gguf", "b.gguf", "--method", "pi", "--factor", "16", "--replace-scaling")
    assert "removed yarn ×8: from 1024 tokens to 2048." in " ".join(run(*again).output.split())


def test_verify_sees_a_weight_a_key_and_a_frequency(gguf, tmp_path):
    source = gguf()
    out = convert_gguf(source, tmp_path / "out.gguf", Recipe([MrRope(factor=4)])).out
    assert [(check.name, check.is_passed) for check in verify_gguf(out, source)] == [
        ("rotation", True),
        ("keys", True),
        ("tensors", True),
    ]
    header, raw = read_header(out), bytearray(out.read_bytes())

    def failed(place, by):
        changed = bytearray(raw)
        changed[place] ^= by
        (tmp_path / "changed.gguf").write_bytes(changed)
        return [check.name for check in verify_gguf(tmp_path / "changed.gguf", source) if not check.is_passed]

    assert failed(header.data_start + 5, 1) == ["tensors"]
    assert failed(raw.index("ä".encode()) + 1, 1) == ["keys"]
    assert failed(header.data_start + header.tensors[-1].offset + 2, 128) == ["rotation"]
    context_length = raw.index(b"llama.context_length") + len("llama.context_length") + 4
    assert failed(context_length + 1, 1) == ["rotation"]
    yarn = convert_gguf(source, tmp_path / "yarn.gguf", Recipe([Yarn(factor=4)])).out
    key = b"llama.context_length" + struct.pack("<I", 4)
    assert yarn.read_bytes().count(key + struct.pack("<I", 2048)) == 1
    changed = yarn.read_bytes().replace(key + struct.pack("<I", 2048), key + struct.pack("<I", 999))
    yarn.write_bytes(changed)  # The schedule still has 2048 tokens.
    assert [check.name for check in verify_gguf(yarn, source) if not check.is_passed] == ["rotation"]
    with pytest.raises(CtxextError, match="was not converted by ctxext"):
        verify_gguf(source)


@pytest.mark.parametrize(
    ("place", "name", "change"),
    [
        *(("out", "blk.0.attn_q.weight", (kind, shape)) for kind, shape in ((0, (16,)), (24, (8, 8)), (24, (64, 1)))),
        *((place, "output.weight", None) for place in ("m", "out")),
    ],
)
def test_verify_sees_a_tensor_that_only_one_file_has_so(gguf, tmp_path, place, name, change):
    """The same bytes in the same place with another type, or a tensor in only one of them."""
    source = gguf()
    out = convert_gguf(source, tmp_path / "out.gguf", Recipe([Yarn(factor=4)])).out
    path = tmp_path / f"{place}.gguf"
    header, raw = read_header(path), path.read_bytes()
    others = tuple(tensor for tensor in header.tensors if tensor.name != name)
    (one,) = {*header.tensors} - {*others}
    tensors = header.tensors[: header.tensors.index(one)]
    if change:
        tensors += (dataclasses.replace(one, kind=change[0], shape=change[1]),)
    new = dataclasses.replace(header, tensors=tensors + others[header.tensors.index(one) :]).to_bytes()
    path.write_bytes(new + raw[header.data_start :])
    checks = {check.name: check for check in verify_gguf(out, source)}
    assert not checks["tensors"].is_passed
    assert name in checks["tensors"].detail


@pytest.mark.parametrize("alignment", [32, 64, 8192])
def test_tensors_move_by_whole_blocks(tmp_path, gguf, alignment):
    """So that file systems can clone them, also after two conversions."""
    source = gguf(values={**keys_of(), "general.alignment": alignment}, alignment=alignment)
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    convert_gguf(source, once, Recipe([MrRope(factor=4)]))
    assert all(tensor.offset % alignment == 0 for tensor in read_header(once).tensors)
    convert_gguf(once, twice, Recipe([Yarn(factor=8)]), replace_scaling=True)
    starts = [read_header(path).data_start for path in (source, once, twice)]
    assert starts[1] >= starts[0]
    assert {start % 4096 for start in starts} == {starts[0] % 4096}
    assert verify_gguf(twice, source)[-1].is_passed


def test_copies_resume_at_a_block(tmp_path, monkeypatch):
    """A chunk that begins within a block would be copied instead of cloned."""
    source, starts = tmp_path / "source", []
    source.write_bytes(bytes(range(256)) * 64)
    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", lambda *given: starts.append(given[3]) or real(*given))
    with source.open("rb") as reading, (tmp_path / "copy").open("xb", buffering=0) as writing:
        assert sum(copy_range(reading, writing, 5000, 16384 - 5000)) == 16384 - 5000
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()[5000:]
    assert starts == [5000, 8192]


def test_what_lies_behind_the_tensors_is_no_tensor(gguf, tmp_path):
    path = gguf()
    path.write_bytes(path.read_bytes() + b"x" * 100)
    out = convert_gguf(path, tmp_path / "out.gguf", Recipe([MrRope(factor=4)])).out
    assert all(check.is_passed for check in verify_gguf(out, path))


def test_divisors_of_another_head_are_refused(gguf, tmp_path):
    made = convert_gguf(gguf(), tmp_path / "out.gguf", Recipe([MrRope(factor=4)])).out
    raw = made.read_bytes()
    shape = raw.rindex(FACTORS.encode()) + len(FACTORS) + 4
    made.write_bytes(raw[:shape] + struct.pack("<Q", 4) + raw[shape + 8 :])
    with pytest.raises(CtxextError, match="16 rotated dimensions and 4 divisors"):
        open_gguf(made)


def test_a_file_cut_off_anywhere_is_refused(gguf, tmp_path):
    raw, short = gguf().read_bytes(), tmp_path / "short.gguf"
    for length in [*range(0, len(raw) - 64, 13), len(raw) - 64]:
        short.write_bytes(raw[:length])
        with pytest.raises(CtxextError):
            open_gguf(short)


def _damaged():
    raw = gguf_bytes(keys_of(), TENSORS)
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight")
    yield "no GGUF", b"GGML" + raw[4:], "not a GGUF file"
    yield "version 1", raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1"
    yield "big-endian", raw[:4] + struct.pack(">I", 3) + raw[8:], "big-endian"
    yield "tensors without end", raw[:8] + struct.pack("<Q", 1 << 62) + raw[16:], "damaged"
    yield "keys without end", raw[:16] + struct.pack("<Q", 1 << 62) + raw[24:], "damaged"
    yield "a key of an absurd length", raw[:24] + struct.pack("<Q", 1 << 40) + raw[32:], "damaged"
    key = raw.index(b"tokenizer.chat_template") + len("tokenizer.chat_template")
    yield (
        "a text of an absurd length",
        raw[: key + 4] + struct.pack("<Q", 1 << 60) + raw[key + 12 :],
        "truncated or damaged",
    )
    words = raw.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    yield (
        "a list without end",
        raw[: words + 8] + struct.pack("<Q", 1 << 60) + raw[words + 16 :],
        "truncated or damaged",
    )
    numbers = struct.pack("<IQ", 4, 1 << 60)
    yield "numbers without end", raw[: words + 4] + numbers + raw[words + 16 :], "truncated or damaged"
    nested = struct.pack("<IQ", 9, 1) * 10_000
    yield "lists in lists", raw[: words + 4] + nested + raw[words + 16 :], "array of type 9"
    yield "more keys than a model has", raw[:16] + struct.pack("<Q", 1 << 20) + raw[24:], "specifies 1048576 keys"
    yield "dimensions", raw[:at] + struct.pack("<I", 9) + raw[at + 4 :], "9 dimensions"
    yield "a shape", raw[: at + 4] + struct.pack("<Q", 1 << 62) + raw[at + 12 :], "damaged"
    both = struct.pack("<IQQ", 2, 1 << 62, 4)  # Their product is 0 in 64 bits.
    yield "a product", raw[:at] + both + raw[at + 12 :], "impossible shape"
    yield "a type", raw[: at + 12] + struct.pack("<I", 99) + raw[at + 16 :], "unknown type 99"
    yield "an offset outside", raw[: at + 16] + struct.pack("<Q", 1 << 60) + raw[at + 24 :], "begins at byte"
    yield "no data", raw[: raw.index(bytes(range(100)))], "ends after the end"
    yield "an offset", raw[: at + 16] + struct.pack("<Q", 32) + raw[at + 24 :], "begins at byte 32"
    yield "names", raw.replace(b"output.weight", b"output.weighu"), None
    yield "the same key twice", raw.replace(b"general.quantized", b"tokenizer.ggml.to"), None
    yield "no text", raw.replace("ä".encode(), b"\xff\xff"), None
    twice = gguf_bytes(keys_of(), {"a" * 5: b"1", "b" * 5: b"2"}).replace(b"bbbbb", b"aaaaa")
    yield "the same tensor twice", twice, "occurs twice"
    yield "no architecture", gguf_bytes({}, TENSORS), "has no architecture"
    yield "another architecture", gguf_bytes({"general.architecture": "mamba"}, TENSORS), "untested"
    yield "no heads", gguf_bytes({**keys_of(), "llama.attention.head_count": 0}, TENSORS), "attention heads"
    yield "an alignment", gguf_bytes({**keys_of(), "general.alignment": 3}, TENSORS), "alignment is 3"
    yield "another base", gguf_bytes(keys_of("gemma2", rope__freq_base_swa=1e4), TENSORS), "a separate base"
    yield "parts in words", gguf_bytes({**keys_of(), "split.count": "two"}, TENSORS), "split.count"
    yield "parts without end", gguf_bytes({**keys_of(), "split.count": 4_000_000_000}, TENSORS), "split.count"
    yield (
        "no divisors for a head",
        gguf_bytes(keys_of(rope__dimension_count=8), {FACTORS: bytes(16)}),
        "not a float32 list",
    )
    record = {**keys_of(), RECIPE_KEY: json.dumps({"recipe": 1})}
    yield "a record", gguf_bytes(record, TENSORS), "record"


@pytest.mark.parametrize(("raw", "says"), [case[1:] for case in _damaged()], ids=[case[0] for case in _damaged()])
def test_damaged_files_are_refused_in_one_line(tmp_path, run, raw, says):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    if says is None:  # Only names or texts changed, so the file is valid.
        open_gguf(path)
        return
    with pytest.raises(CtxextError, match=says) as caught:
        open_gguf(path)
    assert "\n" not in caught.value.message
    assert run("convert", path, tmp_path / "out.gguf", "--method", "yarn", "--factor", "2").exit_code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.fixture
def memory():
    """Return the peak memory since the test began, in bytes."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def test_a_list_of_empty_texts_takes_little_memory(gguf, memory):
    path = gguf(values={**keys_of(), "tokenizer.ggml.merges": [""] * 20_000})
    tracemalloc.reset_peak()
    read_header(path)
    assert memory() < 4 * path.stat().st_size


KILLED = """
import sys
from ctxext.gguf.convert import convert_gguf
from ctxext.api import Recipe
from ctxext.recipes.methods.mrrope import MrRope
print("ready", flush=True)
convert_gguf(sys.argv[1], sys.argv[2], Recipe([MrRope(factor=4)]), overwrite=True)
print("done", flush=True)
"""


@pytest.mark.slow
def test_kills_at_random_moments(gguf, tmp_path):
    """20 kills leave the old file, the complete new file or none, and the next run succeeds."""
    tensors = {f"blk.{number}.weight": bytes([number]) * (1 << 22) for number in range(24)}
    source, out, chance = gguf(tensors=tensors), tmp_path / "out.gguf", random.Random(0)

    def begun():
        words = [sys.executable, "-c", KILLED, str(source), str(out)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        return process, time.monotonic()

    process, started = begun()
    assert process.communicate()[0] == "done\n"
    seconds, whole, killed = time.monotonic() - started, out.read_bytes(), 0
    for _ in range(20):
        was_there = out.exists()
        if was_there and chance.random() < 0.5:
            out.unlink()
            was_there = False
        process, _ = begun()
        time.sleep(chance.uniform(0, seconds))
        process.kill()
        killed += process.communicate()[0] != "done\n"
        assert out.exists() or not was_there
        assert not out.exists() or out.read_bytes() == whole
    assert killed >= 10
    assert begun()[0].communicate()[0] == "done\n"
    assert out.read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir() if ".gguf" in path.name and path.suffix != ".lock"} == {
        "m.gguf",
        "out.gguf",
    }


@pytest.mark.parametrize("parts", [1, 3])
def test_every_file_is_on_the_disk_before_any_has_its_name(gguf, split, tmp_path, monkeypatch, parts):
    events = []
    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, r=real, n=name: events.append((n, given)) or r(*given))
    source = gguf() if parts == 1 else split()
    events.clear()
    convert_gguf(source, tmp_path / "out.gguf", Recipe([Yarn(factor=4)]))
    names = [name for name, _ in events]
    assert names == ["fsync"] * parts + (["replace"] if parts == 1 else ["rename"] * 3)
    assert [given[1].name for _, given in events[parts:]][-1] == (
        "out.gguf" if parts == 1 else "out-00001-of-00003.gguf"
    )


def test_a_failed_run_leaves_nothing(gguf, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    source = gguf()
    monkeypatch.setattr(converting, "copy_range", full)
    with pytest.raises(CtxextError, match="No space left"):
        convert_gguf(source, tmp_path / "out.gguf", Recipe([Yarn(factor=4)]))
    assert [path.name for path in tmp_path.iterdir() if ".gguf" in path.name] == ["m.gguf"]


def test_a_full_disk_is_seen_before_anything_is_written(gguf, tmp_path, monkeypatch):
    source, size = gguf(), 10**6
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=size))
    convert_gguf(source, tmp_path / "out.gguf", Recipe([Yarn(factor=4)]))
    size = source.stat().st_size
    monkeypatch.setattr(converting, "copy_range", lambda *given: pytest.fail("It was written to."))
    with pytest.raises(CtxextError, match="No space left"):
        convert_gguf(source, tmp_path / "b.gguf", Recipe([Yarn(factor=4)]))


def test_a_wrong_result_is_deleted(gguf, tmp_path, monkeypatch):
    wrong = {"context_length": 2048, "rope.scaling.type": "linear", "rope.scaling.factor": 4.001}
    monkeypatch.setattr(converting, "schedule_of", lambda rotary, architecture: (wrong, None))
    with pytest.raises(CtxextError, match="differs from the recipe"):
        convert_gguf(gguf(), tmp_path / "out.gguf", Recipe([PositionInterpolation(factor=4)]))
    assert not (tmp_path / "out.gguf").exists()


def test_what_may_be_replaced(gguf, tmp_path):
    source, out, step = gguf(), tmp_path / "out.gguf", Recipe([Yarn(factor=4)])
    with pytest.raises(CtxextError, match="SOURCE itself"):
        convert_gguf(source, source, step, overwrite_anything=True)
    with pytest.raises(CtxextError, match="not a GGUF file name"):
        convert_gguf(source, tmp_path / "out", step)
    convert_gguf(source, out, step)
    with pytest.raises(CtxextError, match="exists"):
        convert_gguf(source, out, step)
    convert_gguf(source, out, step, overwrite=True)
    other = gguf("other.gguf")
    with pytest.raises(CtxextError, match="was not created by ctxext"):
        convert_gguf(source, other, step, overwrite=True)
    convert_gguf(source, other, step, overwrite_anything=True)
    assert convert_gguf(source, tmp_path / "new" / "folder" / "out.gguf", step).out.is_file()


def test_the_commands(gguf, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gguf()
    shown = json.loads(run("inspect", "m.gguf", "--json").stdout)
    assert (shown["architecture"], shown["rotary"]["context_length"]) == ("llama", 512)
    plan = json.loads(run("convert", "m.gguf", "--method", "yarn", "--factor", "4", "--dry-run", "--json").stdout)
    assert {"key": "llama.rope.scaling.type", "old": None, "new": "yarn"} in plan["changes"]
    assert not (tmp_path / "m-yarn-2k.gguf").exists()
    result = run("convert", "m.gguf", "--method", "yarn", "--factor", "4")
    assert "llama.cpp check passed" in result.stdout
    assert "llama-server -m m-yarn-2k.gguf -c 2048" in " ".join(result.stderr.split())
    assert "yarn ×4" in run("inspect", "m-yarn-2k.gguf").stdout
    assert json.loads(run("verify", "m-yarn-2k.gguf", "--against", "m.gguf", "--json").stdout)["passed"]
    raw = bytearray((tmp_path / "m-yarn-2k.gguf").read_bytes())
    raw[-64] ^= 1  # In the last tensor, which is padded from 33 to 64 bytes.
    (tmp_path / "bad.gguf").write_bytes(raw)
    assert run("verify", "bad.gguf", "--against", "m.gguf").exit_code == 1


def test_what_is_for_checkpoints_only(gguf, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gguf()
    for words in (
        ("--link", "hard", "--method", "yarn", "--factor", "2"),
        ("--method", "auto", "--target-length", "1k"),
    ):
        result = run("convert", "m.gguf", "out.gguf", *words)
        assert result.exit_code == 1
        assert not (tmp_path / "out.gguf").exists()


CONVERTER = """
import json, os, sys
from pathlib import Path
assert os.environ["HF_HUB_OFFLINE"] == "1", "the network"
sys.path.insert(0, {tests!r})
from gguf_files import TENSORS, gguf_bytes, keys_of
folder, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
config = json.loads((folder / "config.json").read_text())
assert not list(folder.glob("*.py")), "code"
assert config.get("rope_scaling") is None and "ctxext" not in config, config
values = keys_of()
values["llama.context_length"] = config["max_position_embeddings"]
values["llama.rope.freq_base"] = float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
values["llama.embedding_length"] = config["hidden_size"]
values["llama.attention.head_count"] = config["num_attention_heads"]
out.write_bytes(gguf_bytes(values, TENSORS))
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with a stub of llama.cpp's converter, which writes the header without weights."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER.format(tests=str(Path(__file__).parents[1])))
    return folder


@pytest.mark.parametrize("step", [Yarn(factor=4), NtkByParts(factor=4), MrRope(factor=4)], ids=name_of)
def test_a_checkpoint_is_exported_with_its_recipe(llama, sources, tmp_path, step):
    convert(str(llama), tmp_path / "hf", Recipe([step]), check=False)
    done = export_gguf(str(tmp_path / "hf"), tmp_path / "out.gguf", llama_cpp=sources)
    assert done.difference < 1e-6
    exported = open_gguf(done.out)
    wanted = model_config(json.loads((tmp_path / "hf" / "config.json").read_text())).rotary
    assert exported.model.encoding.usable_length == wanted.usable_length
    assert exported.recipe["recipe"]["steps"][0]["method"] == step.name
    assert not [path for path in tmp_path.iterdir() if "export" in path.name]


def test_a_plain_checkpoint_is_exported_unchanged(llama, sources, tmp_path, run):
    result = run("export", "gguf", llama, tmp_path / "out.gguf", "--llama-cpp", sources, "--json")
    assert json.loads(result.stdout)["difference"] < 1e-6
    assert not open_gguf(tmp_path / "out.gguf").recipe


def test_what_appears_while_the_converter_runs_is_not_replaced(llama, sources, tmp_path):
    out, script = tmp_path / "out.gguf", sources / "convert_hf_to_gguf.py"
    script.write_text(script.read_text() + f"Path({str(out)!r}).write_text('mine')\n")
    convert(str(llama), tmp_path / "hf", Recipe([Yarn(factor=4)]), check=False)
    for source in (llama, tmp_path / "hf"):
        with pytest.raises(CtxextError, match="exists"):
            export_gguf(str(source), out, llama_cpp=sources)
        assert out.read_text() == "mine"
        out.unlink()


def test_exports_that_are_refused(llama, sources, tmp_path, run, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    convert(str(llama), tmp_path / "code", Recipe([SelfExtend(factor=2)]), check=False)
    for source, more, says in [
        (llama, {}, "needs llama.cpp's converter"),
        (llama, {"llama_cpp": tmp_path}, "has no convert_hf_to_gguf.py"),
        (llama, {"llama_cpp": sources, "outtype": "q1"}, "Unknown weight type"),
        (tmp_path / "code", {"llama_cpp": sources}, "contains modeling code"),
    ]:
        with pytest.raises(CtxextError, match=says):
            export_gguf(str(source), tmp_path / "out.gguf", **more)
    (sources / "convert_hf_to_gguf.py").write_text("raise SystemExit('Model FooForCausalLM is not supported')")
    with pytest.raises(CtxextError, match="converter failed: Model FooForCausalLM is not supported"):
        export_gguf(str(llama), tmp_path / "out.gguf", llama_cpp=sources)
    assert not (tmp_path / "out.gguf").exists()
    assert run("export", "onnx", llama, tmp_path / "out.gguf").exit_code == 1


def test_the_name_of_a_result_is_that_of_the_model_and_not_of_its_first_part(split, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert convert_gguf(split(), None, Recipe([Yarn(factor=4)])).out.name == "m-yarn-2k-00001-of-00003.gguf"
    assert sorted(path.name for path in folder.glob("*.gguf")) == [
        f"m-yarn-2k-{number:05d}-of-00003.gguf" for number in (1, 2, 3)
    ]


@pytest.mark.parametrize("number", [2, 3])
def test_verify_sees_a_key_of_a_later_part(split, tmp_path, number):
    values = [{}, {"general.name": "b"}, {"general.name": "b"}]
    source = split(values=values)
    out = convert_gguf(source, tmp_path / "out.gguf", Recipe([Yarn(factor=4)])).out
    assert all(check.is_passed for check in verify_gguf(out, source))
    part = tmp_path / f"out-{number:05d}-of-00003.gguf"
    raw = part.read_bytes()
    at = raw.index(b"general.name") + len("general.name") + 12
    part.write_bytes(raw[:at] + b"c" + raw[at + 1 :])
    assert [check.name for check in verify_gguf(out, source) if not check.is_passed] == ["keys"]


@pytest.mark.parametrize(("factor", "is_refused"), [(4.0, False), (3.9, True), (2.0, True), (1.0, True)])
def test_no_result_is_shorter_in_silence(gguf, factor, is_refused):
    values = keys_of(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=128)
    path, recipe = gguf(values=values), Recipe([Yarn(factor=factor)])
    if is_refused:
        with pytest.raises(CtxextError, match="supports 512 tokens, but the result would have"):
            plan_gguf(path, recipe, replace_scaling=True)
    plan = plan_gguf(path, recipe, replace_scaling=True, allow_shorter=is_refused)
    assert plan.header.get("llama.context_length") == round(128 * factor)


def test_a_header_of_gigabytes_is_not_read(tmp_path, memory):
    path = tmp_path / "m.gguf"
    key = b"general.name"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 1 << 29)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(1 << 30)  # A sparse file, which uses no disk space.
    with pytest.raises(CtxextError, match="a header of more than 256 MB"):
        read_header(path)
    assert memory() < 1 << 20
