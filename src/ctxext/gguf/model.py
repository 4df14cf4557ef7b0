"""The rotary encoding in the header of a GGUF file, and its interpretation in llama.cpp."""

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import Family, family_of
from ctxext.checkpoint.geometry import MAXIMUM, known_model
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.length import format_length
from ctxext.files.strict import parse_json
from ctxext.gguf import SUFFIX, part_paths
from ctxext.gguf.header import F32, FILE_TYPE_KEY, FILE_TYPES, Header, Tensor, read_header, shorten_value
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.model_config import ModelConfig, model_config
from ctxext.recipes.recipe import plain_config, recipe_from_dict
from ctxext.verify.references.frequencies import ramp

RECIPE_KEY = "ctxext.recipe"
"""Key of the record in a converted file: the recipe, the version, and the replaced values."""
FACTORS = "rope_freqs.weight"
"""The tensor of divisors of each pair's angle in most architectures with one, and their name in the record of a
conversion."""
_ORIGINAL = "original_max_position_embeddings"
_LONG_AND_SHORT = ("rope_factors_long.weight", "rope_factors_short.weight")
"""Lists of factors; llama.cpp uses one of them for a whole run, by the configured context length."""
_MOST_PARTS = 99_999
_MOST_DIMENSIONS, _MOST_LAYERS, _MOST, _MOST_NUMBER = 1 << 16, 512, (1 << 32) - 1, 1e30
"""Limits of a header: llama.cpp refuses more layers, and reads lengths and sizes as 32 bits."""
_UNSTATED = ("sliding_window",)
"""Properties of published models without a key in GGUF files: llama.cpp's Llama has no window."""
_LEAST = 2
"""Shortest context length: formulas divide by its logarithm."""
ARCHITECTURE_KEY = "general.architecture"
_PART_NAME = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
COUNT_KEY, NUMBER_KEY, TENSORS_KEY = "split.count", "split.no", "split.tensors.count"
LOG_MULTIPLIER, FREQ_BASE_SWA = "rope.scaling.yarn_log_multiplier", "rope.freq_base_swa"
TEMPERATURE, ORIGINAL = "attention.temperature_scale", "rope.scaling.original_context_length"
_SECTIONS, _FINETUNED, _HEADS = "rope.dimension_sections", "rope.scaling.finetuned", "attention.head_count_kv"
BETAS = (32.0, 1.0)
"""YaRN's beta_fast and beta_slow in llama.cpp, which most architectures do not read from the file."""
BETA_KEYS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
_SCALING_KEYS = ("type", "factor", "original_context_length", "attn_factor", "finetuned")
_TESTED = frozenset({*(f"rope.scaling.{name}" for name in _SCALING_KEYS), *BETA_KEYS})
"""Tested keys of a schedule; llama.cpp reads others in some architectures."""
_UNROTATED = 1e29
"""Least divisor of a pair that does not rotate; llama.cpp's converter writes 1e30 for Gemma 4."""


@dataclass(frozen=True)
class Architecture:
    """The parts of a schedule that llama.cpp reads in one architecture; each was tested.

    Attributes:
        name: The name in general.architecture.
        models: Names of models with it.
        lists: The tensors of divisors that it reads, with the same content; with them it supports any static schedule.
        model_types: The model types of transformers that are converted to this architecture.
        reads: Further keys that it reads and that conversions respect.
        rules: The model type of transformers with its rules: latent attention, or no positions.
    """

    name: str
    models: str
    lists: tuple[str, ...]
    model_types: tuple[str, ...]
    reads: frozenset[str]
    rules: str

    @property
    def has_sliding_base(self) -> bool:
        """Whether its sliding-window layers rotate by another base, which schedules do not change."""
        return FREQ_BASE_SWA in self.reads

    @property
    def family(self) -> Family:
        """The family of transformers with its rules."""
        return family_of({"model_type": self.rules})

    def attend(self, kind: str, factor: float, attention: float, multiplier: float) -> tuple[float, float]:
        """Return llama.cpp's factors on cos and sin, and on all scores of latent attention (`llama_context`).

        Args:
            kind: The type of the schedule.
            factor: Its factor; 1 without a schedule.
            attention: The content of `rope.scaling.attn_factor`.
            multiplier: The content of `rope.scaling.yarn_log_multiplier`; 0 if it is absent.
        """
        usual = 1 + 0.1 * math.log(factor)
        if not self.family.scales_scores:  # The multiplier divides the temperature.
            return attention * (usual / (1 + 0.1 * multiplier * math.log(factor)) if kind == "yarn" else 1), 1.0
        rotated = attention * (usual if kind == "yarn" and not multiplier else 1)
        # The graph of deepseek2 multiplies by the usual temperature also without YaRN.
        all_scores = rotated if kind == "yarn" else attention * usual
        return rotated, (all_scores * (1 + multiplier * math.log(factor))) ** 2


