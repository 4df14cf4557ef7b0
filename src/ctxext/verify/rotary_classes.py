"""The rotation of a stock rotary embedding, computed without importing transformers, for measured classes.

Running the class requires importing torch and transformers: four seconds of processor time and 300 MB. Many classes
use only the stock formulas of their schedule. `rotary_classes.json` lists those by the digest of the relevant code:
`tools/measure_rotary_classes.py` compared each class with the formulas, with parameters drawn from all of `RANGES`. The
digest does not include the version, as releases rarely change this code. The class itself is run in three cases: edited
code, a key or value outside the ranges, and different transformers 4 and 5 forms in a configuration.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import Family
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.frequencies import inverse_frequencies
from ctxext.recipes.encodings.rotary import Rotary, attention_scaling

RECORD = Path(__file__).with_name("rotary_classes.json")
TOLERANCE = 1e-5
"""Largest difference between a measured class and the formulas; the remaining tolerance is for the recipe."""

_SHARED = ("configuration_utils.py", "modeling_rope_utils.py")
"""Relevant files besides those of a family."""

_ORIGINAL = "original_max_position_embeddings"
RANGES: Mapping[str, tuple[float, float]] = {
    "factor": (1, 64),
    "attention_factor": (0.1, 10),
    "mscale": (0, 2),
    "mscale_all_dim": (0, 2),
    "beta_fast": (8, 128),
    "beta_slow": (0.5, 4),
    "low_freq_factor": (0.5, 1),
    "high_freq_factor": (4, 16),
    "short_factor": (0.5, 1e6),
    "long_factor": (0.5, 1e6),
    "rope_theta": (1e3, 1e10),
    "head_dim": (8, 512),
    _ORIGINAL: (64, 1 << 20),
    "max_position_embeddings": (64, 64 << 20),
}
"""Measured ranges of a schedule's parameters, from smallest to largest. Heads have even dimensions."""

