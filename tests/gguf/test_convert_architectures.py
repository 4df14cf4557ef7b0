"""GGUF files of latent attention, sliding layers, M-RoPE, Mistral's temperature, and models without positions.

The expected factors are those of llama.cpp's `llama_context` and of the graph of deepseek2, computed here by hand.
"""

import json
import math
import struct

import pytest

from ctxext.api import Recipe
from ctxext.converters.convert import convert
from ctxext.errors import CtxextError
from ctxext.gguf.convert import check_methods, convert_gguf, plan_gguf
from ctxext.gguf.export import export_gguf
from ctxext.gguf.header import read_header
from ctxext.gguf.model import FACTORS, open_gguf
from ctxext.gguf.verify import verify_gguf
from ctxext.methods import Llama3, Ntk, NtkByParts, PositionInterpolation, Yarn
from ctxext.recipes.methods.declare import Declare
from gguf_files import TENSORS, gguf_bytes, keys_of
from small_llama import change_json
from tiny_models import save

USUAL = 0.1 * math.log(4) + 1
MULTIPLIER = "rope__scaling__yarn_log_multiplier"
MINISTRAL = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 2.0,
    "rope__scaling__original_context_length": 256,
    "rope__scaling__yarn_beta_fast": 32.0,
    "rope__scaling__yarn_beta_slow": 1.0,
    MULTIPLIER: 1.0,
    "attention__temperature_scale": 0.1,
}


@pytest.fixture
def gguf(tmp_path):
    """Write a GGUF file of an architecture."""

    def write(architecture, tensors=TENSORS, name="m.gguf", **more):
        path = tmp_path / name
        path.write_bytes(gguf_bytes(keys_of(architecture, **more), tensors))
        return path

    return write


def keys(path):
    """Return the keys of a file without the name of its architecture."""
    header = read_header(path)
    return {key.partition(".")[2]: header.get(key) for key in header.values}


