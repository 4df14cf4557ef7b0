"""What the header of a GGUF file says of a model's rotary encoding, and what llama.cpp makes of it."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError
from ctxext.gguf import SUFFIX, part_paths
from ctxext.gguf.header import F32, Header, Tensor, read_header
from ctxext.reading.length import format_length
from ctxext.reading.strict import parse_json
from ctxext.recipes.encodings.rotary import ModelConfig, model_config
from ctxext.recipes.recipe import plain_config, recipe_from_dict

RECIPE_KEY = "ctxext.recipe"
"""Where a converted file says what was done: the recipe, the version, and the values that it replaced."""
FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the angle of each pair in most architectures that ask for one, and the name of
the divisors in the record of a conversion."""
_LONG_AND_SHORT = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Lists of which llama.cpp takes one for a whole run, by the length that it is started with."""
_MOST_PARTS = 99_999
_MOST_DIMENSIONS = 1 << 16
BETAS = (32.0, 1.0)
"""YaRN's beta_fast and beta_slow in llama.cpp, which most architectures do not read from the file."""


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp reads of a schedule in one architecture; each was run.

    Attributes:
        name: The name in general.architecture.
        models: The models that have it, for people.
        lists: The tensors of divisors that it reads, with the same content; with them it carries any static schedule.
        has_sliding_base: Whether its sliding-window layers rotate by another base, which no schedule changes.
    """

    name: str
    models: str
    lists: tuple[str, ...]
    has_sliding_base: bool


@cache
def architectures() -> Mapping[str, Architecture]:
    """The known architectures by name."""
    text = resources.files("ctxext.gguf").joinpath("architectures.json").read_text(encoding="utf-8")
    return {
        name: Architecture(name, entry["models"], tuple(entry["lists"]), entry.get("sliding_base", False))
        for name, entry in json.loads(text).items()
    }


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file, without its weights.

    Attributes:
        path: The file, the first of several where it is split.
        header: Its header.
        architecture: What llama.cpp reads there.
        model: The model with the encoding that the file has now.
        plain: The same as it was before ctxext converted it; `model` where ctxext did not.
        recipe: What ctxext noted: version, recipe and the values that it replaced; empty where it did not convert it.
    """

    path: Path
    header: Header
    architecture: Architecture
    model: ModelConfig
    plain: ModelConfig
    recipe: Mapping[str, Any]

    def key(self, name: str) -> str:
        """The full name of one of its architecture's keys."""
        return f"{self.architecture.name}.{name}"

    @property
    def parts(self) -> tuple[Path, ...]:
        """All files of a split model in order; the file alone where it is whole."""
        count = _count(self.header)
        return (self.path,) if count == 1 else part_paths(self.path, count)

    @property
    def unscaled(self) -> ModelConfig:
        """The model without any schedule, from which a recipe starts."""
        return plain_config(self.plain) if self.plain.encoding.is_scaled else self.plain


def open_gguf(path: str | Path, original_length: int | None = None) -> GgufModel:
    """Read a GGUF file's header and the rotary encoding that it says.

    Args:
        path: The file, or the first of a split model's.
        original_length: What the model was trained on, in tokens, where the user knows better.

    Raises:
        CtxextError: it is not there, damaged, not the first of its parts, or of an architecture that was not tried.
    """
    place = Path(path)
    if not place.is_file():
        raise CtxextError(f'There is no file "{path}".', hint="Name a .gguf file.")
    header = read_header(place)
    name = header.get("general.architecture")
    if not isinstance(name, str):
        raise CtxextError(f'"{path}" names no architecture.', hint="Name a file with a whole model.")
    if name not in architectures():
        raise CtxextError(
            f'"{path}" has the architecture "{name}", of which was not tried what llama.cpp reads.',
            hint=f"Known: {', '.join(architectures())}. Or convert the checkpoint that it was made from.",
        )
    architecture = architectures()[name]
    _check_parts(place, header)
    noted = _noted(place, header)
    now = _config(place, header, architecture, header.get, factors_of(place, header, architecture))
    if noted:
        old = {**{key: value.content for key, value in header.values.items()}, **noted["replaced"]}

        def get(key: str, default: Any = None) -> Any:
            return default if old.get(key) is None else old[key]

        before = _config(place, header, architecture, get, old.get(FACTORS))
        plain = model_config(before, original_length or noted.get("trained_length"))
    else:
        plain = model_config(now, original_length)
    model = model_config(now, plain.encoding.trained_length) if noted else plain
    return GgufModel(place, header, architecture, model, plain, noted)


def _count(header: Header) -> int:
    """The number of files of the model.

    Raises:
        CtxextError: it is none.
    """
    count = header.get("split.count") or 1
    if not isinstance(count, int) or not 0 < count <= _MOST_PARTS:
        raise CtxextError(f"The GGUF header says {count} for split.count.", hint="Fetch the file again.")
    return count


