"""Which engines can run a converted checkpoint, and how they must be started.

Only what was tried: transformers 4.57.6 and 5.23.0; by `make engines`, in float32 on a CPU, on prompts inside and past
the original context length: vLLM 0.32.0 with transformers 5.19.0 (log-probabilities within 9e-5 of transformers',
Ms-PoE included), and llama.cpp as xllamacpp 2026.10.11549 has it behind its own converter of October 2026 (within 5e-4;
with flash attention, which rounds to 16 bits, within 3e-2). SGLang was read in its source and not tried: what would be
right there is "not known", and says so. So is whatever was neither tried nor read. ALiBi by the row was run in
transformers alone: what the other engines take is one slope for each head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.recipes.encodings.rotary import ModelConfig, attention_scaling, native_type

EXACT, PARTLY, WRONG, UNKNOWN = "exact", "with care", "not", "not known"
MARKS: Mapping[str, str] = {EXACT: "✓", PARTLY: "~", WRONG: "✗", UNKNOWN: "?"}
BY_SOURCE = "right by its source, not tried"
"""The remark of what was read and not run."""
ENGINES = ("transformers", "vLLM", "SGLang", "llama.cpp")

_GGUF_NAMES: Mapping[str, str] = {"gpt_neox": "gptneox", "mistral": "llama", "phi": "phi2"}
"""What llama.cpp's metadata calls families that it does not call by their model type."""

# Families whose configurations every engine was shown, or whose layout was read in the engines' own sources.
TRIED_FAMILIES = frozenset(
    {"falcon", "gemma2", "gpt_neox", "granite", "llama", "mistral", "phi", "phi3"}
    | {"qwen2", "qwen3", "smollm3", "stablelm"}
)