@pytest.mark.parametrize(
    ("step", "rotated", "scores"),
    [
        (PositionInterpolation(factor=4), 1.0, 1.0),
        (Yarn(factor=4), 1.0, USUAL**2),
        (Yarn(factor=4, mscale=0.707, mscale_all_dim=0.707), 1.0, (0.0707 * math.log(4) + 1) ** 2),
        (Yarn(factor=4, mscale_all_dim=0.0), USUAL, 1.0),
        (Yarn(factor=4, attention_factor=1.2), 1.2, 1.0),
        (Yarn(factor=4, attention_factor=USUAL, mscale_all_dim=1.0), USUAL, USUAL**2),
        (NtkByParts(factor=4), 1.0, 1.0),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else f"{value:.3f}",
)
def test_latent_attention_scales_all_scores(gguf, tmp_path, step, rotated, scores):
    source = gguf("deepseek2", rope__dimension_count=8)
    out = convert_gguf(source, tmp_path / "out.gguf", Recipe([step])).out
    get = keys(out).get
    weight = get("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    factor = get("rope.scaling.attn_factor", 1.0)
    is_yarn = get("rope.scaling.type") == "yarn"
    # With a weight, both mscales are equal and their quotient is 1; ggml multiplies by the usual temperature again.
    context = factor * ((1.0 if weight else USUAL) / USUAL if is_yarn else 1.0)
    assert context * (USUAL if is_yarn else 1.0) == pytest.approx(rotated, rel=1e-6)
    graph = context * USUAL * (1 + 0.1 * weight * math.log(4))
    assert graph**2 == pytest.approx(scores, rel=1e-6)
    assert all(check.is_passed for check in verify_gguf(out, source))


def test_the_schedule_of_deepseek_is_read_and_inherited(gguf, tmp_path):
    more = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__dimension_count": 8}
    more |= {"rope__scaling__original_context_length": 128, MULTIPLIER: 0.0707}
    model = open_gguf(gguf("deepseek2", **more))
    assert model.model.rotary.parameters["attention_factor"] == 1
    assert model.model.rotary.parameters["mscale_all_dim"] == pytest.approx(0.707, rel=1e-6)
    out = convert_gguf(model.path, tmp_path / "out.gguf", Recipe([Yarn(factor=8)]), replace_scaling=True).out
    assert keys(out)["rope.scaling.yarn_log_multiplier"] == pytest.approx(0.0707, rel=1e-6)
    with pytest.raises(CtxextError, match=r"an invalid value for deepseek2\.rope"):
        open_gguf(gguf("deepseek2", **{**more, MULTIPLIER: "1"}))


def test_the_temperature_of_mistral_keeps_its_start(gguf, tmp_path):
    source = gguf("mistral3", **MINISTRAL)
    assert open_gguf(source).model.rotary.parameters["attention_factor"] == 1
    for step in (Yarn(factor=8), Ntk(factor=8), Llama3(factor=8)):
        out = convert_gguf(source, tmp_path / f"{step.name}.gguf", Recipe([step]), replace_scaling=True).out
        written = keys(out)
        assert written["rope.scaling.original_context_length"] == 256
        assert not {"rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast"} & set(written)
    # Without the multiplier, llama.cpp applies the usual temperature, which Ministral 3 does not have.
    attention = keys(tmp_path / "yarn.gguf")["rope.scaling.attn_factor"] * (0.1 * math.log(8) + 1)
    assert attention == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(CtxextError, match="raises its attention temperature from 256 tokens"):
        plan_gguf(source, Recipe([Yarn(factor=4)]), replace_scaling=True, original_length=512)


def test_pairs_of_gemma_4_that_do_not_rotate_stay_so(gguf, tmp_path):
    divisors = [1.0] * 6 + [1e30] * 2
    path = gguf("gemma4", {FACTORS: bytes(32), **TENSORS}, rope__freq_base_swa=1e4, attention__head_count_kv=["1", "2"])
    raw = path.read_bytes()
    at = raw.index(FACTORS.encode()) + len(FACTORS)
    raw = raw[:at] + struct.pack("<IQI", 1, 8, 0) + raw[at + 16 :]
    start = read_header(path).data_start
    path.write_bytes(raw[:start] + struct.pack("<8f", *divisors) + raw[start + 32 :])
    rotary = open_gguf(path).model.rotary
    assert (rotary.rope_type, rotary.dim, rotary.span) == ("default", 12, 16)
    for step in (Yarn(factor=4), PositionInterpolation(factor=4), NtkByParts(factor=4), Llama3(factor=4)):
        out = convert_gguf(path, tmp_path / f"{step.name}.gguf", Recipe([step])).out
        header, content = read_header(out), out.read_bytes()
        tensor = next(tensor for tensor in header.tensors if tensor.name == FACTORS)
        written = struct.unpack("<8f", content[header.data_start + tensor.offset :][:32])
        assert written[6:] == pytest.approx(divisors[6:])
        assert (list(written[:6]) == divisors[:6]) == (step.name in ("yarn", "pi"))
        assert all(check.is_passed for check in verify_gguf(out, path))
    reasons = check_methods(open_gguf(path))
    assert "sliding-window layers" in reasons["mrrope"]


@pytest.mark.parametrize("name", ["granitehybrid", "nemotron_h", "nemotron_h_moe"])
def test_models_without_positions_only_declare_a_length(gguf, tmp_path, run, name):
    source = gguf(name, rope__scaling__finetuned=False, attention__head_count_kv=["0", "2"])
    out = tmp_path / "out.gguf"
    result = run("convert", source, out, "--method", "declare", "--target-length", "4k")
    assert result.exit_code == 0, result.output
    changed = {key for key, value in keys(out).items() if value != keys(source).get(key)}
    assert changed == {"context_length", "recipe"}
    assert keys(out)["context_length"] == 4096
    assert run("verify", out, "--against", source).exit_code == 0
    data = json.loads(run("inspect", source, "--json").stdout)
    assert data["rotary"] is None
    assert data["methods"] == {"declare": {"applies": True, "reason": ""}}
    assert "declare" in run("inspect", out).output
    with pytest.raises(CtxextError, match="nothing to rescale"):
        plan_gguf(source, Recipe([Yarn(factor=4)]))
    again = plan_gguf(out, Recipe([Declare(factor=16)]), replace_scaling=True)
    assert again.header.get(f"{name}.context_length") == 8192


def test_what_is_refused_by_name(gguf):
    with pytest.raises(CtxextError, match="rotates its attention layers"):
        open_gguf(gguf("granitehybrid"))
    with pytest.raises(CtxextError, match="sections of positions"):
        open_gguf(gguf("qwen3", rope__dimension_sections=["11", "11", "10", "0"]))
    with pytest.raises(CtxextError, match="ends of its ramp"):
        plan_gguf(gguf("gpt-oss"), Recipe([Yarn(factor=4, truncate=False)]))
    with pytest.raises(CtxextError, match="yarn_log_multiplier, which is untested"):
        open_gguf(gguf("llama", **{MULTIPLIER: 0.1}))


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "gpt-oss"])
def test_plain_architectures_have_the_methods_of_header_keys(gguf, name):
    more = {"rope__dimension_sections": ["11", "11", "10", "0"]} if name != "gpt-oss" else {}
    reasons = check_methods(open_gguf(gguf(name, **more)))
    assert {method for method, why in reasons.items() if not why} == {"pi", "ntk", "abf", "yarn", "ntk-by-parts"}


