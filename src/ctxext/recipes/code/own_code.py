"""Whether loading a checkpoint runs only code of ctxext, of this version or an earlier one.

Anyone can write anything into config.json, so the files themselves are compared by digest. `released.json` holds for
each earlier release the SHA-256 of its portable files, the files of each method, and the Auto classes of its stub;
`tools/record_release.py` adds a release. Files of two releases are never mixed.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.content import sha256_of
from ctxext.recipes.code.layout import (
    CONFIGURATION,
    SHARED_FILES,
    STUB_FILE,
    STUB_STYLE,
    Classes,
    family_classes,
    render_stub,
)
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.encodings import legacy
from ctxext.recipes.encodings.rotary import CODE_KEY, provenance
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.recipes.registry import METHODS


def releases() -> Mapping[str, Mapping[str, Any]]:
    """Every recorded release, by its version."""
    content: dict[str, dict[str, Any]] = json.loads(
        (resources.files("ctxext.recipes.code") / "released.json").read_text("utf-8")
    )
    return content


CODE_FILES = frozenset(
    {STUB_FILE, legacy.MODELING_FILE}.union(
        *SHARED_FILES.values(),
        *(release["digests"] for release in releases().values()),
        (file.name for method in METHODS if issubclass(method, CodeMethod) for file in method.code),
    )
)
"""Names of the files of modeling code that this version or an earlier one writes."""

_HAS_HEADS: Mapping[str, bool] = {"0.2.0": False, STUB_STYLE: True}
"""Whether each format of the stub has classes for `layout.HEADS`; nothing else in it has changed so far."""

_OF_MODELS = ("config.json", "tokenizer_config.json")
_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PLACE = re.compile(r"(\w+)\.\w+")


def own_code(checkpoint: Checkpoint) -> dict[str, str]:
    """The modeling code that a converted checkpoint's recipe needs, in the version that wrote it.

    Args:
        checkpoint: The converted checkpoint.

    Returns:
        File names and the SHA-256 of their contents: those of the version that the files match, or of this version if
        they match none.

    Raises:
        CtxextError: the configuration is broken.
    """
    sets = code_of_versions(checkpoint.config)
    return next((code for code in sets if _is_there(checkpoint, code)), sets[0] if sets else {})


def code_of_versions(config: dict[str, Any]) -> list[dict[str, str]]:
    """The modeling code that a configuration's recipe needs, as each version writes it; this version first.

    Raises:
        CtxextError: the configuration is broken.
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
        earlier = code_of_releases(steps[0].encoding, names, classes)
        return [{name: _digest(text) for name, text in files.items()}, *earlier]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CtxextError(f'"config.json" makes no sense: {type(error).__name__} {error}') from error


def code_of_releases(encoding: str, methods: Sequence[str], classes: Classes) -> Iterator[dict[str, str]]:
    """For each release the files of a checkpoint with these methods, stub included, with their digests.

    Args:
        encoding: The encoding of the methods, "rotary" or "alibi".
        methods: The names of the methods with code, in the recipe's order.
        classes: The classes of the family.
    """
    for release in releases().values():
        if not all(method in release["methods"] for method in methods):
            continue
        shared, entries = release["shared"][encoding], [release["methods"][name] for name in methods]
        files = {*shared, *(file for entry in entries for file in entry["files"])}
        parts = [(entry["title"], entry["files"][0].removesuffix(".py"), entry["class"]) for entry in entries]
        known = {auto: name for auto, name in classes.by_auto_class.items() if auto in release["auto_classes"]}
        modules = [file.removesuffix(".py") for file in files]
        heads = classes.heads if _HAS_HEADS[release["stub"]] else {}
        stub = render_stub(Classes(classes.modeling, known, heads), parts, modules, shared[-1].removesuffix(".py"))
        yield {**{file: release["digests"][file] for file in files}, STUB_FILE: _digest(stub)}


