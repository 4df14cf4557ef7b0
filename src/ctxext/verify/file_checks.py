"""Checks that only read files: record, digests, configuration, modeling code, and weights against the source."""

import hashlib
import json
import pickle
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import read, text_config
from ctxext.checkpoint.opening import Checkpoint, claimed_lengths, is_loadable
from ctxext.checkpoint.other_files import LENGTHS, VERSIONED
from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST, Progress, has_stamp, same_value, sha256_of
from ctxext.files.tensor_files import format_tensor_names, read_tensors
from ctxext.recipes.code.layout import HEADS, PREFIX, STUB_FILE
from ctxext.recipes.code.own_code import CODE_FILES, explain_broken_config
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.model_config import is_readable, model_config
from ctxext.recipes.recipe import starting_model
from ctxext.verify.conversion import FAILED, PASSED, SKIPPED, Conversion, Finding, quote_names, training_of

CARD = "README.md"
_OF_THE_HUB = frozenset({MANIFEST, ".gitattributes", CARD})
"""Files that the Hub adds or users may edit, and the record itself."""
_CHUNK = 1 << 22


def check_record(conversion: Conversion) -> Finding:
    """Check whether ctxext.json exists and agrees with config.json."""
    name, manifest, in_config = "record", conversion.manifest, provenance(conversion.checkpoint.config)
    if not manifest:
        return Finding(name, FAILED, f"{MANIFEST} is missing: not created by ctxext, or incomplete")
    source = manifest.get("source") or {}
    records = {
        "recipe": (manifest.get("recipe"), in_config.get("recipe")),
        "source": (source.get("name"), in_config.get("source")),
        "revision": (source.get("revision"), in_config.get("revision")),
    }
    different = [key for key, (first, second) in records.items() if first != second]
    if different:
        return Finding(name, FAILED, f'"{MANIFEST}" and "config.json" differ in {", ".join(different)}')
    base = manifest.get("base") or {}
    if manifest.get("finetune") and not conversion.has_recipe and not conversion.model.is_extended:
        return Finding(name, PASSED, f"{base.get('name')}, fine-tuned within its context length")
    origin, version = source.get("name"), manifest.get("ctxext")
    return Finding(name, PASSED, f"{conversion.recipe.summary()}, created from {origin} by ctxext {version}")


def check_files(conversion: Conversion) -> Finding:
    """Check whether every small file matches its record, none is missing and none was added."""
    if not conversion.manifest:
        return Finding("files", SKIPPED, "nothing was recorded")
    paths = [path.as_posix() for path in conversion.checkpoint.files if path.parts[0] != conversion.rewritten]
    recorded = {
        name: digest
        for name, digest in conversion.read_digests("files").items()
        if name.partition("/")[0] != conversion.rewritten
    }
    weights, present = conversion.read_digests("weights"), set(paths)
    folder = conversion.checkpoint.folder
    changed = [name for name in recorded if name in present and sha256_of(folder / name) != recorded[name]]
    edited = [name for name in changed if name == CARD]
    troubles = {
        "changed": [name for name in changed if name != CARD],
        "missing": [name for name in [*recorded, *weights] if name not in present and name != CARD],
        "not recorded": sorted(present - recorded.keys() - weights.keys() - _OF_THE_HUB),
    }
    problems = "; ".join(f"{problem}: {quote_names(names)}" for problem, names in troubles.items() if names)
    note = f"; {CARD} was edited, which is allowed" if edited else ""
    if problems:
        return Finding("files", FAILED, problems)
    return Finding("files", PASSED, f"{len(recorded) - len(edited)} files match the record{note}")


