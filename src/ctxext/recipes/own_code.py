"""Whether loading a checkpoint would run only code that this very version of ctxext wrote.

What config.json says of its origin proves nothing, as anyone can write it: the files themselves are compared.
"""

import re
from collections.abc import Iterator
from typing import Any

from ctxext.checkpoint import Checkpoint
from ctxext.errors import CtxextError
from ctxext.families import family_of
from ctxext.recipes.mspoe_layout import CODE_FILE, STUB_FILE
from ctxext.recipes.recipe import plain_config, recipe_from_dict
from ctxext.recipes.rotary import provenance

CODE_FILES = (CODE_FILE, STUB_FILE)
"""Names of the modeling code that this package writes."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def own_code(config: dict[str, Any]) -> dict[str, str]:
    """The modeling code that a converted checkpoint's recipe needs, as this version writes it: name and content.

    Args:
        config: The content of its config.json.

    Raises:
        CtxextError: the configuration was broken by someone.
    """
    noted = provenance(config).get("recipe")
    if noted is None:
        return {}
    try:
        recipe = recipe_from_dict(noted, "config.json")
        plain = plain_config(config, family_of(config)) if recipe.needs_code else config
        return {name: text for step in recipe.steps for name, text in step.code_files(plain).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CtxextError(f'"config.json" makes no sense: {type(error).__name__} {error}') from error


def runs_only_own_code(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint carries code, and all that `trust_remote_code` would run is this version's own."""
    places = list(_places(checkpoint))
    stub = STUB_FILE.removesuffix(".py")
    if not places or any(not isinstance(place, str) or place.partition(".")[0] != stub for place in places):
        return False
    try:
        code = own_code(checkpoint.config)
    except CtxextError:
        return False
    files = {name: checkpoint.folder / name for name in code}
    return bool(code) and all(
        path.is_file() and path.read_bytes() == code[name].encode() for name, path in files.items()
    )


def carries_code(checkpoint: Checkpoint) -> bool:
    """Whether `trust_remote_code` would run anything at all, whoever wrote it."""
    return any(True for _ in _places(checkpoint))


def check_pinned(checkpoint: Checkpoint, revision: str | None) -> None:
    """Let other people's code run from the Hub only as it was when someone read it.

    Args:
        checkpoint: Whose code would run.
        revision: What the user asked for.

    Raises:
        CtxextError: it comes from the Hub, and the revision is a name that can move.
    """
    if checkpoint.revision and not _COMMIT.fullmatch(revision or ""):
        raise CtxextError(
            "--trust-remote-code runs code from the Hub only at a pinned revision.",
            hint=f"Read that code, then add --revision {checkpoint.revision}",
        )


def _places(checkpoint: Checkpoint) -> Iterator[Any]:
    """Everything that names a class which is not transformers' own, in whatever file."""
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        content = checkpoint.read_json(name) or {}
        for part in (content, *(value for value in content.values() if isinstance(value, dict))):
            auto_map = part.get("auto_map")
            if isinstance(auto_map, dict):
                yield from auto_map.values()
            elif auto_map is not None:
                yield auto_map
