"""Which engines can run a converted checkpoint, and how they must be started.

Only what was tried: transformers 4.57.6 and 5.23.0, vLLM 0.32, llama.cpp of October 2026; SGLang from its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctxext.families import Family
from ctxext.recipes.recipe import Recipe
from ctxext.recipes.rotary import Rotary

EXACT, PARTLY, WRONG, UNKNOWN = "exact", "with care", "not", "not known"
MARKS: Mapping[str, str] = {EXACT: "✓", PARTLY: "~", WRONG: "✗", UNKNOWN: "?"}


@dataclass(frozen=True)
class Serving:
    """How one engine fares with a checkpoint.

    Attributes:
        engine: Its name.
        status: "exact", "with care", "not" or "not known".
        note: The arguments it needs, or what would be lost.
    """

    engine: str
    status: str
    note: str = ""

    def to_dict(self) -> dict[str, str]:
        """As JSON."""
        return {"engine": self.engine, "status": self.status, "note": self.note}


_ALL_EXACT = {
    "transformers": (EXACT, ""),
    "vLLM": (EXACT, ""),
    "SGLang": (EXACT, ""),
    "llama.cpp": (EXACT, ""),
}
_TABLE: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "ntk": _ALL_EXACT,
    "abf": _ALL_EXACT,
    "yarn": _ALL_EXACT,
    "pi": {
        **_ALL_EXACT,
        "vLLM": (EXACT, "--max-model-len {length}, as it claims factor times too much"),
        "SGLang": (EXACT, "--context-length {length}, as it claims factor times too much"),
    },
    "ntk-by-parts": {
        **_ALL_EXACT,
        "SGLang": (WRONG, "ignores attention_factor"),
        "llama.cpp": (WRONG, "its converter loses attention_factor"),
    },
    "llama3": {**_ALL_EXACT, "llama.cpp": (PARTLY, "Llama classes exact; others are silently left plain")},
    "longrope": {
        "transformers": (PARTLY, "not invariant under caching where the two lists differ"),
        "vLLM": (EXACT, "--max-model-len {length}; the long list is chosen once"),
        "SGLang": (EXACT, ""),
        "llama.cpp": (WRONG, "only phi3 and minicpm; Llama is silently left plain"),
    },
    "dynamic": {
        "transformers": (PARTLY, "one whole prompt at a time; not invariant under caching"),
        "vLLM": (WRONG, "log-probabilities differ by up to 5.5"),
        "SGLang": (WRONG, "treats it as static"),
        "llama.cpp": (WRONG, "its converter loses it"),
    },
}


def serving_of(recipe: Recipe, family: Family, rotary: Rotary) -> tuple[Serving, ...]:
    """Who can serve a recipe on a family: for each engine the worst that any of its steps allows."""
    steps = [step.to_dict() for step in recipe.steps]
    if any(step.needs_code for step in recipe.steps):
        return _with_code(steps)
    if family.nested_rope:
        return (Serving("transformers", EXACT), *(Serving(name, UNKNOWN) for name in ("vLLM", "SGLang", "llama.cpp")))
    order = (EXACT, PARTLY, UNKNOWN, WRONG)
    served = []
    for engine in _ALL_EXACT:
        rows = [_row(step, engine) for step in steps]
        status, note = max(rows, key=lambda row: order.index(row[0]))
        note = note or next((row[1] for row in rows if row[1]), "")
        served.append(Serving(engine, status, note.format(length=rotary.context_length)))
    return tuple(served)


def _row(step: Mapping[str, Any], engine: str) -> tuple[str, str]:
    if step["method"] == "yarn" and step.get("attention_factor") is not None:
        return _TABLE["ntk-by-parts"][engine]
    return _TABLE[step["method"]][engine]


def _with_code(steps: list[dict[str, Any]]) -> tuple[Serving, ...]:
    """A checkpoint with modeling code: state that belongs to a prompt cannot be served in a shared batch."""
    static = all(step.get("head_order") != "prompt" for step in steps)
    not_static = (WRONG, "needs --head-order calibrated or fixed")
    return (
        Serving("transformers", EXACT, "trust_remote_code=True"),
        Serving("vLLM", *((EXACT, "--trust-remote-code; tensor parallel 1") if static else not_static)),
        Serving("SGLang", *((UNKNOWN, "by its source: --trust-remote-code") if static else not_static)),
        Serving("llama.cpp", WRONG, "its converter refuses, rightly"),
    )
