"""The loaded result against formulas written here from the papers, in float64 and with no code of the package."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext.converters import convert
from ctxext.recipes import (
    AdjustedBase,
    DynamicNtk,
    Llama3,
    LongRope,
    Ntk,
    NtkByParts,
    PositionInterpolation,
    Recipe,
    Yarn,
)
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import attention_scaling, model_config
from small_llama import make_llama

FACTORS = (2.0, 4.0, 8.0, 32.0)
MODELS = tuple(itertools.product((64, 128), (1e4, 5e5), (2048, 8192, 131072)))


def plain(base: float, d: int) -> list[float]:
    return [base ** (-2 * i / d) for i in range(d // 2)]


def ramp(base: float, d: int, length: int, s: float, fast: float, slow: float) -> list[float]:
    """NTK-by-parts as YaRN's authors released it: linear in the dimension's index, ends rounded outwards.

    The bounds are clamped at 0 and d - 1, which is what the runtime does (docs/traps.md, trap 6).
    """

    def index(turns: float) -> float:
        return d / 2 * math.log(length / (2 * math.pi * turns)) / math.log(base)

    start, end = max(0, math.floor(index(fast))), min(d - 1, math.ceil(index(slow)))
    result = []
    for i, theta in enumerate(plain(base, d)):
        gone = 0.0 if i < start else 1.0 if i > end else (i - start) / (end - start)
        result.append((1 - gone) * theta + gone * theta / s)
    return result


def bands(base: float, d: int, length: int, s: float) -> list[float]:
    """Llama 3.1: long wavelengths divided, short ones kept, the rest blended."""
    result = []
    for theta in plain(base, d):
        wavelength = 2 * math.pi / theta
        if wavelength < length / 4:
            result.append(theta)
        elif wavelength > length / 1:
            result.append(theta / s)
        else:
            smooth = (length / wavelength - 1) / (4 - 1)
            result.append((1 - smooth) * theta / s + smooth * theta)
    return result


def factors_of(d: int) -> tuple[float, ...]:
    return tuple(1.0 + 0.5 * i for i in range(d // 2))


def reference(name: str, s: float, d: int, base: float, length: int, at: int) -> tuple[list[float], float]:
    """Inverse frequencies and attention scaling for a sequence of `at` tokens."""
    yarn_scaling = 0.1 * math.log(s) + 1
    if name == "pi":
        return [theta / s for theta in plain(base, d)], 1.0
    if name == "ntk":
        return plain(base * s ** (d / (d - 2)), d), 1.0
    if name == "abf":
        return plain(3e6, d), 1.0
    if name == "ntk-by-parts":
        return ramp(base, d, length, s, 32, 1), 1.0
    if name == "yarn":
        return ramp(base, d, length, s, 32, 1), yarn_scaling
    if name == "yarn-other":
        return ramp(base, d, length, s, 16, 2), 1.25
    if name == "llama3":
        return bands(base, d, length, s), 1.0
    if name == "dynamic":
        needed = s * max(at, length) / length - (s - 1)
        return plain(base * needed ** (d / (d - 2)), d), 1.0
    assert name == "longrope"
    divisors = factors_of(d) if at > length else (1.0,) * (d // 2)
    scaled = [theta / divisor for theta, divisor in zip(plain(base, d), divisors, strict=True)]
    return scaled, math.sqrt(1 + math.log(s) / math.log(length))


def method_for(name: str, s: float, d: int):
    return {
        "pi": lambda: PositionInterpolation(factor=s),
        "ntk": lambda: Ntk(factor=s),
        "abf": lambda: AdjustedBase(theta=3e6, factor=s),
        "ntk-by-parts": lambda: NtkByParts(factor=s),
        "yarn": lambda: Yarn(factor=s),
        "yarn-other": lambda: Yarn(factor=s, beta_fast=16, beta_slow=2, attention_factor=1.25),
        "llama3": lambda: Llama3(factor=s),
        "longrope": lambda: LongRope(factor=s, long_factor=factors_of(d)),
        "dynamic": lambda: DynamicNtk(factor=s),
    }[name]()


NAMES = ("pi", "ntk", "abf", "ntk-by-parts", "yarn", "yarn-other", "llama3", "longrope", "dynamic")


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
        rotary = loaded_rotary(out)
        for at in (length // 2, round(length * factor)):
            wanted, scaling = reference(name, factor, head_dim, theta, length, at)
            got = frequencies_at(rotary, at)
            error = (got / torch.tensor(wanted, dtype=torch.float64) - 1).abs().max().item()
            assert error < 1e-6, (factor, at, error)
            assert abs(rotary.attention_scaling / scaling - 1) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_our_own_frequencies_equal_the_papers(name):
    from ctxext.recipes.encodings.rotary import Rotary

    for (d, base, length), s in itertools.product(MODELS, FACTORS):
        config = {
            "model_type": "llama",
            "head_dim": d,
            "num_attention_heads": 1,
            "hidden_size": d,
            "rope_theta": base,
            "max_position_embeddings": length,
        }
        rotary = model_config(method_for(name, s, d).edit(model_config(config)).config).rotary
        assert isinstance(rotary, Rotary)
        for at in (length // 2, round(length * s)):
            wanted, scaling = reference(name, s, d, base, length, at)
            assert inverse_frequencies(rotary, at) == pytest.approx(wanted, rel=1e-9)
            assert attention_scaling(rotary) == pytest.approx(scaling, rel=1e-12)


def test_the_reference_would_notice_a_raised_maximum_taken_for_the_trained_length(sources, tmp_path):
    """docs/traps.md, trap 3, planted: without the original length the ramp is worked out for the wrong window."""
    import json

    out = tmp_path / "out"
    convert(str(sources(64, 1e4, 2048)), out, Recipe([Yarn(factor=4)]))
    config = json.loads((out / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        del config[key]["original_max_position_embeddings"]
    (out / "config.json").write_text(json.dumps(config))
    wanted, _ = reference("yarn", 4.0, 64, 1e4, 2048, 1024)
    got = frequencies_at(loaded_rotary(out), 1024)
    assert (got / torch.tensor(wanted, dtype=torch.float64) - 1).abs().max() > 1e-2