@cache
def architectures() -> Mapping[str, Architecture]:
    """Read the known architectures by name."""
    text = resources.files("ctxext.gguf").joinpath("architectures.json").read_text(encoding="utf-8")
    return {
        name: Architecture(
            name,
            entry["models"],
            tuple(entry["lists"]),
            tuple(entry["model_types"]),
            frozenset(entry.get("reads", ())),
            entry.get("rules", "llama"),
        )
        for name, entry in json.loads(text).items()
    }


@dataclass(frozen=True)
class Part:
    """One file of a model.

    Attributes:
        path: The file.
        header: Its header; without values for later files of a split model, because nothing reads them.
    """

    path: Path
    header: Header


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file, without its weights.

    Attributes:
        files: All files of a split model in order; the file alone if it is not split.
        architecture: Its architecture in llama.cpp.
        model: The model with the present encoding of the file.
        plain: The model before its conversion by ctxext, or the same as `model` if there was none.
        recipe: The record of the conversion: version, recipe and replaced values; empty if there is none.
    """

    files: tuple[Part, ...]
    architecture: Architecture
    model: ModelConfig
    plain: ModelConfig
    recipe: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The first file."""
        return self.files[0].path

    @property
    def header(self) -> Header:
        """The header of the first file, which has all keys."""
        return self.files[0].header

    def key(self, name: str) -> str:
        """Return the full name of one of its architecture's keys."""
        return f"{self.architecture.name}.{name}"

    @property
    def parts(self) -> tuple[Path, ...]:
        """The paths of all files."""
        return tuple(part.path for part in self.files)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all files."""
        return tuple(tensor for part in self.files for tensor in part.header.tensors)

    @property
    def num_tensors(self) -> int:
        """Number of tensors in all files."""
        return len(self.tensors)

    @property
    def lacks_original(self) -> bool:
        """Whether it has a schedule, and the file does not specify the original length of this schedule."""
        return self.plain.encoding.is_scaled and self.plain.rotary.length_origin == MAXIMUM

    @property
    def unscaled_model(self) -> ModelConfig:
        """The model without any schedule, from which a recipe starts."""
        return plain_config(self.plain) if self.plain.encoding.is_scaled else self.plain


def open_gguf(path: str | Path, original_length: int | None = None) -> GgufModel:
    """Read the header of a GGUF file, the first of a split model's, and the rotary encoding in it."""
    place = Path(path)
    if not place.is_file():
        raise CtxextError(f'There is no file "{path}".', hint="Specify a .gguf file.")
    header = read_header(place)
    name = header.get(ARCHITECTURE_KEY)
    if not isinstance(name, str):
        raise CtxextError(f'"{path}" has no architecture.', hint="Specify a file with a complete model.")
    if name not in architectures():
        raise CtxextError(
            f'"{path}" has the architecture "{shorten_value(name)}", which is untested.',
            hint=f"Supported: {', '.join(architectures())}. Or convert the original checkpoint.",
        )
    architecture, files = architectures()[name], _parts(place, header)
    record = _read_record(place, header)
    now = before = _config(files, architecture, header.get, factors_of(files, architecture))
    if record:
        replaced = record["replaced"]

        def get(key: str, default: Any = None) -> Any:
            content = replaced[key] if key in replaced else header.get(key)
            return default if content is None else content

        before = _config(files, architecture, get, replaced.get(FACTORS))
    length, schedule = original_length or record.get("trained_length"), before.get("rope_scaling")
    if length is not None and length < _LEAST:
        raise CtxextError(f'The original length "{length}" is too short.', hint="Specify --original-length.")
    if length or _ORIGINAL in (schedule or ()) or architecture.family.encoding != "rotary":
        plain = model_config(before, length)
    else:
        length, origin, schedule = before["max_position_embeddings"], MAXIMUM, schedule or {"rope_type": "default"}
        types = architecture.model_types
        if known := known_model(before, family_of(before), schedule, model_types=types, unstated=_UNSTATED):
            length, origin = known.original_length, known.origin
        plain = model_config(before, length)
        plain = replace(plain, encoding=replace(plain.rotary, length_origin=origin))
    model = model_config(now, plain.encoding.trained_length) if record else plain
    span = 2 * len(factors_of(files, architecture))
    if isinstance(plain.encoding, Rotary) and span > plain.rotary.dim:  # Some pairs of the head do not rotate.
        plain, model = (replace(one, encoding=replace(one.rotary, span=span)) for one in (plain, model))
    return GgufModel(files, architecture, model, plain, record)


