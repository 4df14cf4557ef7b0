"""Every family the table claims: a tiny random model is converted by every method, loaded and run.

What the loaded rotary module uses is compared with the formulas, so that a key that a family's code ignores shows.
"""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import tiny_models
from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters import convert
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.recipes import METHODS, MsPoE, PositionInterpolation, Recipe
from ctxext.recipes.encodings.rotary import model_config

IS_4 = transformers.__version__.startswith("4.")
QUICK = ("llama", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_neox", "phi", "cohere", "olmo2", "gpt_oss", "glm")
_TWO_BASES = "4.57 saves the tiny model with two different bases, and the two versions believe different ones"
NOT_AT_ONE_WITH_4 = {
    "apertus": _TWO_BASES,
    "gpt_oss": _TWO_BASES,
    "olmo": "its class in 4.57 refuses a factor of 1",
    "olmo2": "its class in 4.57 refuses a factor of 1",
}
NOT_SAVED_BY_4 = ("zamba2",)
NUM_TOKENS = 48
CONFIG_ONLY = tuple(method for method in METHODS if not method.needs_code())


def families() -> list:
    marks = {name: () if name in QUICK else pytest.mark.slow for name in tiny_models.FAMILIES}
    return [pytest.param(name, marks=marks[name]) for name in tiny_models.FAMILIES]


def save(model_type: str, folder: Path) -> Path:
    if IS_4 and model_type in NOT_SAVED_BY_4:
        pytest.skip("4.57 cannot save its own tiny model: layers share weights")
    return tiny_models.save(model_type, folder)


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(3, 3 + NUM_TOKENS)[None] % vocabulary
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("model_type", families())
def test_every_method_or_a_reason(model_type, tmp_path):
    source = save(model_type, tmp_path / "source")
    checkpoint = open_checkpoint(str(source))
    family = family_of(checkpoint.config)
    if family.reason:
        with pytest.raises(CtxextError):
            make_plan(checkpoint, Recipe([PositionInterpolation(factor=4)]))
        return
    before = logits(source)
    rotary = model_config(checkpoint.config).rotary
    for kind in CONFIG_ONLY:
        name, method = kind.name, kind.example_step(rotary)
        if kind.refusal(checkpoint.config, family):
            with pytest.raises(CtxextError):
                make_plan(checkpoint, Recipe([method]))
            continue
        if IS_4 and family.rope_types_4x is not None and method.rope_type not in family.rope_types_4x:
            with pytest.raises(CtxextError, match=r"transformers 4\.[\d.]+ does not (carry|build)"):
                convert(str(source), tmp_path / name, Recipe([method]))
            continue
        convert(str(source), tmp_path / name, Recipe([method]))
        after = logits(tmp_path / name)
        assert after.isfinite().all(), name
        # Inside the trained length, dynamic and the short list of longrope change nothing; all others must.
        if name not in ("dynamic", "longrope"):
            assert not torch.equal(after, before), f"{name} has no effect"


@pytest.mark.parametrize("model_type", families())
def test_factor_one_changes_nothing(model_type, tmp_path):
    if IS_4 and model_type in NOT_AT_ONE_WITH_4:
        pytest.skip(NOT_AT_ONE_WITH_4[model_type])
    source = save(model_type, tmp_path / "source")
    config = open_checkpoint(str(source)).config
    if PositionInterpolation.refusal(config, family_of(config)):
        return
    convert(str(source), tmp_path / "one", Recipe([PositionInterpolation(factor=1)]))
    assert torch.equal(logits(tmp_path / "one"), logits(source))


def test_refusals_name_the_family_and_the_reason(tmp_path):
    source = tiny_models.save("phi3", tmp_path / "source")
    with pytest.raises(CtxextError, match=r'"phi3".*longrope'):
        convert(str(source), tmp_path / "out", Recipe([PositionInterpolation(factor=4)]))


@pytest.mark.parametrize("model_type", ["deepseek_v3"])
def test_latent_attention_cannot_carry_mspoe(model_type, tmp_path):
    source = tiny_models.save(model_type, tmp_path / "source")
    with pytest.raises(CtxextError, match="latent attention"):
        convert(str(source), tmp_path / "out", Recipe([MsPoE(head_order="fixed")]))