def check_weights(conversion: Conversion) -> Finding:
    """Check whether the weight files are complete, and match their recorded digests."""
    name = "weights"
    conversion.checkpoint.check_weights()
    if not conversion.manifest:
        return Finding(name, SKIPPED, "nothing was recorded")
    recorded = conversion.read_digests("weights")
    known = {path: digest for path, digest in recorded.items() if digest}
    changed = []
    for number, (path, digest) in enumerate(known.items()):
        if conversion.progress is not None:
            conversion.progress(f"reading {path}", number, len(known))
        file = conversion.checkpoint.folder / path
        if file.is_file() and sha256_of(file) != digest:
            changed.append(path)
    if changed:
        return Finding(name, FAILED, f"changed: {quote_names(changed)}")
    touched = [path for path in recorded if path not in known and _is_touched(conversion, path)]
    if touched:
        detail = f"modified after they were recorded, or copied without their timestamps: {quote_names(touched)}"
        against = shlex.quote(conversion.compared_source or "SOURCE")
        return Finding(
            name,
            FAILED,
            f"{detail}; --against {against} compares the tensors, and convert --digest records digests, which copies "
            "keep",
        )
    if len(known) < len(recorded):
        unknown = len(recorded) - len(known)
        detail = (
            f"no digest was recorded for {unknown} of {len(recorded)} file(s); convert --digest or push records them"
        )
        return Finding(name, SKIPPED, detail)
    return Finding(name, PASSED, f"{len(known)} file(s) match the record")


def _is_touched(conversion: Conversion, name: str) -> bool:
    """Return whether a weight file's size or timestamp differs from the record; with --against only the size counts.

    The timestamp counts too if the source's file is missing or the same, because then nothing is compared.
    """
    stamps, path = conversion.manifest.get("stamps"), conversion.checkpoint.folder / name
    stamp = stamps.get(name) if isinstance(stamps, dict) else None
    if not stamp or not path.is_file() or has_stamp(path, stamp):
        return False
    origin = conversion.source.folder / name if conversion.source else None
    return origin is None or not origin.is_file() or origin.samefile(path) or path.stat().st_size != stamp[0]


def check_configuration(conversion: Conversion) -> Finding:
    """Check whether config.json is as recorded, and as applying the recipe again gives it, for transformers 4 and 5.

    Records of ctxext 0.3.0 and earlier do not contain config.json; then only the values of the recipe are compared.
    """
    name, recorded = "configuration", conversion.manifest.get("config")
    if recorded is not None and (different := _differences(conversion.checkpoint.config, recorded)):
        return Finding(name, FAILED, f'"config.json" differs from the record: {_format(different)}')
    if not conversion.has_recipe:
        return Finding(name, SKIPPED, '"config.json" has no recipe' + ("" if recorded is None else _AS_RECORDED))
    if different := _compare(conversion.model.config, conversion.expected_model.config):
        return Finding(name, FAILED, f'"config.json" differs from the recipe: {_format(different)}')
    note = f"; {_NOT_COMPARED}" if recorded is None else ""
    return Finding(name, PASSED, f"config matches the recipe (v4 and v5 formats){note}")


_AS_RECORDED = "; all values are as recorded"
_NOT_COMPARED = f"values outside the recipe are not compared: {MANIFEST} does not record them (--against SOURCE does)"