def _whole_number(path: Path, header: Header, key: str, default: int) -> int:
    number = header.get(key, default)
    if type(number) is not int or number < 0:
        shown = "a list" if number is None else shorten_value(number)
        raise CtxextError(f'"{path}" has {shown} for {key}, expected a whole number.', hint="Download the file again.")
    return number


def split_count(path: Path, header: Header) -> int:
    """Return the number of files of the model; 1 if it is not split."""
    count = _whole_number(path, header, COUNT_KEY, 1) or 1
    if count > _MOST_PARTS:
        raise CtxextError(f'"{path}" has {count} for {COUNT_KEY}.', hint="Download the file again.")
    return count


def is_part(path: Path, number: int, count: int) -> bool:
    """Return whether a file is part `number` of a split model of `count` parts."""
    try:
        header = read_header(path)
        return (split_count(path, header), _whole_number(path, header, NUMBER_KEY, 0)) == (count, number)
    except (CtxextError, OSError):
        return False


def _parts(path: Path, header: Header) -> tuple[Part, ...]:
    """Read the headers of all files of a model from its first, and check that they belong together."""
    count = split_count(path, header)
    if number := _whole_number(path, header, NUMBER_KEY, 0):
        raise CtxextError(
            f'"{path}" is part {number + 1} of {count} of a model.',
            hint=f"Specify the first part, …-00001-of-{count:05d}{SUFFIX}.",
        )
    if count == 1:
        # Tools that join or split files leave 0 or 1 in a whole file; in a part they hide the others.
        named = _PART_NAME.search(path.name)
        expected = _whole_number(path, header, TENSORS_KEY, 0)
        if (named and int(named[1]) > 1) or expected > len(header.tensors):
            shown = (
                f"{expected} tensors" if expected > len(header.tensors) else f"{int(named[1]) if named else 1} parts"
            )
            raise CtxextError(
                f'"{path}" belongs to a model of {shown}, but its header has {header.get(COUNT_KEY)} for {COUNT_KEY}.',
                hint="Download all parts of the model again.",
            )
        return (Part(path, header),)
    paths = part_paths(path, count)
    if path.name != paths[0].name:
        raise CtxextError(
            f'"{path}" is part 1 of {count} of a model, but has another name.',
            hint=f"Rename it to {paths[0].name}.",
        )
    files, names = [Part(path, header)], {tensor.name for tensor in header.tensors}
    folder = Checkpoint(str(path.parent), path.parent, {})
    for number, file in enumerate(paths[1:], start=1):
        if not file.is_file():
            raise CtxextError(f'"{file}" is missing.', hint="Download all parts of the model.")
        folder.check_file(Path(file.name))
        part = read_header(file)
        numbers = split_count(file, part), _whole_number(file, part, NUMBER_KEY, 0)
        architecture = part.get(ARCHITECTURE_KEY) or header.get(ARCHITECTURE_KEY)
        twice = next((tensor.name for tensor in part.tensors if tensor.name in names), None)
        if numbers != (count, number) or twice or architecture != header.get(ARCHITECTURE_KEY):
            why = f'its tensor "{twice}" is in another part too' if twice else f"it is a {architecture}"
            if numbers != (count, number):
                why = f"its header specifies part {numbers[1] + 1} of {numbers[0]}"
            raise CtxextError(
                f'"{file}" does not belong to "{path.name}": {why}.', hint="Download all parts of the model again."
            )
        names.update(tensor.name for tensor in part.tensors)
        files.append(Part(file, replace(part, values={})))
    expected = _whole_number(path, header, TENSORS_KEY, 0)
    if expected != len(names):
        raise CtxextError(
            f'"{path}" specifies {expected} tensors, but its {count} parts have {len(names)}.',
            hint="Download all parts of the model again.",
        )
    return tuple(files)


