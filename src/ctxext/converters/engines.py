"""Which engines can run a converted checkpoint, and how they must be started.

Only what was tried: transformers 4.57.6 and 5.23.0, vLLM 0.32, llama.cpp of October 2026; SGLang from its source.
Whatever was neither tried nor read is "not known".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.families import Family
from ctxext.recipes.recipe import Recipe
from ctxext.recipes.rotary import Rotary, native_type

EXACT, PARTLY, WRONG, UNKNOWN = "exact", "with care", "not", "not known"
MARKS: Mapping[str, str] = {EXACT: "✓", PARTLY: "~", WRONG: "✗", UNKNOWN: "?"}
ENGINES = ("transformers", "vLLM", "SGLang", "llama.cpp")

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
_CLAIMS_TOO_MUCH = "without, it claims factor times too much"
_CLAIMS_TRAINED = "without, it stops at the trained length; the long list is chosen once"

# Per method, where an engine needs an argument or falls short; all others run it exactly as it is.
_TABLE: Mapping[str, Mapping[str, _Row]] = {
    "pi": {
        "vLLM": (EXACT, "--max-model-len {length}", _CLAIMS_TOO_MUCH),
        "SGLang": (EXACT, "--context-length {length}", _CLAIMS_TOO_MUCH),
    },
    "ntk-by-parts": {
        "SGLang": (WRONG, "", "ignores attention_factor"),
        "llama.cpp": (WRONG, "", "its converter loses attention_factor"),
    },
    "llama3": {"llama.cpp": (PARTLY, "", "exact for Llama classes, others are silently left plain")},
    "longrope": {
        "vLLM": (EXACT, "--max-model-len {length}", _CLAIMS_TRAINED),
        "llama.cpp": (WRONG, "", "only phi3 and minicpm; others are silently left plain"),
    },
    "dynamic": {
        "transformers": (PARTLY, "", "one whole prompt at a time; not invariant under caching"),
        "vLLM": (WRONG, "", "log-probabilities differ by up to 5.5"),
        "SGLang": (WRONG, "", "treats it as static"),
        "llama.cpp": (WRONG, "", "its converter loses it"),
    },
}
_NOT_INVARIANT: _Row = (PARTLY, "", "not invariant under caching, as its two lists differ")


def serving_of(recipe: Recipe, family: Family, rotary: Rotary) -> tuple[Serving, ...]:
    """Who can serve a recipe on a family: for each engine the worst that any of its steps allows."""
    if recipe.needs_code:
        return _with_code(recipe)
    order = (EXACT, PARTLY, UNKNOWN, WRONG)
    served = []
    for engine in ENGINES:
        rows = [_row(step.to_dict(), engine, family) for step in recipe.steps]
        status, _, remark = max(rows, key=lambda row: order.index(row[0]))
        arguments = " ".join(dict.fromkeys(row[1] for row in rows if row[1]))
        remark = remark or next((row[2] for row in rows if row[2]), "")
        if engine != "transformers" and status != WRONG and family.model_type not in TRIED_FAMILIES:
            status, remark = UNKNOWN, f"not tried with {family.model_type}"
        if engine == "SGLang" and status == EXACT:
            remark = "; ".join(part for part in (remark, "by its source, not tried") if part)
        served.append(Serving(engine, status, arguments.format(length=rotary.context_length), remark))
    return (_with_version(served[0], family, rotary), *served[1:])


def _row(step: Mapping[str, Any], engine: str, family: Family) -> _Row:
    """What one engine makes of one step."""
    method, model_type = step["method"], family.model_type
    if method == "yarn" and step.get("attention_factor") is not None:
        method = "ntk-by-parts"
    if method == "longrope" and engine == "transformers":
        return _NOT_INVARIANT if step.get("short_factor") != step["long_factor"] else (EXACT, "", "")
    known = (("llama3", "llama"), ("longrope", "phi3"))
    if engine == "llama.cpp" and (method, model_type) in known:
        return EXACT, "", ""
    return _TABLE.get(method, {}).get(engine, (EXACT, "", ""))


def _with_version(row: Serving, family: Family, rotary: Rotary) -> Serving:
    """What transformers 4.57 cannot do, where it is known to differ."""
    types = family.rope_types_4x
    rope_type = native_type(family, rotary.rope_type)
    if types is None or rope_type in types:
        return row
    reads = "does not know the family" if not types else f'does not take the rope type "{rope_type}" here'
    remark = "; ".join(part for part in (row.remark, f"5 or newer, as 4.57 {reads}") if part)
    return Serving(row.engine, row.status, row.arguments, remark)


def _with_code(recipe: Recipe) -> tuple[Serving, ...]:
    """A checkpoint with modeling code: state that belongs to a prompt cannot be served in a shared batch."""
    static = all(step.to_dict().get("head_order") != "prompt" for step in recipe.steps)
    not_static = (WRONG, "", "needs --head-order calibrated or fixed")
    trust = "--trust-remote-code"
    return (
        Serving("transformers", EXACT, "trust_remote_code=True"),
        Serving("vLLM", *((EXACT, trust, "tensor parallel 1 only") if static else not_static)),
        Serving("SGLang", *((UNKNOWN, trust, "by its source; not tried") if static else not_static)),
        Serving("llama.cpp", WRONG, "", "its converter refuses, rightly"),
    )
