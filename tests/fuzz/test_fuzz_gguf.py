"""Hostile GGUF files: an error on one line, no traceback, soon and in little memory, and nothing written."""

import json
import resource
import struct
import time

from hypothesis import given
from hypothesis import strategies as st

from ctxext.api import Recipe
from ctxext.errors import CtxextError
from ctxext.gguf.convert import check_methods, convert_gguf
from ctxext.gguf.model import FACTORS, RECIPE_KEY, open_gguf
from ctxext.gguf.verify import verify_gguf
from ctxext.methods import Llama3, Ntk, NtkByParts, PositionInterpolation, Yarn
from ctxext.recipes.methods.mrrope import MrRope
from gguf_files import keys_of, packed
from hostile import a_folder, fuzzing

SECONDS, MEGABYTES = 5, 200
FORMS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
KEYS = [
    *keys_of(),
    "general.alignment",
    "split.no",
    "split.count",
    "split.tensors.count",
    *(
        f"llama.{name}"
        for name in (
            "attention.key_length",
            "rope.dimension_count",
            "rope.freq_base_swa",
            "rope.scale_linear",
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "rope.scaling.attn_factor",
            "rope.scaling.yarn_beta_fast",
        )
    ),
]
ODD = (0, 1, 2, 3, 7, -1, 127, 128, 255, 511, 512, 513, 32767, 32768, 65535, 1 << 31, (1 << 32) - 1, 1 << 63, 1 << 64)
TEXTS = (b"", b"yarn", b"linear", b"none", b"longrope", b"llama", b"qwen2", b"phi3", b"gemma3", b"\xff\xfe", b"x" * 999)
RECORD = {"recipe": {"steps": [{"method": "yarn", "factor": 4.0}]}, "trained_length": 512, "replaced": {}}


def number(kind, value):
    """The bytes of a number, whatever is left of it in its type."""
    form = FORMS[kind]
    if form in "fd":
        try:
            return struct.pack(f"<{form}", value)
        except OverflowError:
            return struct.pack(f"<{form}", float("inf"))
    size = struct.calcsize(form)
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


NUMBERS = st.builds(
    lambda kind, value: struct.pack("<I", kind) + number(kind, value),
    st.sampled_from(sorted(FORMS)),
    st.one_of(st.sampled_from(ODD), st.sampled_from((0.0, 0.5, 1.0, 1e4, 1e6, 1e-30, 1e29, 1e38))),
)
STRINGS = st.sampled_from(TEXTS).map(lambda text: struct.pack("<IQ", 8, len(text)) + text)
RECORDS = st.one_of(
    st.just(RECORD),
    st.builds(
        lambda key, value: {**RECORD, key: value},
        st.sampled_from(["recipe", "trained_length", "replaced", "version"]),
        st.sampled_from(
            [
                None,
                True,
                [],
                -1,
                10**40,
                1e300,
                "x",
                {FACTORS: [1.0] * 8},
                {FACTORS: [1.0]},
                {FACTORS: [1e300] * 8},
                {"llama.context_length": 10**400},
                {"llama.context_length": [1]},
                {"llama.context_length": None},
                {"llama.rope.scaling.type": {"a": 1}},
                {"llama.rope.scaling.factor": 1e-300},
            ]
        ),
    ),
).map(lambda record: json.dumps(record).encode())
LISTS = st.sampled_from(
    [struct.pack("<IIQ", 9, 4, 2) + bytes(8), struct.pack("<IIQ", 9, 8, 0), struct.pack("<IIQ", 9, 9, 1)]
)
STARTS = (
    keys_of(),
    keys_of(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=128),
    keys_of(rope__scaling__type="linear", rope__scaling__factor=4.0),
    {**keys_of("phi3"), "split.tensors.count": 1},
)


@st.composite
def files(draw):
    """The bytes of a file that differs from a whole one in some keys, tensors or bytes."""
    values = {key: packed(value) for key, value in draw(st.sampled_from(STARTS)).items()}
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=3)):
        values[key] = draw(st.one_of(NUMBERS, STRINGS, LISTS))
    if draw(st.booleans()):
        text = draw(RECORDS)
        values[RECIPE_KEY] = struct.pack("<IQ", 8, len(text)) + text
    tensors = [("a.weight", (draw(st.sampled_from((0, 1, 32))),), 24)]
    if draw(st.booleans()):
        tensors.append((FACTORS, (draw(st.sampled_from((0, 4, 8, 9))),), draw(st.sampled_from((0, 0, 0, 24)))))
    head, offset, body = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))], 0, b""
    for key, value in values.items():
        head.append(struct.pack("<Q", len(key)) + key.encode() + value)
    for name, shape, kind in tensors:
        size = shape[0] * (4 if kind == 0 else 1)
        head.append(struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IQIQ", 1, *shape, kind, offset))
        content = draw(st.sampled_from((struct.pack("<f", 1.0), struct.pack("<f", 2.0), bytes(4), b"\xff" * 4)))
        body += (content * (size // 4 + 1))[:size] + bytes(-size % 32)
        offset += size + -size % 32
    raw = b"".join(head)
    raw = bytearray(raw + bytes(-len(raw) % 32) + body)
    for _ in range(draw(st.sampled_from((0, 0, 1, 3)))):
        place = draw(st.integers(0, len(raw) - 9))
        form = draw(st.sampled_from(("B", "I", "Q")))
        struct.pack_into(f"<{form}", raw, place, draw(st.sampled_from(ODD)) & ((1 << 8 * struct.calcsize(form)) - 1))
    return bytes(raw[: draw(st.sampled_from((None, None, None, len(raw) // 2, 10)))])


@fuzzing(60)
@given(
    files(),
    st.sampled_from([Yarn, PositionInterpolation, Ntk, NtkByParts, MrRope, Llama3]),
    st.booleans(),
    st.sampled_from([2.0, 1.0, 1000.0]),
)
def test_gguf_files(content, method, replace_scaling, factor):
    with a_folder() as folder:
        path, out = folder / "m.gguf", folder / "out.gguf"
        path.write_bytes(content)
        started, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        made, refusal = False, None
        try:
            model = open_gguf(path)
            check_methods(model)
            if model.recipe:
                verify_gguf(path)
            options = {"replace_scaling": replace_scaling, "allow_shorter": True}
            convert_gguf(path, out, Recipe([method(factor=factor)]), **options)
            made = True
            assert all(check.is_passed for check in verify_gguf(out, path))
        except CtxextError as error:
            refusal = error
        if refusal is not None:
            assert "\n" not in refusal.message
            assert "please report" not in (refusal.hint or "")
            assert not made, "what was written is not read"
        assert made or [place.name for place in folder.iterdir()] == ["m.gguf"]
        assert time.process_time() - started < SECONDS
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEGABYTES << 10