_WHOLE = ("head_dim", _ORIGINAL, "max_position_embeddings")
_LISTS = ("short_factor", "long_factor")
KEYS: Mapping[str, tuple[Set[str], Set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor", _ORIGINAL},
        {"attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
    ),
    "llama3": ({"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"}, set()),
    "longrope": ({"factor", _ORIGINAL, *_LISTS}, {"attention_factor", "short_mscale", "long_mscale"}),
}
"""Required and optional keys of each rope type."""
_UNREAD = frozenset({"short_mscale", "long_mscale"})
"""Keys for vLLM, which transformers does not read; the measured schedules contain them too."""

_TOP = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", _ORIGINAL})
_SUSPECT = re.compile(r"rope|rotar|theta|partial|position|per_layer|freq|_config$")
_HARMLESS = frozenset({"quantization_config", "partial_rotary_factor"})
_MENTIONS = re.compile(r"[Rr]otary|(?<!p)rope|inv_freq|theta")


def digest_of(model_type: str) -> str | None:
    """Return the digest of the code in the installed transformers that determines the rotation of a family.

    It is None without transformers or the family's files, or if they do not contain its rotary embedding. Of the
    modeling file, only the code of rotary embeddings counts.
    """
    try:
        spec = importlib.util.find_spec("transformers")
    except ValueError:  # A module without a spec replaces it.
        return None
    if spec is None or not spec.origin or not re.fullmatch(r"[a-z0-9_]+", model_type):
        return None
    package, folder = Path(spec.origin).parent, f"models/{model_type}"
    try:
        code = [ast.unparse(_parse(package / name)) for name in (*_SHARED, f"{folder}/configuration_{model_type}.py")]
        code += _rotary_code(_parse(package / folder / f"modeling_{model_type}.py"))
    except (OSError, SyntaxError, ValueError):
        return None
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def _parse(path: Path) -> ast.Module:
    """Parse a file without its docstrings and comments, which do not affect the rotation."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            node.body[0] = ast.Pass()
    return tree


def _rotary_code(tree: ast.Module) -> list[str]:
    """Return the rotary embeddings of a modeling file, and every statement elsewhere that mentions one.

    Raises:
        ValueError: a rotary embedding is not in this file, or inherits from another class than torch's.
    """
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and "otary" in node.name]
    if not classes or any([*map(ast.unparse, node.bases)] != ["nn.Module"] for node in classes):
        raise ValueError("the code of the rotary embedding is not complete in this file")
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and not hasattr(node, "body")]
    return [*map(ast.unparse, classes), *filter(_MENTIONS.search, map(ast.unparse, statements))]


def is_imported(model_type: str) -> bool:
    """Return whether this process has imported the family's classes, which may differ from the files."""
    return f"transformers.models.{model_type}.modeling_{model_type}" in sys.modules


@functools.cache
def read_measurements() -> Mapping[str, Mapping[str, Any]]:
    """Read rotary_classes.json: `family`, newest measured `transformers`, and `rope_types`, by digest."""
    return json.loads(RECORD.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def measured_rotations(
    config: Mapping[str, Any], family: Family, lengths: Sequence[int]
) -> dict[int, tuple[list[float], float]] | None:
    """Return an unmodified model's inverse frequencies and its factor on cos and sin, by length in tokens.

    It is None if the class of the installed transformers must be run.
    """
    rotary = None if is_imported(family.model_type) else flat_rotary(config)
    if rotary is None:
        return None
    entry = read_measurements().get(digest_of(family.model_type) or "", {})
    if entry.get("family") != family.model_type or rotary.rope_type not in entry["rope_types"]:
        return None
    try:
        return formulas(rotary, lengths)
    except CtxextError:
        return None


def formulas(rotary: Rotary, lengths: Sequence[int]) -> dict[int, tuple[list[float], float]]:
    """Compute the inverse frequencies and the factor on cos and sin by the stock formulas, by length."""
    return {length: (inverse_frequencies(rotary, length), attention_scaling(rotary)) for length in lengths}


def flat_rotary(config: Mapping[str, Any]) -> Rotary | None:
    """Return the schedule of a configuration, the same in both versions of transformers.

    It is None if it is outside the measured ranges, or if the forms of transformers 4 and 5 differ. The code of recipes
    is not used, so that its errors are not repeated here.
    """
    parameters: Any = config.get("rope_parameters")
    if not isinstance(parameters, Mapping) or any(map(_is_odd, config.items())):
        return None
    schedule = {key: value for key, value in parameters.items() if key != "rope_theta"}
    schedule_4x = {"rope_type": "default"} if config.get("rope_scaling") is None else config["rope_scaling"]
    rope_type, theta = str(schedule.get("rope_type")), parameters.get("rope_theta", 0)
    if schedule != schedule_4x or theta != config.get("rope_theta") or rope_type not in KEYS:
        return None
    get: Any = config.get
    hidden, heads, dim = map(get, ("hidden_size", "num_attention_heads", "head_dim"))
    length = get("max_position_embeddings")
    # The class checks a missing head size, and refuses sizes that do not divide.
    if not (isinstance(hidden, int) and isinstance(heads, int) and heads > 0) or hidden % heads:
        return None
    sizes = {"rope_theta": theta, "head_dim": dim, "max_position_embeddings": length}
    numbers = {key: value for key, value in schedule.items() if key != "rope_type"}
    needed, allowed = KEYS[rope_type]
    if not all(_is_measured(*item) for item in sizes.items()) or not needed <= numbers.keys() <= needed | allowed:
        return None
    original = numbers.get(_ORIGINAL, length)
    if dim % 2 or not all(_is_measured(*item, pairs=dim // 2) for item in numbers.items()):
        return None
    if config.get(_ORIGINAL, original) != original or (rope_type == "dynamic" and original > RANGES[_ORIGINAL][1]):
        return None
    # transformers 4 derives longrope's factor from the two lengths.
    if rope_type == "longrope" and (
        config.get(_ORIGINAL) is None or not math.isclose(length, original * numbers["factor"], rel_tol=1e-9)
    ):
        return None
    return Rotary(
        theta=float(theta), dim=dim, span=dim, trained_length=original, context_length=length, parameters=schedule
    )


def _is_odd(item: tuple[str, Any]) -> bool:
    """Return whether a key of config.json may affect positions in a way that was not measured."""
    key, value = item
    if key == "partial_rotary_factor":
        return bool(value != 1)
    return key not in _TOP and key not in _HARMLESS and bool(_SUSPECT.search(key))


def _is_measured(key: str, value: Any, pairs: int = 0) -> bool:
    if key == "truncate" or key in _UNREAD:
        return key in _UNREAD or isinstance(value, bool)
    if key in _LISTS and pairs:
        return isinstance(value, list) and len(value) == pairs and all(_is_measured(key, number) for number in value)
    low, high = RANGES[key]
    kind = int if key in _WHOLE else int | float
    return isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
