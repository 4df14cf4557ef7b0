"""Engines that can run a converted checkpoint, and the arguments that they need.

The status of methods without code is read from engine_support.json, which `tools/measure_engines.py` writes: one cell
for each method and engine, never shared between methods. Untested combinations are "not known". The rest is read from
engine_support.toml. `make engines` tests methods with code in vLLM 0.32.0 (log-probabilities within 9e-5 of
transformers'). SGLang was checked by its source code only: correct schedules are "not known" there, with a remark.
ALiBi with per-position slopes was tested in transformers only: the other engines accept one slope per head.
"""

import dataclasses
import functools
import json
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ctxext.checkpoint.families import text_config
from ctxext.checkpoint.geometry import LENGTH_ABOVE
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.encodings.dialects import native_type
from ctxext.recipes.encodings.no_positions import NoPositions
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.registry import METHODS

EXACT, PARTLY, WRONG, UNKNOWN = "exact", "with care", "not", "not known"
MARKS: Mapping[str, str] = {EXACT: "✓", PARTLY: "~", WRONG: "✗", UNKNOWN: "?"}
BY_SOURCE = "untested, but should work"
"""Remark for combinations that are correct by the source code of the engine but untested."""
UNTRIED = "untested with"
"""Beginning of the remark on a family that was tested only in transformers."""
ENGINES = ("transformers", "vLLM", "SGLang", "llama.cpp", "MLX")
TOLERANCE = 1e-3
"""Largest difference of a log-probability from that of transformers, in nats."""

_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


@dataclass(frozen=True)
class Serving:
    """Status of a checkpoint in one engine.

    Attributes:
        engine: Its name.
        status: "exact", "with care", "not" or "not known".
        arguments: Required command-line arguments, verbatim; empty if none are needed.
        remark: A limitation or a condition.
    """

    engine: str
    status: str
    arguments: str = ""
    remark: str = ""

    @property
    def note(self) -> str:
        """Arguments and remark in one line."""
        return "; ".join(part for part in (self.arguments, self.remark) if part)

    def to_dict(self) -> dict[str, str]:
        """Return the status as JSON."""
        return dict(vars(self))


_Row = tuple[str, ...]
"""A status, arguments and a remark."""

_TRUST = "--trust-remote-code"
_BACKEND, _IMPLEMENTATION = "'s transformers backend", "--model-impl transformers"
"""The name of vLLM's other implementation of a family in engine_support.json, and the argument that chooses it."""
_BARE = " without redundant keys"
_PLAIN, _TWO_LISTS, _FACTOR = "plain", " with two lists", " with attention_factor"
_METHOD_OF: Mapping[str, str] = {"default": _PLAIN, "linear": "pi", "proportional": "pi"}
"""Method by rope type, for rope types with another name than their method."""
_MEASURED_AS: Mapping[str, str] = {"default": "ntk", "linear": "pi", "proportional": "pi", "length": "declare"}
"""The method that tools/measure_families.py measures for a feature, if the names differ."""