def _is_there(checkpoint: Checkpoint, code: Mapping[str, str]) -> bool:
    files = {name: checkpoint.folder / name for name in code}
    return bool(code) and all(path.is_file() and sha256_of(path) == code[name] for name, path in files.items())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def runs_only_own_code(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint carries code, and all code of its model and tokenizer is ctxext's.

    Other files that transformers would run are left out of the folder that is loaded (`staging.py`).
    """
    places = list(_places(checkpoint, _OF_MODELS))
    ours = (STUB_FILE.removesuffix(".py"), CONFIGURATION)
    if not places or any(module_of(place) not in ours for place in places):
        return False
    try:
        return any(_is_there(checkpoint, code) for code in code_of_versions(checkpoint.config))
    except CtxextError:
        return False


def module_of(place: Any) -> str:
    """Return the module of an entry `module.Class` of `auto_map`; empty for other entries, as `repo--module.Class`."""
    match = _PLACE.fullmatch(place) if isinstance(place, str) else None
    return match[1] if match else ""


def release_of(checkpoint: Checkpoint) -> str | None:
    """The recorded release whose modeling code a checkpoint carries; None if there is none.

    Raises:
        CtxextError: the configuration is broken.
    """
    code = own_code(checkpoint)
    if not _is_there(checkpoint, code):
        return None
    # The stub differs by family, so releases do not record its digest.
    shared = {name: digest for name, digest in code.items() if name != STUB_FILE}
    return next((name for name, release in releases().items() if shared.items() <= release["digests"].items()), None)


def own_code_content(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The verified modeling code by file name, if all of it is ctxext's; empty otherwise."""
    if not runs_only_own_code(checkpoint):
        return {}
    code = own_code(checkpoint)
    content = {name: (checkpoint.folder / name).read_bytes() for name in code}
    is_same = all(hashlib.sha256(content[name]).hexdigest() == digest for name, digest in code.items())
    return content if is_same else {}


def runs_by_itself(path: Path) -> bool:
    """Whether transformers runs a file of a checkpoint that no configuration names.

    transformers 5 runs it with `trust_remote_code=True`, as our code needs; 4.57 from any local folder, even without.
    """
    return path.parts[0] == "custom_generate"


def carries_code(checkpoint: Checkpoint) -> bool:
    """Whether `trust_remote_code` would run anything at all, whoever wrote it."""
    return any(True for _ in _places(checkpoint, (*_OF_MODELS, *_OF_PROCESSORS)))


def needs_code(config: Mapping[str, Any]) -> bool:
    """Whether a configuration needs the code that it names.

    Either transformers does not know the model type, or ctxext has hidden the schedule from it.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    hides = legacy.is_legacy(config) or any(
        isinstance(part, Mapping) and CODE_KEY in part for part in (config, config.get("text_config"))
    )
    return bool(config.get("auto_map")) and (hides or config.get("model_type") not in CONFIG_MAPPING_NAMES)


def check_pinned(checkpoint: Checkpoint, revision: str | None) -> None:
    """Check that code of others runs from the Hub only at a pinned commit.

    Args:
        checkpoint: The checkpoint whose code would run.
        revision: The revision that the user asked for.

    Raises:
        CtxextError: it comes from the Hub, and the revision is not a commit.
    """
    if checkpoint.revision and not _COMMIT.fullmatch(revision or ""):
        raise CtxextError(
            "--trust-remote-code runs code from the Hub only at a pinned revision.",
            hint=f"Read that code, then add --revision {checkpoint.revision}",
        )


def _places(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[Any]:
    """All entries of `auto_map` in these files."""
    for name in names:
        content = checkpoint.read_json(name) or {}
        for part in (content, *(value for value in content.values() if isinstance(value, dict))):
            auto_map = part.get("auto_map")
            if isinstance(auto_map, dict):
                yield from auto_map.values()
            elif auto_map is not None:
                yield auto_map