@dataclass(frozen=True)
class Serving:
    """How one engine fares with a checkpoint.

    Attributes:
        engine: Its name.
        status: "exact", "with care", "not" or "not known".
        arguments: What it must be started with, word for word; empty where nothing.
        remark: What would be lost, or must be known.
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
        """As JSON."""
        return {"engine": self.engine, "status": self.status, "arguments": self.arguments, "remark": self.remark}


_Row = tuple[str, str, str]
_EXACT: _Row = (EXACT, "", "")
_CLAIMS_TOO_MUCH = "without, it claims factor times too much"
_CLAIMS_TRAINED = "without, it stops at the original context length; the long list is chosen once"
_TRUST = "--trust-remote-code"
_REFUSED: _Row = (WRONG, "", "its converter refuses, rightly")
_NOT_SERVE = "not transformers serve, which looks for its class in transformers itself"
_LLAMA_CPP_LONGROPE: _Row = (
    PARTLY,
    "--override-kv {gguf}.rope.scaling.attn_factor=float:{scaling}",
    "as converted its lists are silently left out; exact where the GGUF also holds a tensor rope_freqs.weight, the "
    "long list, and no rope.scaling.type",
)

# What was tried or read, by what the checkpoint carries and by engine. Whatever is not here is not known.
_TABLE: Mapping[str, Mapping[str, _Row]] = {
    "default": dict.fromkeys(ENGINES, _EXACT),
    "linear": {
        "transformers": _EXACT,
        "vLLM": (EXACT, "--max-model-len {length}", _CLAIMS_TOO_MUCH),
        "SGLang": (EXACT, "--context-length {length}", _CLAIMS_TOO_MUCH),
        "llama.cpp": _EXACT,
    },
    "yarn": dict.fromkeys(ENGINES, _EXACT),
    "yarn with attention_factor": {
        "transformers": _EXACT,
        "vLLM": _EXACT,
        "SGLang": (WRONG, "", "ignores attention_factor"),
        "llama.cpp": (
            EXACT,
            "--override-kv {gguf}.rope.scaling.attn_factor=float:{attn_factor}",
            "without, its converter's attention_factor is overwritten",
        ),
    },
    "llama3": {
        **dict.fromkeys(("transformers", "vLLM", "SGLang"), _EXACT),
        "llama.cpp": (PARTLY, "", "exact for Llama classes, others are silently left plain"),
    },
    "longrope": {
        "transformers": _EXACT,
        "vLLM": (EXACT, "--max-model-len {length}", _CLAIMS_TRAINED),
        "SGLang": _EXACT,
        "llama.cpp": _LLAMA_CPP_LONGROPE,
    },
    "longrope with two lists": {
        "transformers": (PARTLY, "", "not invariant under caching, as its two lists differ"),
        "vLLM": (
            PARTLY,
            "--max-model-len {length}",
            _CLAIMS_TRAINED + ", so it differs below the original context length",
        ),
        "SGLang": _EXACT,
        "llama.cpp": (WRONG, "", "only phi3 and minicpm; others are silently left plain"),
    },
    "dynamic": {
        "transformers": (PARTLY, "", "one whole prompt at a time; not invariant under caching"),
        "vLLM": (WRONG, "", "log-probabilities differ by up to 11"),
        "SGLang": (WRONG, "", "treats it as static"),
        "llama.cpp": (WRONG, "", "its converter loses it"),
    },
    "table": {"transformers": _EXACT},
    "alibi": {"transformers": _EXACT},
    "buckets": {"transformers": _EXACT},
    "mspoe": {
        "transformers": (EXACT, "trust_remote_code=True", _NOT_SERVE),
        "vLLM": (EXACT, _TRUST, "past its context length only with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"),
        "SGLang": (UNKNOWN, _TRUST, "by its source; not tried"),
        "llama.cpp": _REFUSED,
    },
    "mspoe with learned heads": {
        "transformers": (EXACT, "trust_remote_code=True", _NOT_SERVE),
        "vLLM": (UNKNOWN, _TRUST, "heads with curves of their own were not tried"),
        "SGLang": (UNKNOWN, _TRUST, "heads with curves of their own were not tried"),
        "llama.cpp": _REFUSED,
    },
    "mspoe by the prompt": {
        "transformers": (
            PARTLY,
            "trust_remote_code=True",
            "one whole prompt at a time, with a cache, and with a mask where rows are padded: assistant_model, "
            "prompt_lookup_num_tokens, prefill_chunk_size, use_cache=False and lm-eval's log-likelihoods in batches "
            "answer otherwise, generate_batch refuses; --head-order calibrated suits all of them",
        ),
        "vLLM": (WRONG, "", "needs --head-order calibrated or fixed"),
        "SGLang": (WRONG, "", "needs --head-order calibrated or fixed"),
        "llama.cpp": _REFUSED,
    },
}
_RELATION: Mapping[str, _Row] = {
    "transformers": (EXACT, "trust_remote_code=True", f"continuous batching (generate_batch) refuses it; {_NOT_SERVE}"),
    "vLLM": (EXACT, _TRUST, "with ctxext installed beside vLLM, whose attention it completes; refused without"),
}
_OWN_SCORES = "its attention shows no scores, and these change with the distance"
_LEARNED: Mapping[str, _Row] = {
    "transformers": _RELATION["transformers"],
    **dict.fromkeys(("vLLM", "SGLang"), (WRONG, "", _OWN_SCORES)),
    "llama.cpp": _REFUSED,
}
_ONE_SLOPE = "its ALiBi has one slope for each head, whichever row reads"
_SLOPES: Mapping[str, _Row] = {
    "transformers": (EXACT, "trust_remote_code=True", _NOT_SERVE),
    **dict.fromkeys(("vLLM", "SGLang"), (WRONG, "", _ONE_SLOPE)),
    "llama.cpp": _REFUSED,
}
_RELATIONS = ("self-extend", "bifocal", "dca", "rerope", "string", "adaptive", "sinks", "window")
"""Methods of `portable/relation.py`, which tests/portable/test_relation*.py run in transformers."""

_ALIKE: Mapping[tuple[str, ...], Mapping[str, _Row]] = {
    _RELATIONS: _RELATION,
    ("alibi-interpolation", "ntk-alibi"): _SLOPES,
    ("distance-aware",): _LEARNED,
}

# What some families fare better with than others.
_FAMILIES: Mapping[tuple[str, str, str], _Row] = {
    ("llama3", "llama.cpp", "llama"): _EXACT,
    ("longrope", "llama.cpp", "phi3"): _EXACT,
    ("longrope with two lists", "llama.cpp", "phi3"): _EXACT,
}
_CODE: Mapping[str, _Row] = {
    "transformers": (UNKNOWN, "trust_remote_code=True", "not tried beyond the check after converting"),
    "llama.cpp": _REFUSED,
}
"""What is so of every checkpoint with code."""


def carried(model: ModelConfig) -> tuple[str, ...]:
    """What a checkpoint carries, as the engines see it: its schedule, and the methods of its code."""
    numbers, carrier = model.encoding.numbers, model.encoding.carrier
    schedule = native_type(model.family, carrier)
    if schedule == model.family.plain_type:
        schedule = "linear" if carrier == "linear" else "default"
    if schedule == "yarn" and numbers.get("attention_factor") is not None:
        schedule = "yarn with attention_factor"
    if schedule == "longrope" and numbers.get("short_factor") != numbers.get("long_factor"):
        schedule = "longrope with two lists"
    steps = model.code.get("steps", ())
    return (schedule, *map(_name_of, steps))


def _name_of(step: Mapping[str, Any]) -> str:
    kinds = {"per_prompt": " by the prompt", "heads": " with learned heads"}
    return str(step["method"]) + "".join(word for key, word in kinds.items() if step.get(key))


def serving_of(model: ModelConfig) -> tuple[Serving, ...]:
    """Who can serve a checkpoint: for each engine the worst of what it carries allows."""
    order, things, family = (EXACT, PARTLY, UNKNOWN, WRONG), carried(model), model.family.model_type
    served = []
    for engine in ENGINES:
        rows = [_row(thing, engine, family, has_code=len(things) > 1) for thing in things]
        if len(things) > 2:  # Each was tried alone.
            rows.append((UNKNOWN, "", f"{' and '.join(things[1:])} together were not tried"))
        status, _, remark = max(rows, key=lambda row: order.index(row[0]))
        arguments = " ".join(dict.fromkeys(row[1] for row in rows if row[1]))
        remark = remark or next((row[2] for row in rows if row[2]), "")
        if engine != "transformers" and status not in (WRONG, UNKNOWN) and family not in TRIED_FAMILIES:
            status, remark = UNKNOWN, f"not tried with {family}"
        if engine == "SGLang" and status == EXACT:
            status, remark = UNKNOWN, "; ".join(part for part in (remark, BY_SOURCE) if part)
        if status == WRONG:
            arguments = ""
        served.append(Serving(engine, status, arguments.format(**_numbers(model)), remark))
    return (_with_version(served[0], model), *served[1:])


def gguf_name(model: ModelConfig) -> str:
    """What llama.cpp's metadata calls the family."""
    return _GGUF_NAMES.get(model.family.model_type, model.family.model_type)