@pytest.mark.parametrize(("name", "warns"), [("gpt-oss", True), ("gemma2", True), ("gemma3", False)])
def test_a_schedule_that_changes_sliding_layers_warns(gguf, name, warns):
    plan = plan_gguf(gguf(name, attention__sliding_window=64), Recipe([Yarn(factor=4)]))
    assert any("sliding-window layers" in caution for caution in plan.cautions) == warns


CONVERTER = """
import json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from gguf_files import TENSORS, gguf_bytes, keys_of
folder, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
schedule = json.loads((folder / "config.json").read_text())["rope_parameters"]
more = {{}}
if {name!r} == "mistral3":
    assert schedule["rope_type"] == "yarn" and schedule["mscale_all_dim"] == 1 and schedule["factor"] == 1
    more = {{**{ministral!r}, "rope__scaling__factor": 1.0, "rope__scaling__original_context_length": 64}}
more |= {{"context_length": 64, "rope__dimension_count": 16}}
out.write_bytes(gguf_bytes(keys_of({name!r}, **more), TENSORS))
"""


@pytest.mark.parametrize(("family", "name"), [("deepseek_v2", "deepseek2"), ("ministral3", "mistral3")])
def test_an_export_has_the_temperature_of_the_checkpoint(tmp_path, request, family, name):
    """Their files have another default than these checkpoints."""
    tests = str(request.config.rootpath / "tests")
    converter = CONVERTER.format(tests=tests, name=name, ministral=MINISTRAL)
    (tmp_path / "convert_hf_to_gguf.py").write_text(converter)
    try:
        source = save(family, tmp_path / "plain")
    except KeyError:
        pytest.skip("this transformers has no such family")
    change_json(source / "config.json", max_position_embeddings=64)
    convert(str(source), tmp_path / "hf", Recipe([Yarn(factor=4)]), check=False)
    out = export_gguf(str(tmp_path / "hf"), tmp_path / "out.gguf", llama_cpp=tmp_path).out
    rotary = open_gguf(out).model.rotary
    assert rotary.parameters["attention_factor"] == pytest.approx(USUAL, rel=1e-6)
    assert rotary.parameters.get("mscale_all_dim", 0.0) == pytest.approx(0.0, abs=1e-6)
    assert rotary.usable_length == 256
