"""The loaded result against the formulas of the papers (`by_hand.py`)."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from by_hand import by_hand
from ctxext.api import Recipe, convert
from ctxext.methods import Yarn
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import attention_scaling
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from small_llama import make_llama

FACTORS = (2.0, 4.0, 8.0, 32.0)
MODELS = tuple(itertools.product((64, 128), (1e4, 5e5), (2048, 8192, 131072)))


NAMES = ("pi", "ntk", "abf", "ntk-by-parts", "yarn", "yarn-other", "llama3", "longrope", "dynamic")


def numbers_of(name: str, d: int) -> dict:
    """Numbers of a case besides its factor."""
    return {
        "abf": {"theta": 3e6},
        "yarn-other": {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25},
        "longrope": {"short_factor": (1.0,) * (d // 2), "long_factor": tuple(1.0 + 0.5 * i for i in range(d // 2))},
    }.get(name, {})


def method_for(name: str, s: float, d: int):
    return method_named(name.removesuffix("-other"))(factor=s, **numbers_of(name, d))


def reference(name: str, s: float, d: int, base: float, length: int, at: int) -> tuple[list[float], float]:
    return by_hand(name.removesuffix("-other"), s, base, d, length, at, **numbers_of(name, d))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One tiny checkpoint per head size, base and trained length, made when it is first asked for."""
    made: dict[tuple, Path] = {}

    def source(head_dim: int, theta: float, length: int) -> Path:
        key = (head_dim, theta, length)
        if key not in made:
            made[key] = make_llama(
                tmp_path_factory.mktemp("reference") / "source",
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=head_dim,
                rope_theta=theta,
                max_position_embeddings=length,
            )
        return made[key]

    return source


def loaded_rotary(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb


def frequencies_at(rotary, at: int) -> torch.Tensor:
    """What the module uses for a sequence of `at` tokens: dynamic schedules settle it in their forward."""
    rotary(torch.zeros(1, 1, 4), torch.tensor([[at - 1]]))
    return rotary.inv_freq.double()


@pytest.mark.parametrize(("head_dim", "theta", "length"), MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_loaded_frequencies_equal_the_papers(name, head_dim, theta, length, sources, tmp_path):
    for factor in FACTORS[::3]:
        out = tmp_path / f"{factor}"
        convert(str(sources(head_dim, theta, length)), out, Recipe([method_for(name, factor, head_dim)]))
        rotary, ours = loaded_rotary(out), model_config(json.loads((out / "config.json").read_text())).rotary
        assert attention_scaling(ours) == pytest.approx(rotary.attention_scaling, rel=1e-6)
        for at in (length // 2, round(length * factor)):
            wanted, scaling = reference(name, factor, head_dim, theta, length, at)
            got = frequencies_at(rotary, at)
            error = (got / torch.tensor(wanted, dtype=torch.float64) - 1).abs().max().item()
            assert error < 1e-6, (factor, at, error)
            assert inverse_frequencies(ours, at) == pytest.approx(wanted, rel=1e-9)
            assert abs(rotary.attention_scaling / scaling - 1) < 1e-6


def test_the_reference_notices_a_raised_maximum_used_as_the_trained_length(sources, tmp_path):
    """docs/traps.md, trap 3, planted: without the original length the ramp is worked out for the wrong window."""
    out = tmp_path / "out"
    convert(str(sources(64, 1e4, 2048)), out, Recipe([Yarn(factor=4)]))
    config = json.loads((out / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        del config[key]["original_max_position_embeddings"]
    (out / "config.json").write_text(json.dumps(config))
    wanted, _ = reference("yarn", 4.0, 64, 1e4, 2048, 1024)
    got = frequencies_at(loaded_rotary(out), 1024)
    assert (got / torch.tensor(wanted, dtype=torch.float64) - 1).abs().max() > 1e-2
