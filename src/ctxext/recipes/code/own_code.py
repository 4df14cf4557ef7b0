"""Whether loading a checkpoint would run only code that ctxext wrote: this version, or an earlier one.

What config.json says of its origin proves nothing, as anyone can write it: the files themselves are compared.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.code.layout import CONFIGURATION, SHARED_FILES, STUB_FILE, family_classes
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.code.released import code_of_releases, released_files, releases
from ctxext.recipes.encodings import legacy
from ctxext.recipes.encodings.rotary import CODE_KEY, provenance
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.recipes.registry import METHODS
from ctxext.system.files import sha256_of

CODE_FILES = frozenset(
    {STUB_FILE, legacy.MODELING_FILE, *released_files(), *(name for names in SHARED_FILES.values() for name in names)}
    | {file.name for method in METHODS if issubclass(method, CodeMethod) for file in method.code}
)
"""Names of the modeling code that this package writes, or wrote."""

_OF_MODELS = ("config.json", "tokenizer_config.json")
_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")

_COMMIT = re.compile(r"[0-9a-f]{40}")


def own_code(checkpoint: Checkpoint) -> dict[str, str]:
    """The modeling code that a converted checkpoint's recipe needs, as the version that wrote it did.

    Args:
        checkpoint: The converted checkpoint.

    Returns:
        File names and the SHA-256 of their contents: the set of the version whose files these are, and of this one
        where they are no version's.

    Raises:
        CtxextError: the configuration was broken by someone.
    """
    sets = code_of_versions(checkpoint.config)
    return next((code for code in sets if _is_there(checkpoint, code)), sets[0] if sets else {})


def code_of_versions(config: dict[str, Any]) -> list[dict[str, str]]:
    """The modeling code that a configuration's recipe needs as each version wrote it, this one first.

    Raises:
        CtxextError: the configuration was broken by someone.
    """
    noted = provenance(config).get("recipe")
    if noted is None:
        return []
    try:
        recipe = recipe_from_dict(noted, "config.json")
        files, steps = recipe.code_files(config), [step for step in recipe.steps if isinstance(step, CodeMethod)]
        if legacy.is_legacy(config):
            classes = family_classes(config)
            models = (classes.by_auto_class[auto] for auto in ("AutoModel", "AutoModelForCausalLM"))
            stub = _digest(legacy.stub(classes.modeling, *models))
            return [{legacy.MODELING_FILE: legacy.MODELING_DIGEST, STUB_FILE: stub}]
        if not steps:
            return []
        names, classes = [step.name for step in steps], family_classes(config)
        earlier = code_of_releases(steps[0].encoding, names, classes, STUB_FILE)
        return [{name: _digest(text) for name, text in files.items()}, *earlier]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CtxextError(f'"config.json" makes no sense: {type(error).__name__} {error}') from error


def _is_there(checkpoint: Checkpoint, code: Mapping[str, str]) -> bool:
    files = {name: checkpoint.folder / name for name in code}
    return bool(code) and all(path.is_file() and sha256_of(path) == code[name] for name, path in files.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def runs_only_own_code(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint carries code, and all that a model or a tokenizer is loaded with is ctxext's own.

    What else transformers would run of the folder stays outside of what is loaded (`staging.py`).
    """
    places = list(_places(checkpoint, _OF_MODELS))
    ours = (STUB_FILE.removesuffix(".py"), CONFIGURATION)
    if not places or any(not isinstance(place, str) or place.partition(".")[0] not in ours for place in places):
        return False
    try:
        return any(_is_there(checkpoint, code) for code in code_of_versions(checkpoint.config))
    except CtxextError:
        return False


def release_of(checkpoint: Checkpoint) -> str | None:
    """The recorded release whose modeling code a checkpoint carries; None if it is no recorded one's.

    Raises:
        CtxextError: the configuration was broken by someone.
    """
    code = own_code(checkpoint)
    if not _is_there(checkpoint, code):
        return None
    # The stub differs by family, and belongs to the same set of files as the others.
    shared = {name: digest for name, digest in code.items() if name != STUB_FILE}
    return next((name for name, release in releases().items() if shared.items() <= release["digests"].items()), None)


def own_code_content(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The modeling code by name, where all of it is ctxext's own, as it was when it was compared; empty otherwise."""
    if not runs_only_own_code(checkpoint):
        return {}
    code = own_code(checkpoint)
    content = {name: (checkpoint.folder / name).read_bytes() for name in code}
    is_same = all(hashlib.sha256(content[name]).hexdigest() == digest for name, digest in code.items())
    return content if is_same else {}


def runs_by_itself(path: Path) -> bool:
    """Whether transformers runs a file of a checkpoint that nothing names.

    5 runs it with `trust_remote_code=True`, which a user of our code gives; 4.57 from any local folder, without.
    """
    return path.parts[0] == "custom_generate"


def carries_code(checkpoint: Checkpoint) -> bool:
    """Whether `trust_remote_code` would run anything at all, whoever wrote it."""
    return any(True for _ in _places(checkpoint, (*_OF_MODELS, *_OF_PROCESSORS)))


def needs_code(config: Mapping[str, Any]) -> bool:
    """Whether no stock class can stand for the code that a configuration names.

    Either transformers does not know the model type, or ctxext has hidden the schedule from it on purpose.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    hides = legacy.is_legacy(config) or any(
        isinstance(part, Mapping) and CODE_KEY in part for part in (config, config.get("text_config"))
    )
    return bool(config.get("auto_map")) and (hides or config.get("model_type") not in CONFIG_MAPPING_NAMES)


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


def _places(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[Any]:
    """Everything in these files that names a class which is not transformers' own."""
    for name in names:
        content = checkpoint.read_json(name) or {}
        for part in (content, *(value for value in content.values() if isinstance(value, dict))):
            auto_map = part.get("auto_map")
            if isinstance(auto_map, dict):
                yield from auto_map.values()
            elif auto_map is not None:
                yield auto_map
