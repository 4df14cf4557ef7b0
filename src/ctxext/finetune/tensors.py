"""What training changed in a checkpoint's tensors, from an adapter or from weights trained whole."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from ctxext.checkpoint import read_json_object, read_safetensors_header
from ctxext.errors import CtxextError

_PREFIX = "base_model.model."
_LORA = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector", "lora_magnitude_vector.weight")
_UNSUPPORTED = (
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "layer_replication",
    "use_qalora",
    "fan_in_fan_out",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


class Changes(Protocol):
    """New values of some tensors."""

    names: frozenset[str]
    """Names of the tensors that change, as the checkpoint stores them."""

    def new(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """The new value of a tensor, of the old one's shape, in float32 or the type it was trained in."""
        ...


class AdapterChanges:
    """What a LoRA adapter adds: (alpha / rank) · B · A, with DoRA's magnitudes, and whole tensors trained beside.

    Args:
        folder: The adapter, as peft saves it.
        stored: Names and shapes of the checkpoint's tensors.
        tied: Whether the output embedding is the input embedding.

    Raises:
        CtxextError: it is no LoRA adapter, or it changes what the checkpoint does not have.
    """

    def __init__(self, folder: Path, stored: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        if not (folder / "adapter_config.json").is_file():
            raise CtxextError(f'"{folder}" is not an adapter: it has no adapter_config.json.')
        config = read_json_object(folder / "adapter_config.json")
        unsupported = [key for key in _UNSUPPORTED if config.get(key)]
        if config.get("peft_type") != "LORA" or unsupported or config.get("bias", "none") != "none":
            what = ", ".join(unsupported) or f"{config.get('peft_type')} with bias {config.get('bias')}"
            raise CtxextError(f'"{folder}" cannot be merged here: {what}.', hint="Merge it with peft.")
        rank = int(config["r"])
        self.scale = float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)
        path = folder / "adapter_model.safetensors"
        if not path.is_file():
            raise CtxextError(f'"{folder}" has no adapter_model.safetensors.')
        self.parts: dict[str, dict[str, torch.Tensor]] = {}
        with safe_open(path, "pt") as file:
            for key in read_safetensors_header(path):
                owner, part = _split(key.removeprefix(_PREFIX))
                self.parts.setdefault(owner, {})[part] = file.get_tensor(key)
        names = {owner: stored_name(owner, stored) for owner in self.parts}
        self.parts = _known(folder, self.parts, names, stored, tied=tied)
        self.names = frozenset(self.parts)

    def new(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """The tensor with the adapter added, in float32."""
        parts = self.parts[name]
        if "whole" in parts:
            return parts["whole"]
        old = old.float()
        first, second = parts["lora_A.weight"].float(), parts["lora_B.weight"].float()
        new = old + self.scale * (second @ first)
        magnitude = parts.get("lora_magnitude_vector", parts.get("lora_magnitude_vector.weight"))
        if magnitude is not None:  # DoRA: every row of the sum is scaled to the length that was learned for it.
            new = new * (magnitude.float() / new.norm(dim=1))[:, None]
        return new


class WholeChanges:
    """Weights that were trained whole, as transformers saves them.

    Args:
        folder: The trained model.
        stored: Names and shapes of the checkpoint's tensors.
        tied: Whether the output embedding is the input embedding.

    Raises:
        CtxextError: names or shapes differ from the checkpoint's.
    """

    def __init__(self, folder: Path, stored: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        self.files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self.files.update(dict.fromkeys(read_safetensors_header(path), file))
        missing = [name for name in stored if name not in self.files and not (tied and name in _HEADS)]
        if missing:
            raise CtxextError(f'The trained model has no "{missing[0]}", which the base has.')
        self.names = frozenset(name for name in stored if name in self.files)

    def new(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """The trained tensor."""
        found: torch.Tensor = self.files[name].get_tensor(name)
        return found


def stored_name(owner: str, stored: Iterable[str]) -> str | None:
    """The name under which a checkpoint stores a parameter: some leave out the name of the base model."""
    names = set(stored)
    candidates = (owner, owner.partition(".")[2], f"model.{owner}")
    return next((name for name in candidates if name in names), None)


def _split(key: str) -> tuple[str, str]:
    """A parameter's name and which part of its change a tensor is."""
    for part in _LORA:
        if key.endswith(f".{part}"):
            return key.removesuffix(part) + "weight", part
    return key, "whole"


def _known(
    folder: Path,
    parts: Mapping[str, dict[str, torch.Tensor]],
    names: Mapping[str, str | None],
    stored: Mapping[str, tuple[int, ...]],
    *,
    tied: bool,
) -> dict[str, dict[str, torch.Tensor]]:
    """The parts by stored name. A tied output embedding is not stored, or is stored twice and changes twice."""
    found = {}
    for owner, tensors in parts.items():
        name = names[owner]
        if name is None and tied and owner.endswith(_HEADS):
            continue
        if name is None:
            raise CtxextError(
                f'"{folder}" changes "{owner}", which this checkpoint does not have.', hint="Is it another model's?"
            )
        shape = tensors["whole"].shape if "whole" in tensors else _product_shape(tensors)
        if tuple(shape) != tuple(stored[name]):
            raise CtxextError(f'"{folder}" does not fit: "{name}" is {stored[name]}, the adapter\'s {tuple(shape)}.')
        found[name] = tensors
    embedding = next((name for name, part in found.items() if "embed" in name and "whole" in part), None)
    if tied and embedding:
        found.update({head: found[embedding] for head in _HEADS if head in stored})
    return found


def _product_shape(tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tensors["lora_B.weight"].shape[0], tensors["lora_A.weight"].shape[1]