def _check_parts(path: Path, header: Header) -> None:
    """Refuse a part of a split model that is not the first, or that stands without the others.

    Raises:
        CtxextError: it is.
    """
    if (count := _count(header)) == 1:
        return
    number, (first, *others) = header.get("split.no") or 0, part_paths(path, count)
    if number or path.name != first.name:
        which = number + 1 if isinstance(number, int) else number
        raise CtxextError(
            f'"{path}" is part {which} of {count} of a model.', hint=f"Name the first, …-00001-of-{count:05d}{SUFFIX}."
        )
    for other in others:
        if not other.is_file():
            raise CtxextError(f'"{other}" is missing beside the first part.', hint="Fetch all parts of the model.")


def _noted(path: Path, header: Header) -> dict[str, Any]:
    """What ctxext noted of its conversion; empty where it did not convert the file.

    Raises:
        CtxextError: it is not what ctxext writes.
    """
    text = header.get(RECIPE_KEY)
    if text is None:
        return {}
    noted = parse_json(text, RECIPE_KEY) if isinstance(text, str) else None
    replaced, length = (noted.get("replaced"), noted.get("trained_length")) if isinstance(noted, dict) else (None, 0)
    factors = replaced.get(FACTORS) or [] if isinstance(replaced, dict) else None
    is_whole = isinstance(factors, list) and all(isinstance(factor, float) and factor > 0 for factor in factors)
    if not isinstance(noted, dict) or not is_whole or not isinstance(length, int) or length <= 0:
        raise CtxextError(f'The record of the conversion in "{path}" is damaged.', hint="Convert its source again.")
    recipe_from_dict(noted.get("recipe"), RECIPE_KEY)
    return noted


def _config(
    path: Path, header: Header, architecture: Architecture, get: Any, factors: Sequence[float] | None
) -> dict[str, Any]:
    """The configuration of a Llama that rotates as the file says: all that a recipe asks of a model."""

    def number(name: str, default: float | None = None) -> Any:
        value = get(f"{architecture.name}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CtxextError(f'"{path}" says nothing usable for {architecture.name}.{name}: {value}.')
        return value

    def factor(name: str) -> Any:  # llama.cpp takes 0 for "not set".
        return number(name, 1.0) if get(f"{architecture.name}.{name}") else 1.0

    for name in _LONG_AND_SHORT:
        if name not in architecture.lists and tensor_named(header, name) is not None:
            raise _two_lists(path)
    if f"{architecture.name}.rope.dimension_sections" in header.values:
        raise CtxextError(f'"{path}" rotates by sections of positions, as models of images do.')
    if f"{architecture.name}.rope.freq_base_swa" in header.values and not architecture.has_sliding_base:
        raise CtxextError(f'"{path}" gives its sliding-window layers a base of their own, which was not tried.')
    heads = header.get(f"{architecture.name}.attention.head_count")
    if not isinstance(heads, int) or heads <= 0:  # Also where each layer has its own.
        raise CtxextError(
            f'"{path}" does not say one number of attention heads.', hint="Layers that differ are not known."
        )
    key_length = number("attention.key_length", number("embedding_length") / heads)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": int(number("embedding_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(number("attention.head_count_kv", heads)),
        "num_hidden_layers": int(number("block_count")),
        "head_dim": int(number("rope.dimension_count", key_length)),
        "max_position_embeddings": int(number("context_length")),
        "rope_theta": float(number("rope.freq_base", 10000.0)),
    }
    if config["head_dim"] > _MOST_DIMENSIONS or (factors and len(factors) != config["head_dim"] // 2):
        raise CtxextError(
            f'"{path}" has {config["head_dim"]} dimensions that rotate and {len(factors or ())} divisors.',
            hint="Fetch the file again.",
        )
    kind = get(f"{architecture.name}.rope.scaling.type") or "linear"
    old_name = (
        get(f"{architecture.name}.rope.scaling.factor") is None
    )  # llama.cpp reads it only where the new is absent.
    stretch = factor("rope.scale_linear" if old_name else "rope.scaling.factor")
    attention, length = factor("rope.scaling.attn_factor"), config["max_position_embeddings"]
    original = int(number("rope.scaling.original_context_length", length))
    scaling = _scaling(path, kind, (stretch, attention), (original, length), factors or ())
    return {**config, "rope_scaling": scaling} if scaling else config


def _scaling(
    path: Path, kind: str, numbers: tuple[float, float], lengths: tuple[int, int], divisors: Sequence[float]
) -> dict[str, Any]:
    """The schedule as transformers writes it; empty for a plain one.

    Args:
        path: The file, for errors.
        kind: llama.cpp's type of it.
        numbers: Its factor, and the factor on cos and sin.
        lengths: The original context length and the present one, in tokens.
        divisors: The numbers of `rope_freqs.weight`.
    """
    (factor, attention), (original, length) = numbers, lengths
    if any(entry != 1 for entry in divisors):
        if kind == "yarn" or factor != 1:
            raise CtxextError(f'"{path}" has two schedules at once: {FACTORS} and {kind} ×{factor:g}.')
        return {
            "rope_type": "longrope",
            "long_factor": list(divisors),
            "short_factor": list(divisors),
            "factor": max(length / original, 1.0),
            "attention_factor": attention,
            "original_max_position_embeddings": original,
        }
    if kind == "yarn":
        own = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention * own,
        }
    if kind not in ("linear", "none"):
        raise CtxextError(
            f'"{path}" has the schedule "{kind}", which is not read here.', hint="Known: none, linear, yarn."
        )
    if attention != 1:
        raise CtxextError(f'"{path}" has a plain schedule with the attention factor {attention:g}.')
    return {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1 else {}


def tensor_named(header: Header, name: str) -> Tensor | None:
    """A tensor of the header."""
    return next((tensor for tensor in header.tensors if tensor.name == name), None)


def factors_of(path: Path, header: Header, architecture: Architecture) -> Sequence[float]:
    """The divisors in the lists that the architecture reads; none where the file has no such tensor.

    Raises:
        CtxextError: one is not a list of positive float32, or they differ.
    """
    contents = [
        _numbers_of(path, header, tensor)
        for name in architecture.lists
        if (tensor := tensor_named(header, name)) is not None
    ]
    if contents and (len(contents) < len(architecture.lists) or contents.count(contents[0]) < len(contents)):
        raise _two_lists(path)
    return contents[0] if contents else ()


def _two_lists(path: Path) -> CtxextError:
    return CtxextError(
        f'"{path}" has lists of its own for long and short texts, {_LONG_AND_SHORT[0]}.', hint="It is a LongRoPE model."
    )


def _numbers_of(path: Path, header: Header, tensor: Tensor) -> Sequence[float]:
    if tensor.kind != F32 or len(tensor.shape) != 1:
        raise CtxextError(f'"{tensor.name}" in "{path}" is not a list of float32.')
    with path.open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        numbers = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.size))
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise CtxextError(f'"{tensor.name}" in "{path}" holds numbers that are not positive.')
    return numbers