def _compare(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences of two configurations, apart from the record and from classes that depend on versions."""
    first, second = (
        {key: value for key, value in config.items() if key not in ("ctxext", VERSIONED)}
        for config in (actual, expected)
    )
    return {key: pair for key, pair in _differences(first, second).items() if not _is_other_head(key, pair)}


_HEADS = frozenset(f"auto_map.AutoModelFor{head}" for head in HEADS)
_OURS = f"{Path(STUB_FILE).stem}.{PREFIX}"


def _is_other_head(key: str, pair: tuple[Any, Any]) -> bool:
    """Return whether only one of two configurations has a head of ctxext's: not every transformers has the same."""
    present = [value for value in pair if value is not _ABSENT]
    return key in _HEADS and len(present) == 1 and str(present[0]).startswith(_OURS)


_ABSENT: Any = object()


def _differences(actual: Any, expected: Any, place: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the values of two configurations that differ, by dotted key; `_ABSENT` for a missing key."""
    if not (isinstance(actual, Mapping) and isinstance(expected, Mapping)):
        if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
            is_same = not any(_differences(*pair) for pair in zip(actual, expected, strict=True))
        else:
            is_same = same_value(actual, expected) and isinstance(actual, bool) == isinstance(expected, bool)
        return {} if is_same else {place: (actual, expected)}
    different: dict[str, tuple[Any, Any]] = {}
    for key in {**actual, **expected}:
        inside = f"{place}.{key}" if place else key
        different |= _differences(actual.get(key, _ABSENT), expected.get(key, _ABSENT), inside)
    return different


def _format(different: Mapping[str, tuple[Any, Any]]) -> str:
    """Format differences on one line: the first five keys with both values, and the number of the others."""

    def show(value: Any) -> str:
        text = "missing" if value is _ABSENT else json.dumps(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

    named = [f'"{key}" is {show(actual)}, not {show(expected)}' for key, (actual, expected) in different.items()]
    return "; ".join(named[:_MOST]) + (f" and {len(named) - _MOST} more" if len(named) > _MOST else "")


_SHOWN, _MOST = 60, 5
"""Number of characters of a value, and of differences, in a line."""


def check_lengths(conversion: Conversion) -> Finding:
    """Check whether the files agree on the context length."""
    name, encoded = "lengths", None  # Set for models without a plain key of the length.
    if conversion.family.encoding != "rotary" and is_readable(conversion.checkpoint.config, conversion.family):
        encoded = conversion.model.encoding.context_length
        if not conversion.model.encoding.limits_inputs:
            return Finding(name, PASSED, "inputs may have any length")
    claimed = claimed_lengths(conversion.checkpoint, conversion.family, encoded)
    config, tokenizer = claimed.get("config.json"), claimed.get("tokenizer_config.json")
    length = read(conversion.checkpoint.config, conversion.family, "max_position_embeddings")
    model_length = text_config(conversion.checkpoint.config, conversion.family).get(
        conversion.family.length_key, length
    )
    if tokenizer not in (None, config):
        return Finding(name, FAILED, f'"config.json" specifies {config} tokens, "tokenizer_config.json" {tokenizer}')
    cut = next((file for file, _ in LENGTHS if config and claimed.get(file, config) < config), None)
    if cut and conversion.model.encoding.is_scaled:
        return Finding(
            name, FAILED, f'"config.json" specifies {config} tokens, but "{cut}" truncates at {claimed[cut]}'
        )
    if model_length is not None and not isinstance(model_length, int):
        return Finding(name, FAILED, f'"config.json" has the length "{model_length}", expected a whole number')
    return Finding(name, PASSED, f"all files specify {config} tokens")


def check_code(conversion: Conversion) -> Finding:
    """Check whether the modeling code is identical to the code that this version writes."""
    expected = conversion.own_code
    changed = [name for name in expected if Path(name) in conversion.foreign_code]
    missing = [name for name in expected if Path(name) not in conversion.checkpoint.files]
    if changed or missing:
        maker = conversion.manifest.get("ctxext")
        problems = [f"differs from this version's code: {quote_names(changed)}"] if changed else []
        problems += [f"missing: {quote_names(missing)}"] if missing else []
        return Finding("code", FAILED, "; ".join(problems) + f" (created by ctxext {maker})")
    recorded = conversion.read_digests("files")  # Copied files of the source may have such names.
    names = [path.as_posix() for path in conversion.foreign_code]
    others = [name for name in names if name in recorded or name not in CODE_FILES]
    stray = [name for name in names if name not in others]
    if stray:
        return Finding("code", FAILED, f"the recipe needs no code, but the checkpoint contains {quote_names(stray)}")
    note = f"; also contains code of its source: {quote_names(others)}" if others else ""
    return Finding(
        "code", PASSED, (f"{len(expected)} files match this version's code" if expected else "none needed") + note
    )


_Tensor = tuple[str, tuple[int, ...], str]
"""Type and shape of a tensor, and the SHA-256 of its bytes."""


def check_against(conversion: Conversion) -> Finding | None:
    """Check whether the weights and the configuration are the source's, or only recipe and training changed them."""
    source = conversion.source
    if source is None:
        return None
    finding = _compare_tensors(conversion, source)
    if finding.status == PASSED and (different := _compare_source(conversion, source)):
        detail = f'"config.json" differs from "{source.name}" with the recipe: {_format(different)}'
        return Finding(finding.check, FAILED, detail)
    return finding


def _compare_source(conversion: Conversion, source: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Return the differences of config.json from the source's, after applying the recipe to that."""
    expected, record = source.config, provenance(conversion.checkpoint.config)
    # The source of a trained checkpoint may already have the recipe.
    if conversion.has_recipe and provenance(expected).get("recipe") != record["recipe"]:
        with explain_broken_config():
            before = model_config(expected, record.get("trained_length"))
            expected = conversion.recipe.edit(starting_model(before, conversion.recipe)).config
    different = _compare(conversion.checkpoint.config, expected)
    # Merging trained embeddings unties them.
    untied = ("tie_word_embeddings", f"{conversion.family.text_config}.tie_word_embeddings")
    return {key: pair for key, pair in different.items() if not (key in untied and training_of(conversion))}


def _compare_tensors(conversion: Conversion, source: Checkpoint) -> Finding:
    """Compare the weights with the source's."""
    name = "against"
    mine, theirs = _weight_files(conversion.checkpoint), _weight_files(source)
    shared = {path for path in mine.keys() & theirs.keys() if mine[path].samefile(theirs[path])}
    if shared == mine.keys() == theirs.keys():
        return Finding(name, PASSED, f'the weight files are the same files as those of "{source.name}"')
    tensors = _tensors([mine[path] for path in sorted(mine.keys() - shared)], conversion.progress)
    source_tensors = _tensors([theirs[path] for path in sorted(theirs.keys() - shared)], conversion.progress)
    changed = sorted(key for key in tensors.keys() & source_tensors.keys() if tensors[key] != source_tensors[key])
    gone, added = sorted(source_tensors.keys() - tensors.keys()), sorted(tensors.keys() - source_tensors.keys())
    if not changed and not gone and not added:
        return Finding(name, PASSED, f'all {len(tensors)} tensors are identical to those of "{source.name}"')
    differed = f"{len(changed)} of {len(tensors)} tensors differ: {format_tensor_names(changed)}"
    differences = [differed] if changed else []
    differences += [f"missing: {quote_names(gone)}"] if gone else []
    differences += [f"added: {quote_names(added)}"] if added else []
    planned = conversion.new_tensors
    if planned and sorted(changed + added) == planned and not gone:
        others = f'the other {len(tensors) - len(planned)} tensors are identical to those of "{source.name}"'
        return Finding(name, PASSED, f"rewritten by the recipe: {format_tensor_names(planned)}; {others}")
    is_trained = bool(training_of(conversion)) and not gone and not added
    return Finding(name, PASSED if is_trained else FAILED, ("trained; " if is_trained else "") + "; ".join(differences))


def _weight_files(checkpoint: Checkpoint) -> dict[str, Path]:
    files = checkpoint.loaded_safetensors or list(filter(is_loadable, checkpoint.weight_files))
    return {path.as_posix(): checkpoint.folder / path for path in files}


def _tensors(files: list[Path], progress: Progress | None) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for number, path in enumerate(files):
        if progress is not None:
            progress(f"reading {path.name}", number, len(files))
        for name, entry, pieces in read_tensors(path) if path.suffix == ".safetensors" else _read_pickled(path):
            if name in tensors:
                raise CtxextError(f'"{path.name}" contains "{name}", which another file contains too.')
            digest = hashlib.sha256()
            for piece in pieces:
                digest.update(piece)
            tensors[name] = str(entry["dtype"]), tuple(entry["shape"]), digest.hexdigest()
    return tensors


_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32"}
_DTYPES |= {"int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}


def _read_pickled(path: Path) -> Iterator[tuple[str, dict[str, Any], Iterator[bytes]]]:
    """Read the tensors of a pickled file as `read_tensors` does, from disk as needed; nothing else is unpickled."""
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CtxextError(f'"{path.name}" cannot be read as tensors: {reason}') from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise CtxextError(f'"{path.name}" is not a dictionary of tensors.')
    for name, tensor in tensors.items():
        flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = {"dtype": _DTYPES.get(dtype, dtype), "shape": tensor.shape}
        yield name, entry, (chunk.numpy().tobytes() for chunk in flat.split(_CHUNK))