def attn_factor(model: ModelConfig) -> float | None:
    """llama.cpp's `rope.scaling.attn_factor` for a `yarn` schedule with an attention factor of its own; else None.

    It multiplies cos and sin by YaRN's own 0.1 · ln(factor) + 1 whatever the checkpoint says, and by this.
    """
    numbers = model.encoding.numbers
    if model.encoding.carrier != "yarn" or numbers.get("attention_factor") is None:
        return None
    return float(numbers["attention_factor"] / (0.1 * math.log(numbers["factor"]) + 1))


def _numbers(model: ModelConfig) -> dict[str, Any]:
    """What arguments are made of."""
    is_longrope = model.encoding.carrier == "longrope"
    return {
        "length": model.encoding.context_length,
        "gguf": gguf_name(model),
        "attn_factor": f"{attn_factor(model) or 1.0:.6g}",
        "scaling": f"{attention_scaling(model.rotary) if is_longrope else 1.0:.6g}",
    }


def _row(thing: str, engine: str, family: str, *, has_code: bool) -> _Row:
    """What one engine makes of one thing that is carried; not known unless somebody tried it."""
    unknown: _Row = (UNKNOWN, "", f"{thing} was not tried")
    table = _TABLE.get(thing) or next((rows for names, rows in _ALIKE.items() if thing in names), {})
    known = _FAMILIES.get((thing, engine, family)) or table.get(engine)
    return known or (_CODE.get(engine, (UNKNOWN, _TRUST, unknown[2])) if has_code else unknown)


def _with_version(row: Serving, model: ModelConfig) -> Serving:
    """What transformers 4.57 cannot do, where it is known to differ."""
    types = model.family.rope_types_4x
    rope_type = native_type(model.family, model.encoding.carrier)
    if types is None or rope_type in types:
        return row
    reads = "does not know the family" if not types else f'does not take the rope type "{rope_type}" here'
    remark = "; ".join(part for part in (row.remark, f"5 or newer, as 4.57 {reads}") if part)
    return Serving(row.engine, row.status, row.arguments, remark)