@functools.cache
def read_measurements() -> Mapping[str, Any]:
    """Read engine_support.json.

    `prompts` are prompt lengths in tokens, `window` is the original context length, `greedy_of` the number of
    generated tokens, `versions` are package versions. `cells` has, by variant of a method and by engine, the
    `differences` of each prompt from transformers and the number of identical `greedy` tokens, or the error
    (`refused`). `families` has, by family, by one method per rope type and by engine, the `differences` or the error,
    and the largest change of a log-probability by the schedule (`moved`).
    """
    text = files("ctxext.converters").joinpath("engine_support.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


@functools.cache
def _read_notes() -> Mapping[str, Any]:
    """Read engine_support.toml; its comments describe each part."""
    return tomllib.loads(files("ctxext.converters").joinpath("engine_support.toml").read_text(encoding="utf-8"))


def _find_row(part: str, thing: str, engine: str) -> _Row | None:
    """Return a row of engine_support.toml; None if there is none."""
    row = _read_notes()[part].get(thing, {}).get(engine)
    return tuple(row) if row else None


def worst_difference(variant: str, engine: str) -> float | None:
    """Return the largest difference of a variant in an engine, in nats; None if it is untested."""
    return max(read_measurements()["cells"].get(variant, {}).get(engine, {}).get("differences", ()), default=None)


def _of_family(model: ModelConfig, engine: str) -> _Row | None:
    """Return an engine's status for a family, by the cell of its rope type; None if all schedules were tested there."""
    family, feature, notes = model.family, model.encoding.feature, _read_notes()
    families, hybrids = read_measurements()["families"], notes["linear_attention"]
    if family.model_type in hybrids["families"] and not {*hybrids["methods"]}.isdisjoint(_steps_of(model)):
        return tuple(hybrids.get(engine, (EXACT, "", "")))
    name = next((name for name in (family.model_type, family.text_type) if name in families), None)
    cells = {method: row[engine] for method, row in families.get(name, {}).items() if engine in row}
    if not cells:
        tried = notes["tried_in"].get(engine, notes["tried_families"])
        return None if family.model_type in tried else (UNKNOWN, "", f"{UNTRIED} {family.model_type}")
    method = _MEASURED_AS.get(feature, feature)
    if method == "declare" and method not in cells:  # It changes only the length.
        method = _PLAIN
    if method not in cells:
        schedule = "a changed base" if feature == "default" else feature
        return (UNKNOWN, "", f"{schedule} is {UNTRIED} {family.model_type}")
    if not (problem := _find_problem(cells[method])):
        return (EXACT, "", "")
    reason, other = notes["families"].get(name, {}).get(engine), families[name][method].get(f"{engine}{_BACKEND}")
    quantized = (model.config.get("quantization_config") or {}).get("quant_method")
    if other and not _find_problem(other) and quantized != "mxfp4":  # That backend does not read MXFP4.
        return (EXACT, _IMPLEMENTATION, reason or f"its own model: {problem}")
    if reason:
        return (WRONG, "", reason)
    if plain := _find_problem(cells.get(_PLAIN, {})):
        return (UNKNOWN, "", f"{UNTRIED} {family.model_type}: without a schedule, {plain}")
    return (WRONG, "", problem)


def _find_problem(cell: Mapping[str, Any]) -> str:
    """Return the problem of a measurement in words, or nothing."""
    if "refused" in cell:
        return str(cell["refused"])
    worst = max(cell.get("differences", ()), default=0.0)
    return f"log-probabilities differ by up to {worst:.2g}" if worst > TOLERANCE else ""


def schedules_of(model: ModelConfig) -> tuple[str, ...]:
    """Return the variants of a schedule by their names in engine_support.json; without a record, from config.json."""
    feature, numbers = model.encoding.feature, model.encoding.numbers
    recorded = [str(step.get("method")) for step in (provenance(model.config).get("recipe") or {}).get("steps", ())]
    rotary = {method.name: method for method in METHODS if method.encoding == "rotary" and not method.needs_code()}
    names = [name for name in recorded if name in rotary and getattr(rotary[name], "rope_type", "default") == feature]
    bases = [name for name in recorded if name in rotary and rotary[name].kind == "base"]
    schedule = names[-1] if names else _METHOD_OF.get(feature, feature)
    factor, parts = numbers.get("attention_factor"), "yarn" if schedule == "ntk-by-parts" else schedule
    if parts == "yarn" and factor is not None:
        # Without a record, factor 1 and mscale 0 identify ntk-by-parts.
        is_parts = schedule == "ntk-by-parts" or (factor == 1 and numbers.get("mscale") == 0)
        schedule = "ntk-by-parts" if is_parts else "yarn" + _FACTOR
        schedule += _BARE if is_parts and numbers.get("mscale") != 0 else ""
    # Each family with latent attention is measured with equal weights, its default.
    is_default = numbers.get("mscale") == numbers.get("mscale_all_dim")
    is_default = is_default and (model.family.scales_scores or numbers.get("mscale") == 0)
    if parts == "yarn" and numbers.get("mscale_all_dim") is not None and not is_default:
        schedule += " with mscale_all_dim"
    if parts == "yarn" and numbers.get("truncate") is False:
        schedule += " without truncate"
    if feature == "longrope":
        schedule += _TWO_LISTS if numbers.get("short_factor") != numbers.get("long_factor") else ""
        schedule += _FACTOR if factor is not None and schedule.startswith("longrope") else ""
        schedule += _BARE if factor is not None and numbers.get("short_mscale") is None else ""
    return tuple(dict.fromkeys([*(name for name in bases if name != schedule), schedule]))


def _steps_of(model: ModelConfig) -> tuple[str, ...]:
    return tuple(
        str(step["method"]) + (" by the prompt" if step.get("per_prompt") else "")
        for step in model.code.get("steps", ())
    )


def exact_arguments(serving: Sequence[Serving]) -> dict[str, list[str]]:
    """Return the required arguments of each engine that runs a checkpoint exactly."""
    return {row.engine: shlex.split(row.arguments) for row in serving if row.status == EXACT}


def serving_of(model: ModelConfig) -> tuple[Serving, ...]:
    """Return the status of a checkpoint in each engine: the worst status of its schedules and code."""
    order, steps = (EXACT, PARTLY, UNKNOWN, WRONG), _steps_of(model)
    schedules = schedules_of(model) if isinstance(model.encoding, Rotary) else (model.encoding.feature,)
    is_longrope = model.encoding.feature == "longrope"
    numbers = {
        "length": model.encoding.context_length,
        "gguf": gguf_name(model),
        "attn_factor": f"{attn_factor(model) or 1.0:.6g}",
        "scaling": f"{attention_scaling(model.rotary) if is_longrope else 1.0:.6g}",
    }
    served = []
    for engine in ENGINES:
        if isinstance(model.encoding, Rotary):
            rows = [_of_schedule(name, engine, model) for name in schedules]
        else:
            rows = [_row(name, engine, has_code=bool(steps)) for name in schedules]
        rows += [_row(name, engine, has_code=True) for name in steps]
        if len(steps) > 1:  # Each step was tested alone.
            rows.append((UNKNOWN, "", f"the combination of {' and '.join(steps)} is untested"))
        status, _, remark = max(rows, key=lambda row: order.index(row[0]))
        arguments = " ".join(dict.fromkeys(row[1] for row in rows if row[1]))
        remark = remark or next((row[2] for row in rows if row[2]), "")
        if engine != "transformers" and status not in (WRONG, UNKNOWN):
            row = _of_family(model, engine) or (EXACT, "", "")
            arguments = " ".join(part for part in (arguments, row[1]) if part)
            both = "; ".join(part for part in (remark, row[2]) if part)
            status, remark = (status, both) if row[0] == EXACT else (row[0], row[2])
        if engine == "SGLang" and status == EXACT:
            status, remark = UNKNOWN, "; ".join(part for part in (remark, BY_SOURCE) if part)
        if status == WRONG:
            arguments = ""
        served.append(Serving(engine, status, arguments.format(**numbers), remark))
    if limit := limit_of_4x(model):
        remark = "; ".join(
            part for part in (served[0].remark, f"needs 5 or newer: 4.57 does not support {limit}") if part
        )
        served[0] = dataclasses.replace(served[0], remark=remark)
    return tuple(served)


def vllm_arguments(serving: Serving | None) -> dict[str, str]:
    """Return the arguments of `vllm.LLM` that a checkpoint needs, from its row for vLLM."""
    return {"model_impl": "transformers"} if serving and _IMPLEMENTATION in serving.arguments else {}


def limit_of_4x(model: ModelConfig) -> str:
    """Return what transformers 4.57 does not support: the family or the rope type; empty if it supports both."""
    types = model.family.rope_types_4x
    if not types:
        return "" if types is None else "the family"
    rope_type = native_type(model.family, model.encoding.feature)
    is_supported = not isinstance(model.encoding, Rotary) or rope_type in types
    return "" if is_supported else f'the rope type "{rope_type}" here'


def _of_schedule(variant: str, engine: str, model: ModelConfig) -> _Row:
    """Return an engine's status for a schedule, from its cell or, for SGLang, from its source code."""
    feature, family = model.encoding.feature, model.family.model_type
    arguments, remark = _read_notes()["started"].get(feature, {}).get(engine, ("", ""))
    lacks = (
        " without mscale_all_dim"
        if variant == "ntk-by-parts" and "mscale_all_dim" not in model.encoding.numbers
        else ""
    )
    if row := _find_row("schedules", variant + lacks, engine):
        return row
    if engine == "transformers":
        two = (PARTLY, "", "caching changes the result, as its two lists differ")
        return two if _TWO_LISTS in variant else (EXACT, "", "")
    if engine == "SGLang":
        if variant.endswith(_BARE):
            return (WRONG, "", "ignores attention_factor; convert again to write the keys that it reads")
        return (EXACT, arguments, remark)
    if (family, feature, engine) == ("phi3", "longrope", "llama.cpp"):
        return (UNKNOWN, "", BY_SOURCE)
    if family != "llama" and (row := _find_row("only_llama", variant, engine)):
        return row
    data, difference = read_measurements(), worst_difference(variant, engine)
    better = worst_difference(variant, f"{engine} with metadata")
    if reason := data["cells"].get(variant, {}).get(engine, {}).get("refused"):
        return (WRONG, "", reason)
    if difference is None:
        return (UNKNOWN, arguments, f"{variant} is untested")
    if difference <= TOLERANCE:
        return (PARTLY if variant == "dynamic" else EXACT, arguments, remark)
    reads_metadata = feature == "yarn" or gguf_name(model) in _read_notes()["read_rope_freqs"]
    if better is not None and better <= TOLERANCE and reads_metadata:
        return tuple(_read_notes()["metadata"][feature])
    differs = f"log-probabilities differ by up to {difference:.2g}"
    pairs = zip(data["prompts"], data["cells"][variant][engine]["differences"], strict=True)
    beyond = max(float(number) for length, number in pairs if length > data["window"])
    if _TWO_LISTS in variant and beyond <= TOLERANCE:
        return (PARTLY, arguments, f"{remark}; within the original context length {differs}")
    remedy = "convert again to write the keys that it reads" if variant.endswith(_BARE) else ""
    remedy = remedy or _read_notes()["remedies"].get(feature, {}).get(engine, "")
    return (WRONG, "", "; ".join(part for part in (differs, remedy) if part))


def gguf_name(model: ModelConfig) -> str:
    """Return the name of the family in llama.cpp's metadata."""
    return str(_read_notes()["gguf_names"].get(model.family.model_type, model.family.model_type))


def attn_factor(model: ModelConfig) -> float | None:
    """Return llama.cpp's `rope.scaling.attn_factor` for a `yarn` schedule with its own attention factor; else None.

    llama.cpp always multiplies cos and sin by YaRN's 0.1 · ln(factor) + 1, and by this factor.
    """
    numbers = model.encoding.numbers
    if model.encoding.feature != "yarn" or numbers.get("attention_factor") is None:
        return None
    return float(numbers["attention_factor"] / (0.1 * math.log(numbers["factor"]) + 1))


def _row(thing: str, engine: str, *, has_code: bool) -> _Row:
    """Return an engine's status for one schedule or method; it is "not known" if untested."""
    rows: Mapping[str, Any] = next((entry for entry in _read_notes()["carried"] if thing in entry["names"]), {})
    row = rows.get(engine) or (_read_notes()["code"].get(engine) if has_code else None)
    return tuple(row) if row else (UNKNOWN, _TRUST if has_code else "", f"{thing} is untested")


def source_commands(source: str, model: ModelConfig, serving: Sequence[Serving]) -> dict[str, str]:
    """Return, by engine, the command that serves a source with its recipe without converting it.

    Only for recipes without code and for engines that support the result. `make engines` tests the lines of vLLM and
    llama.cpp; SGLang's line is untested.
    """
    if model.code or not isinstance(model.encoding, Rotary | NoPositions):
        # A command line can express neither code nor tables.
        return {}
    # `demo` is neither a Hub id nor a folder; other names might not be one word of a command.
    source = source if source != "demo" and source.isprintable() and not set(source) & set("<>`") else "SOURCE"
    run = {row.engine for row in serving if row.status in (EXACT, PARTLY) or BY_SOURCE in row.remark}
    # vLLM accepts the same line for any family, with a nested override for multimodal ones.
    run |= {row.engine for row in serving if row.engine == "vLLM" and row.remark.startswith(UNTRIED)}
    changed, length = json.dumps(overrides(model)), str(model.encoding.context_length)
    needs_backend = any(_IMPLEMENTATION in row.arguments for row in serving)
    flags = {
        "vLLM": [
            *("--hf-overrides", changed, "--max-model-len", length),
            *(_IMPLEMENTATION.split() if needs_backend else []),
        ],
        "SGLang": ["--json-model-override-args", changed, "--context-length", length],
        "llama.cpp": _llama_cpp(model),
    }
    programs = {
        "vLLM": ["vllm", "serve", source],
        "SGLang": ["python", "-m", "sglang.launch_server", "--model-path", source],
        "llama.cpp": ["llama-server", "-m", f"{source.rpartition('/')[2]}.gguf"],
    }
    return {
        engine: shlex.join([*programs[engine], *words]) for engine, words in flags.items() if words and engine in run
    }


def overrides(model: ModelConfig) -> dict[str, Any]:
    """Return the values of config.json that differ from the source's, in transformers 5's format, as whole dicts."""
    text, family = text_config(model.config, model.family), model.family
    rotation = ("rope_parameters", "original_max_position_embeddings") if isinstance(model.encoding, Rotary) else ()
    keys = (*rotation, family.length_key, LENGTH_ABOVE)
    changed = {key: text[key] for key in keys if key in text}
    return changed if text is model.config or family.text_config is None else {family.text_config: changed}


def _llama_cpp(model: ModelConfig) -> list[str]:
    """Return the flags of llama-server; empty if it has no flag for the schedule."""
    length = str(model.encoding.context_length)
    # A server does not exceed the context length in the model's metadata.
    context = ["--override-kv", f"{gguf_name(model)}.context_length=int:{length}", "-c", length]
    if not isinstance(model.encoding, Rotary):
        return context
    rotary, numbers = model.rotary, model.rotary.parameters
    kind = native_type(model.family, rotary.rope_type)
    if kind == "default" or (kind == "linear" and rotary.rope_type == "default"):  # Mistral 4's plain schedule.
        return ["--rope-freq-base", f"{rotary.theta:.10g}", *context]
    if kind == "linear":
        return ["--rope-scaling", "linear", "--rope-scale", f"{numbers['factor']:g}", *context]
    if kind != "yarn":
        return []
    flags = ["--rope-scaling", "yarn", "--rope-scale", f"{numbers['factor']:g}"]
    flags += ["--yarn-orig-ctx", str(rotary.trained_length)]
    for key, usual in _BETAS.items():
        if numbers.get(key, usual) != usual:
            flags += [f"--yarn-{key.replace('_', '-')}", f"{numbers[key]:g}"]
    if (factor := attn_factor(model)) is not None:
        flags += ["--override-kv", f"{gguf_name(model)}.rope.scaling.attn_factor=float:{factor:.6g}"]
    return [*flags, *context]
