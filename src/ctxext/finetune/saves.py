"""The saves of a stopped run: the newest usable one, and the reasons why newer ones are not used.

Parts of a save that are missing or damaged would be replaced silently: transformers then begins with a new optimizer,
and peft with the initial weights.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.files.offline import forbid_network
from ctxext.files.schemas import read_json_object
from ctxext.files.strict import parse_json, read_text
from ctxext.files.tensor_files import read_safetensors_header

with forbid_network():
    from transformers import TrainerState, TrainingArguments
    from transformers.trainer import safe_globals

STATE = "trainer_state.json"

_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
"""The Trainer's names of saves; `checkpoint-backup` and `checkpoint-0012` are the user's."""

_DESCRIPTIONS = ("config.json", "adapter_config.json", "model.safetensors.index.json")
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")
_PARTS: Mapping[str, tuple[str, ...]] = {
    "optimizer.pt": ("state", "param_groups"),
    "scheduler.pt": ("last_epoch",),
    "rng_state*.pth": ("python", "numpy", "cpu"),
    "scaler.pt": (),
}
"""Files of a save with the keys that they contain; only fp16 has a scaler."""
_OPTIONAL = ("scaler.pt",)
_SHARDED = ("pytorch_model_fsdp*", "optimizer_*", "global_step*")
"""Files and folders of FSDP and DeepSpeed, which have other formats."""


@dataclass(frozen=True)
class Saves:
    """The save that a resumed run continues from.

    Attributes:
        newest: The newest usable save; None if the run has no complete one.
        notes: What was skipped or ignored, one line each.
    """

    newest: Path | None
    notes: tuple[str, ...]


def find_newest_save(folder: Path, steps: int, model: Any = None) -> Saves:
    """Find the newest usable save with at most `steps` steps.

    Args:
        folder: The training folder.
        steps: The number of steps of the run.
        model: The model with the trained weights that the save must contain; None to skip that check.

    Raises:
        CtxextError: The run has complete saves, but none is usable, or all are beyond `steps`.
    """
    saves: dict[int, Path] = {}
    notes, damaged, later = [], [], 0
    for path in sorted(folder.glob("checkpoint-*")):
        if name := _NAME.fullmatch(path.name):
            saves[int(name[1])] = path
        else:
            notes.append(f"skipped {path.name}: it is not named as a save")
    tensors = _list_trained(model) if model is not None and saves else []
    for step, save in sorted(saves.items(), reverse=True):
        if fault := _find_gap(save):  # A kill during a save leaves such a folder.
            notes.append(f"skipped {save.name}: {fault}")
            continue
        try:
            unknown = _check_save(save, step, tensors)
        except CtxextError as error:
            damaged.append(f"{save.name}: {error.message}")
            notes.append(f"skipped {damaged[-1]}")
            continue
        if step <= steps:
            if unknown:
                notes.append(f"ignored in {save.name}: {', '.join(unknown)} of another version of transformers")
            return Saves(save, tuple(notes))
        notes.append(f"skipped {save.name}: it is beyond --steps {steps}")
        later = step
    if later:
        raise CtxextError(
            f"The run is already at step {later}, beyond --steps {steps}.",
            hint="Raise --steps, or start over with --overwrite.",
        )
    if damaged:
        raise CtxextError(
            f'No save in "{folder}" is usable. {" ".join(damaged[:3])}',
            hint="Restore the files of a save, or start over with --overwrite.",
        )
    return Saves(None, tuple(notes))


def adapt_state(save: Path, arguments: TrainingArguments) -> None:
    """Write this run's micro-batch to a save, without keys that this version of transformers does not know.

    The Trainer raises for unknown keys.
    """
    state = save / STATE
    with arguments.main_process_first(local=False):
        old = read_json_object(state)
        content = {key: value for key, value in old.items() if key in _KNOWN and value is not None}
        # The Trainer reads the entry of its control at the next save.
        content["stateful_callbacks"] = {"TrainerControl": {}, **content["stateful_callbacks"]}
        content["train_batch_size"] = arguments.train_batch_size
        if content != old:
            new = state.with_name(f"{state.name}.new")
            new.write_text(as_json(content), encoding="utf-8")
            new.replace(state)


def clear_save(save: Path) -> None:
    """Remove what would make a half-written save at this place look complete."""
    if save.is_dir() and not save.is_symlink():
        (save / STATE).unlink(missing_ok=True)
    else:
        save.unlink(missing_ok=True)


_KNOWN = frozenset(field.name for field in dataclasses.fields(TrainerState))


def _find_gap(save: Path) -> str:
    """Return why a save was never completed; empty if it was. The Trainer writes its state last."""
    if not save.is_dir():
        return "it is not a folder"
    if not (save / STATE).is_file():
        return f"it has no {STATE}"
    try:
        parse_json(read_text(save / STATE), STATE)
    except CtxextError as error:
        return error.message
    return ""


def _check_save(save: Path, step: int, tensors: Sequence[Mapping[str, tuple[int, ...]]]) -> list[str]:
    """Raise if any file of a complete save is missing or unreadable; return the unknown keys of its state."""
    state = read_json_object(save / STATE)
    if state["global_step"] != step:
        raise CtxextError(f"{STATE} is of step {state['global_step']}.")
    for name in _DESCRIPTIONS:
        if (save / name).exists() and not isinstance(parse_json(read_text(save / name), name), dict):
            raise CtxextError(f"{name} is not a JSON object.")
    if not any(any(save.glob(pattern)) for pattern in _SHARDED):
        for pattern, keys in _PARTS.items():
            _check_part(save, pattern, keys)
        _check_weights(save, tensors)
    return sorted(state.keys() - _KNOWN)


def _check_part(save: Path, pattern: str, keys: Sequence[str]) -> None:
    """Raise if files of torch are missing, or are not dicts with some keys; tensors are mapped, not read."""
    paths = sorted(save.glob(pattern))
    if not paths and pattern not in _OPTIONAL:
        raise CtxextError(f"{pattern.replace('*', '')} is missing.")
    for path in paths:
        try:
            with safe_globals():
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises any error for a damaged file, with advice to run its code.
            raise CtxextError(f"{path.name} cannot be read ({type(error).__name__}).") from error
        if not isinstance(content, dict) or any(key not in content for key in keys):
            raise CtxextError(f"{path.name} lacks its keys.")


def _check_weights(save: Path, tensors: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    """Raise if a save lacks a trained weight; the Trainer would continue with its initial values."""
    kind = next((name for name in _WEIGHTS if (save / name).is_file()), None)
    if kind is None:
        raise CtxextError("Its weights are missing.")
    if kind.startswith("adapter") and not (save / "adapter_config.json").is_file():
        raise CtxextError("adapter_config.json is missing.")
    files = {kind}
    if kind.endswith(".json"):
        files = set(map(str, read_json_object(save / kind).get("weight_map", {}).values()))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(files):
        try:
            header = read_safetensors_header(save / file)
        except OSError as error:
            raise CtxextError(f"{file} is missing.") from error
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
    for names in tensors:
        if not any(shapes.get(name) == shape for name, shape in names.items()):
            name = next(iter(names))
            raise CtxextError(f'"{name}" is missing in {kind}, or has another shape.')


def _list_trained(model: Any) -> list[dict[str, tuple[int, ...]]]:
    """Return names and shapes of the weights in a save, tied ones together, as only one of them is saved."""
    with forbid_network():
        from peft import PeftModel, get_peft_model_state_dict

    is_adapter = isinstance(model, PeftModel)
    # By default, peft asks the Hub whether the vocabulary was resized.
    weights = (
        get_peft_model_state_dict(model, save_embedding_layers=False).items()
        if is_adapter
        else model.named_parameters(remove_duplicate=False)
    )
    tied: dict[Any, dict[str, tuple[int, ...]]] = {}
    for name, tensor in weights:
        key = (tensor.data_ptr() or name, tuple(tensor.shape))
        tied.setdefault(key, {})[name] = tuple(tensor.shape)
    return list(tied.values())
