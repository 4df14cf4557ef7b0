"""Compare weights tensor by tensor, a chunk at a time, without holding files in memory."""

import hashlib
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.files.tensor_files import grouped, read_tensors
from ctxext.verify.subject import FAILED, PASSED, Finding, Subject, listed, training_of

_CHUNK = 1 << 22
_LOADED = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)$")


@dataclass(frozen=True)
class Tensor:
    """A tensor by type, shape and the SHA-256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


def check_against(subject: Subject) -> Finding | None:
    """Whether the weights equal the source's, or only training changed them."""
    name, source = "against", subject.source
    if source is None:
        return None
    mine, theirs = _weight_files(subject.checkpoint), _weight_files(source)
    shared = {path for path in mine.keys() & theirs.keys() if mine[path].samefile(theirs[path])}
    if shared == mine.keys() == theirs.keys():
        return Finding(name, PASSED, f'the weight files are those of "{source.name}" on disk: the same bytes')
    tensors = _tensors([mine[path] for path in sorted(mine.keys() - shared)], subject.progress)
    source_tensors = _tensors([theirs[path] for path in sorted(theirs.keys() - shared)], subject.progress)
    changed = sorted(key for key in tensors.keys() & source_tensors.keys() if tensors[key] != source_tensors[key])
    gone, added = sorted(source_tensors.keys() - tensors.keys()), sorted(tensors.keys() - source_tensors.keys())
    if not changed and not gone and not added:
        return Finding(name, PASSED, f'all {len(tensors)} tensors are those of "{source.name}", bit for bit')
    differences = [f"{len(changed)} of {len(tensors)} tensors differ: {grouped(changed)}"] if changed else []
    differences += [f"missing: {listed(gone)}"] if gone else []
    differences += [f"added: {listed(added)}"] if added else []
    planned = subject.new_tensors
    if planned and sorted(changed + added) == planned and not gone:
        kept = f'the other {len(tensors) - len(planned)} tensors are those of "{source.name}", bit for bit'
        return Finding(name, PASSED, f"written anew, as the recipe says: {grouped(planned)}; {kept}")
    is_trained = bool(training_of(subject)) and not gone and not added
    return Finding(name, PASSED if is_trained else FAILED, ("trained; " if is_trained else "") + "; ".join(differences))


def _weight_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """The files that transformers loads: safetensors where there are any."""
    files = [path for path in checkpoint.weight_files if _LOADED.match(path.as_posix())]
    safe = [path for path in files if path.suffix == ".safetensors"]
    return {path.as_posix(): checkpoint.folder / path for path in safe or files}


def _tensors(files: list[Path], progress: Progress | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for number, path in enumerate(files):
        if progress is not None:
            progress(f"reading {path.name}", number, len(files))
        read = _safetensors if path.suffix == ".safetensors" else _pickled
        for name, tensor in read(path):
            if name in tensors:
                raise CtxextError(f'"{path.name}" holds "{name}", which another file holds too.')
            tensors[name] = tensor
    return tensors


def _safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, entry, pieces in read_tensors(path):
        digest = hashlib.sha256()
        for piece in pieces:
            digest.update(piece)
        yield name, Tensor(str(entry["dtype"]), tuple(entry["shape"]), digest.hexdigest())


_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32"}
_DTYPES |= {"int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}


def _pickled(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a pickled file: nothing else is unpickled, and they are read from disk as needed."""
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CtxextError(f'"{path.name}" cannot be read as tensors: {reason}') from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise CtxextError(f'"{path.name}" holds something else than tensors by name.')
    for name, tensor in tensors.items():
        digest = hashlib.sha256()
        flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
        for chunk in flat.split(_CHUNK):
            digest.update(chunk.numpy().tobytes())
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield name, Tensor(_DTYPES.get(dtype, dtype), tuple(tensor.shape), digest.hexdigest())