def rotation_in_llama_cpp(path: Path, header: Header, architecture: Architecture) -> tuple[list[float], float]:
    """The inverse frequencies and the factor on cos and sin that llama.cpp makes of a file (`ggml_rope_yarn`).

    Read from the file alone, so that it checks whatever wrote it.

    Returns:
        One frequency per pair, in radians per token, and the factor.
    """

    def value(name: str, default: Any) -> Any:
        return header.get(f"{architecture.name}.{name}", default)

    dim = value("rope.dimension_count", None) or value(
        "attention.key_length", value("embedding_length", 0) // value("attention.head_count", 1)
    )
    base, length = value("rope.freq_base", 10000.0), value("context_length", 0)
    factor = value("rope.scaling.factor", value("rope.scale_linear", 0.0)) or 1.0
    kind = value("rope.scaling.type", "linear")
    scale = 1.0 if kind == "none" else 1.0 / factor
    divisors = factors_of(path, header, architecture) or [1.0] * (dim // 2)
    angles = [base ** (-2 * pair / dim) / divisors[pair] for pair in range(dim // 2)]
    attention = value("rope.scaling.attn_factor", 1.0)
    if kind != "yarn":
        return [scale * angle for angle in angles], attention
    original = value("rope.scaling.original_context_length", length)

    def dimension(rotations: float) -> float:
        return float(dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base)))

    start, end = max(0, math.floor(dimension(BETAS[0]))), min(dim - 1, math.ceil(dimension(BETAS[1])))
    kept = [1 - min(1.0, max(0.0, (pair - start) / max(0.001, end - start))) for pair in range(dim // 2)]
    mixed = [scale * angle * (1 - keep) + angle * keep for angle, keep in zip(angles, kept, strict=True)]
    return mixed, attention * (1 + 0.1 * math.log(1 / scale))


def describe(model: GgufModel) -> str:
    """The model in a few words: "llama, 135.0M parameters, Q4_1"."""
    sizes: dict[str, int] = {}
    count = 0
    for tensor in model.header.tensors:
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size
        count += math.prod(tensor.shape)
    most = max(sizes, key=lambda name: sizes[name]) if sizes else "no tensors"
    rotary = model.model.rotary
    length = format_length(rotary.claimed_length)
    return f"{model.architecture.name}, {count / 1e6:.1f}M parameters, {most}, {length} tokens"