def _read_record(path: Path, header: Header) -> dict[str, Any]:
    """Return ctxext's record of the conversion; empty if ctxext did not convert the file."""
    text = header.get(RECIPE_KEY)
    if text is None:
        return {}
    record = parse_json(text, RECIPE_KEY) if isinstance(text, str) else None
    replaced, length = (record.get("replaced"), record.get("trained_length")) if isinstance(record, dict) else (None, 0)
    factors = replaced.get(FACTORS) or [] if isinstance(replaced, dict) else None
    is_whole = isinstance(factors, list) and all(isinstance(factor, float) and factor > 0 for factor in factors)
    if not isinstance(record, dict) or not is_whole or type(length) is not int or not _LEAST <= length <= _MOST:
        raise CtxextError(f'The record of the conversion in "{path}" is damaged.', hint="Convert its source again.")
    recipe_from_dict(record.get("recipe"), RECIPE_KEY)
    return record


def _config(
    files: Sequence[Part], architecture: Architecture, get: Any, factors: Sequence[float] | None
) -> dict[str, Any]:
    """Return a Llama configuration with the RoPE parameters of the file, to which recipes apply.

    `get` returns the content of a key, or a default; `factors` contains the divisors, if the file has any.
    """
    path, header = files[0].path, files[0].header

    def unusable_error(name: str, value: Any) -> CtxextError:
        shown = shorten_value(value)
        return CtxextError(
            f'"{path}" has an invalid value for {architecture.name}.{name}: {shown}.', hint="Download the file again."
        )

    def read(name: str, default: Any = None) -> Any:
        key = f"{architecture.name}.{name}"
        if key in header.values and header.values[key].content is None:
            raise unusable_error(name, "a list")
        return get(key, default)

    def read_number(name: str, default: float | None = None) -> float:
        value = read(name, default)
        if type(value) not in (int, float) or not 0 < value < _MOST_NUMBER:
            raise unusable_error(name, value)
        return float(value)

    def read_whole(name: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        value = read(name, default)
        if type(value) is not int or not least <= value <= most:
            raise unusable_error(name, value)
        return int(value)

    def read_factor(name: str) -> float:  # llama.cpp reads 0 as "not set".
        value = read(name)
        return 1.0 if value is None or (value == 0 and value is not False) else read_number(name)

    for name in _LONG_AND_SHORT:
        if name not in architecture.lists and any(tensor_named(part.header, name) for part in files):
            raise _two_lists_error(path)
    if architecture.family.encoding != "rotary":
        if _FINETUNED in architecture.reads and read(_FINETUNED) is not False:
            raise CtxextError(
                f'"{path}" rotates its attention layers, which is untested for "{architecture.name}".',
                hint="Supported: hybrids without positions, such as Granite 4 H.",
            )
        return {"model_type": architecture.rules, "max_position_embeddings": read_whole("context_length", least=_LEAST)}
    if f"{architecture.name}.{_SECTIONS}" in header.values and _SECTIONS not in architecture.reads:
        raise CtxextError(f'"{path}" has sections of positions (M-RoPE), which are not supported.')
    if f"{architecture.name}.{FREQ_BASE_SWA}" in header.values and not architecture.has_sliding_base:
        raise CtxextError(f'"{path}" has a separate base for its sliding-window layers, which is untested.')
    for key, value in header.values.items():
        name = key.removeprefix(f"{architecture.name}.")
        is_tested = name in _TESTED | architecture.reads or not name.startswith("rope.scaling.")
        if not is_tested or (name in BETA_KEYS and value.content != BETAS[BETA_KEYS.index(name)]):
            raise CtxextError(f'"{path}" has a schedule with {key}, which is untested.')
    heads = header.get(f"{architecture.name}.attention.head_count")
    if type(heads) is not int or not 0 < heads <= _MOST:  # A list contains the number of each layer.
        raise CtxextError(
            f'"{path}" has no single number of attention heads.', hint="Layers must have equal numbers of heads."
        )
    size, length = read_whole("embedding_length"), read_whole("context_length", least=_LEAST)
    has_list = _HEADS in architecture.reads and header.get(f"{architecture.name}.{_HEADS}", heads) is None
    config: dict[str, Any] = {
        "model_type": architecture.rules,
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if has_list else read_whole(_HEADS, heads),
        "num_hidden_layers": read_whole("block_count", most=_MOST_LAYERS),
        "head_dim": read_whole("rope.dimension_count", read_whole("attention.key_length", size // heads)),
        "max_position_embeddings": length,
        "rope_theta": read_number("rope.freq_base", 10000.0),
    }
    dim, factors = config["head_dim"], factors or ()
    if dim % 2 or dim > _MOST_DIMENSIONS or (factors and len(factors) != dim // 2):
        raise CtxextError(
            f'"{path}" has {dim} rotated dimensions and {len(factors)} divisors.',
            hint="Download the file again.",
        )
    factors = rotated_pairs(factors)
    config["head_dim"] = config["qk_rope_head_dim"] = 2 * len(factors) or dim
    if config["rope_theta"] <= 1:
        raise unusable_error("rope.freq_base", config["rope_theta"])
    kind = read("rope.scaling.type", "linear")
    if not isinstance(kind, str):
        raise unusable_error("rope.scaling.type", kind)
    # llama.cpp reads the old name only if the new one is absent.
    scale = read_factor("rope.scale_linear" if read("rope.scaling.factor") is None else "rope.scaling.factor")
    original = None
    if read(ORIGINAL) is not None:
        original = read_whole(ORIGINAL, least=_LEAST)
    attention, scores, multiplier = read_factor("rope.scaling.attn_factor"), 1.0, read(LOG_MULTIPLIER, 0.0)
    if type(multiplier) not in (int, float) or not (-1 if architecture.family.scales_scores else 0) <= multiplier < 10:
        raise unusable_error(LOG_MULTIPLIER, multiplier)
    if kind == "yarn":
        attention, scores = architecture.attend(kind, max(scale, 1.0), attention, multiplier)
    scaling = _scaling(path, kind, (scale, attention), (original, length), factors)
    if scores != 1 and scale > 1:
        scaling["mscale_all_dim"] = (math.sqrt(scores) - 1) * 10 / math.log(scale)
    return {**config, "rope_scaling": scaling} if scaling else config


def _scaling(
    path: Path, kind: str, numbers: tuple[float, float], lengths: tuple[int | None, int], divisors: Sequence[float]
) -> dict[str, Any]:
    """Return the schedule in the format of transformers; empty for a plain one.

    Args:
        path: The file, for errors.
        kind: llama.cpp's type of the schedule.
        numbers: Its factor, and the factor on cos and sin.
        lengths: The original context length if the file contains one, and the present one, in tokens.
        divisors: The numbers of `rope_freqs.weight`.
    """
    (factor, attention), (original, length) = numbers, lengths
    start = {} if original is None else {_ORIGINAL: original}
    if any(entry != 1 for entry in divisors):
        if kind == "yarn" or factor != 1:
            raise CtxextError(
                f'"{path}" has two schedules at once: {FACTORS} and {kind} ×{factor:g}.',
                hint="Convert its source.",
            )
        return {
            "rope_type": "longrope",
            "long_factor": list(divisors),
            "short_factor": list(divisors),
            "factor": max(length / (original or length), 1.0),
            "attention_factor": attention,
            **start,
        }
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            _ORIGINAL: original or length,  # llama.cpp uses the context length if the file contains none.
            "attention_factor": attention,
        }
    if kind not in ("linear", "none"):
        raise CtxextError(
            f'"{path}" has the unsupported schedule "{shorten_value(kind)}".',
            hint="Supported: none, linear, yarn.",
        )
    if attention != 1:
        raise CtxextError(f'"{path}" has an attention factor ({attention:g}) without a schedule.')
    return {"rope_type": "linear", "factor": factor, **start} if kind == "linear" and factor != 1 else {}


def tensor_named(header: Header, name: str) -> Tensor | None:
    """Return the tensor of a header with this name, or None."""
    return next((tensor for tensor in header.tensors if tensor.name == name), None)


def rotated_pairs(divisors: Sequence[float]) -> Sequence[float]:
    """Return the divisors of the rotated pairs; other pairs come after them."""
    return [divisor for divisor in divisors if divisor < _UNROTATED]


def factors_of(files: Sequence[Part], architecture: Architecture) -> Sequence[float]:
    """Return the frequency divisors stored in the files' tensors; empty if there are none."""
    contents = [
        _numbers_of(part, tensor)
        for name in architecture.lists
        for part in files
        if (tensor := tensor_named(part.header, name)) is not None
    ]
    if contents and (len(contents) < len(architecture.lists) or contents.count(contents[0]) < len(contents)):
        raise _two_lists_error(files[0].path)
    return contents[0] if contents else ()


def _two_lists_error(path: Path) -> CtxextError:
    return CtxextError(
        f'"{path}" has different lists for long and short texts ({_LONG_AND_SHORT[0]}), which are not supported.'
    )


def _numbers_of(part: Part, tensor: Tensor) -> Sequence[float]:
    if tensor.kind != F32 or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_DIMENSIONS:
        raise CtxextError(
            f'"{tensor.name}" in "{part.path}" is not a float32 list with one value per pair.',
            hint="Download the file again.",
        )
    with part.path.open("rb") as file:
        file.seek(part.header.data_start + tensor.offset)
        numbers = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.size))
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise CtxextError(
            f'"{tensor.name}" in "{part.path}" contains numbers that are not positive.', hint="Download the file again."
        )
    return numbers


def rotation_in_llama_cpp(files: Sequence[Part], architecture: Architecture) -> tuple[list[float], tuple[float, float]]:
    """Return the rotation of a model in llama.cpp: inverse frequencies, one per pair, and the factors of `attend`.

    It is the rotation of `ggml_rope_yarn`, computed only from the files, so that it is independent of their writer.
    """

    def value(name: str, default: Any) -> Any:
        return files[0].header.get(f"{architecture.name}.{name}", default)

    dim = value("rope.dimension_count", None) or value(
        "attention.key_length", value("embedding_length", 0) // value("attention.head_count", 1)
    )
    base, length = value("rope.freq_base", 10000.0), value("context_length", 0)
    factor = value("rope.scaling.factor", value("rope.scale_linear", 0.0)) or 1.0
    kind = value("rope.scaling.type", "linear")
    scale = 1.0 if kind == "none" else 1.0 / factor
    divisors = factors_of(files, architecture) or [1.0] * (dim // 2)
    angles = [base ** (-2 * pair / dim) / divisor for pair, divisor in enumerate(rotated_pairs(divisors))]
    numbers = value("rope.scaling.attn_factor", 1.0), value(LOG_MULTIPLIER, 0.0)
    attention = architecture.attend(kind, 1 / scale, *numbers)
    if kind != "yarn":
        return [scale * angle for angle in angles], attention
    original = value(ORIGINAL, length)
    # llama.cpp uses the ramp of YaRN's paper, as the reference does.
    shares = ramp({"beta_fast": BETAS[0], "beta_slow": BETAS[1]}, dim // 2, dim, base, original)
    mixed = [scale * angle * share + angle * (1 - share) for angle, share in zip(angles, shares, strict=False)]
    return mixed, attention


def quantization(model: GgufModel) -> str:
    """Return the name of the quantization: that of the file type, as in file names, such as "Q4_K_M".

    Files of one type contain several types of tensors. Without a known file type, return the one with most bytes.
    """
    kind = model.header.get(FILE_TYPE_KEY)
    return FILE_TYPES[kind] if type(kind) is int and kind in FILE_TYPES else _most_frequent_type(model)


def _most_frequent_type(model: GgufModel) -> str:
    """Return the tensor type with most bytes."""
    sizes: dict[str, int] = {}
    for tensor in model.tensors:
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size
    return max(sizes, key=lambda name: sizes[name]) if sizes else "no tensors"


def describe(model: GgufModel) -> str:
    """Describe the model in a few words: "llama, 135.0M parameters, Q4_1, 8k tokens"."""
    count = sum(math.prod(tensor.shape) for tensor in model.tensors)
    name, most = quantization(model), _most_frequent_type(model)
    if not name.startswith(most):  # Rows of 640 weights, for example, do not fit the blocks of K types.
        name += f" (most bytes in {most})"
    length = format_length(model.model.encoding.claimed_length)
    return f"{model.architecture.name}, {count / 1e6:.1f}M parameters, {name}, {length} tokens"
