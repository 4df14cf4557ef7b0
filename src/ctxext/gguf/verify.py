"""Check a converted GGUF file: its rotation against its recipe, and its tensors against its source."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.gguf.convert import check_rotation
from ctxext.gguf.header import Header, Tensor, read_header
from ctxext.gguf.model import FACTORS, RECIPE_KEY, TENSORS_KEY, GgufModel, open_gguf, quantization
from ctxext.recipes.recipe import recipe_from_dict

_PIECE = 1 << 22


@dataclass(frozen=True)
class GgufCheck:
    """One check: its subject, whether it passed, and details."""

    name: str
    is_passed: bool
    detail: str


def verify_gguf(
    path: str | Path, against: str | Path | None = None, progress: Progress | None = None
) -> tuple[GgufCheck, ...]:
    """Check a converted GGUF file, and compare its keys and tensors with those of its source."""
    model = open_gguf(path)
    if not model.recipe:
        raise CtxextError(f'"{path}" was not converted by ctxext.', hint=f"ctxext inspect {path} describes it.")
    checks = [_rotation(model)]
    if against is not None:
        source = open_gguf(against)
        checks += [_keys(model, source), _tensors(model, source, progress)]
    return tuple(checks)


def _rotation(model: GgufModel) -> GgufCheck:
    """Compare the file's rotation in llama.cpp with its recorded recipe, applied again to the unscaled model."""
    recipe = recipe_from_dict(model.recipe["recipe"], RECIPE_KEY)
    start = model.unscaled_model
    edited = recipe.resolve(start).edit(start)
    try:
        difference = check_rotation(model.files, model.architecture, edited)
    except CtxextError as error:
        return GgufCheck("rotation", False, str(error))
    actual, expected = model.header.get(model.key("context_length")), edited.encoding.claimed_length
    if actual != expected:  # Engines truncate texts at this length.
        return GgufCheck("rotation", False, f"context_length is {actual}, expected {expected} for {recipe.summary()}")
    return GgufCheck("rotation", True, f"{recipe.summary()} (largest relative difference {difference:.0e})")


def _keys(model: GgufModel, source: GgufModel) -> GgufCheck:
    """Check that keys equal the source's, except for recorded changes, and that the recorded old values do too."""
    replaced = model.recipe["replaced"]
    new, old = model.header.values, source.header.values
    may = {*replaced, RECIPE_KEY, TENSORS_KEY}
    changed = [key for key in {**new, **old} if key not in may and new.get(key) != old.get(key)]
    for path, source_path in zip(model.parts[1:], source.parts[1:], strict=False):
        values, originals = read_header(path).values, read_header(source_path).values
        changed += [key for key in {**values, **originals} if values.get(key) != originals.get(key)]
    # After two conversions in a row the record contains the values from before the first.
    lost = [] if source.recipe else [k for k, v in replaced.items() if k != FACTORS and source.header.get(k) != v]
    if changed or lost:
        return GgufCheck("keys", False, f"different from the source: {', '.join([*changed, *lost][:5])}")
    same = len(old) - len(may & set(old))
    return GgufCheck("keys", True, f"{same} identical to the source, {len(replaced)} changed as recorded")


def _tensors(model: GgufModel, source: GgufModel, progress: Progress | None) -> GgufCheck:
    """Check that every tensor except the divisors has the source's bytes, in every part."""
    count, different = 0, []
    if len(model.parts) != len(source.parts):
        return GgufCheck("tensors", False, f"{len(model.parts)} parts, the source has {len(source.parts)}")
    for part, source_part in zip(model.parts, source.parts, strict=True):
        header, source_header = read_header(part), read_header(source_part)
        originals = {tensor.name: tensor for tensor in source_header.tensors}
        names = {tensor.name for tensor in header.tensors}
        different += [name for name in {*names} ^ {*originals} if name not in model.architecture.lists]
        for tensor in header.tensors:
            if tensor.name in model.architecture.lists or tensor.name not in originals:
                continue
            same = _digest(part, header, tensor) == _digest(source_part, source_header, originals[tensor.name])
            count += same
            different += [] if same else [tensor.name]
            if progress is not None:
                progress("comparing tensors", count + len(different), len(header.tensors))
    if different:
        return GgufCheck("tensors", False, f"different from the source: {', '.join(sorted(different)[:5])}")
    return GgufCheck("tensors", True, f"{count} tensors ({quantization(model)}) identical to the source")


def _digest(path: Path, header: Header, tensor: Tensor) -> tuple[str, int, tuple[int, ...]]:
    digest, left = hashlib.sha256(), tensor.size
    with path.open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        while left and (piece := file.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest(), tensor.kind, tensor.shape
