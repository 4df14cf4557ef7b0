"""Verification that loading a checkpoint runs only code created by ctxext.

config.json is untrusted, so the files themselves are compared with the output of this version.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.code.guards import CODE_KEY
from ctxext.recipes.code.layout import CONFIGURATION, SHARED_FILES, STUB_FILE
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.recipes.registry import METHODS

CODE_FILES = frozenset(
    {STUB_FILE}.union(
        *SHARED_FILES.values(),
        (file.name for method in METHODS if issubclass(method, CodeMethod) for file in method.code),
    )
)
"""Names of the modeling code files of this version."""

_OF_MODELS = ("config.json", "tokenizer_config.json")
_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PLACE = re.compile(r"(\w+)\.\w+")


@contextlib.contextmanager
def explain_broken_config() -> Iterator[None]:
    """Raise a CtxextError instead of the errors that an invalid configuration causes."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CtxextError(f'"config.json" is invalid: {type(error).__name__} {error}') from error


def own_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names and SHA-256 digests of the code that this version writes for a configuration's recipe."""
    recipe = provenance(config).get("recipe")
    if recipe is None:
        return {}
    with explain_broken_config():
        files = recipe_from_dict(recipe, "config.json").code_files(dict(config))
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}


def runs_only_own_code(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint contains code, and all code of its model and tokenizer is ctxext's.

    Other files that transformers would run are omitted from the folder to load (`staging.py`).
    """
    return bool(own_code_content(checkpoint))


def module_of(place: Any) -> str:
    """Return the module of an entry `module.Class` of `auto_map`; empty for other entries, as `repo--module.Class`."""
    match = _PLACE.fullmatch(place) if isinstance(place, str) else None
    return match[1] if match else ""


def own_code_content(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the verified modeling code by file name if all of it is ctxext's; empty otherwise."""
    places = list(_places(checkpoint, _OF_MODELS))
    ours = (STUB_FILE.removesuffix(".py"), CONFIGURATION)
    if not places or any(module_of(place) not in ours for place in places):
        return {}
    try:
        code = own_code(checkpoint.config)
    except CtxextError:
        return {}
    if not all((checkpoint.folder / name).is_file() for name in code):
        return {}
    content = {name: (checkpoint.folder / name).read_bytes() for name in code}
    is_same = all(hashlib.sha256(content[name]).hexdigest() == digest for name, digest in code.items())
    return content if is_same else {}


def runs_by_itself(path: Path) -> bool:
    """Return whether transformers runs a file of a checkpoint that no configuration names.

    transformers 5 runs it with `trust_remote_code=True`, which our code needs; 4.57 runs it from any local folder, even
    without that option.
    """
    return path.parts[0] == "custom_generate"


def carries_code(checkpoint: Checkpoint) -> bool:
    """Return whether `trust_remote_code` would run any code, regardless of its author."""
    return any(True for _ in _places(checkpoint, (*_OF_MODELS, *_OF_PROCESSORS)))


def needs_code(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration needs the code that it names.

    Either transformers does not support the model type, or ctxext has hidden the schedule from it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    hides = any(isinstance(part, Mapping) and CODE_KEY in part for part in (config, config.get("text_config")))
    return bool(config.get("auto_map")) and (hides or config.get("model_type") not in CONFIG_MAPPING_NAMES)


def check_pinned(checkpoint: Checkpoint, revision: str | None) -> None:
    """Check that untrusted code from the Hub runs only at a pinned commit."""
    if checkpoint.revision and not _COMMIT.fullmatch(revision or ""):
        raise CtxextError(
            "--trust-remote-code requires a pinned revision for code from the Hub.",
            hint=f"Review that code, then add --revision {checkpoint.revision}",
        )


def _places(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        content = checkpoint.read_json(name) or {}
        for part in (content, *(value for value in content.values() if isinstance(value, dict))):
            auto_map = part.get("auto_map")
            if isinstance(auto_map, dict):
                yield from auto_map.values()
            elif auto_map is not None:
                yield auto_map
