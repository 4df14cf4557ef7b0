"""Weights between those of a base and of its training: most of what was learned, for a part of what it cost.

Averaging a model with its own fine-tuning is WiSE-FT (arXiv 2109.01903): what the training moved far stays found, what
it moved a little by the way goes back.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from ctxext.checkpoint.loading import quiet_transformers, sealed, without_hub
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import read_safetensors_header
from ctxext.finetune.tensors import Changes
from ctxext.recipes.encodings.rotary import model_config, provenance

_OF_ITS_WRITER = frozenset(
    {"ctxext", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
)
_ROPE = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
"""Words for the same rotations, of which each version of transformers writes its own; what they mean is compared."""


class CheckpointChanges:
    """The tensors of another checkpoint of the same model, as a training wrote it.

    Args:
        base: The checkpoint that was trained.
        tuned: What became of it.
        stored: Names and shapes of the base's tensors.
        tied: The output embedding with the input embedding that it is; empty where they are two.

    Raises:
        CtxextError: the two do not hold the same tensors, or their configurations differ.
    """

    def __init__(
        self, base: Checkpoint, tuned: Checkpoint, stored: Mapping[str, tuple[int, ...]], *, tied: Mapping[str, str]
    ) -> None:
        files = [path for path in tuned.weight_files if path.suffix == ".safetensors" and len(path.parts) == 1]
        headers = {tuned.folder / path: read_safetensors_header(tuned.folder / path) for path in files}
        shapes = {name: tuple(entry["shape"]) for header in headers.values() for name, entry in header.items()}
        # Of two embeddings that are one, some files hold both and others the first.
        self._key = {head: name for head, name in tied.items() if name in shapes}
        for head, name in self._key.items():
            shapes.pop(head, None)
            if head in stored:
                shapes[head] = shapes[name]
        if other := sorted(name for name in shapes.keys() | stored.keys() if shapes.get(name) != stored.get(name)):
            raise CtxextError(
                f'"{tuned.name}" is no training of "{base.name}": "{other[0]}" is not the same in both.',
                hint="Give the checkpoint that it was trained from.",
            )
        before, after = _settings(base.config), _settings(tuned.config)
        if changed := sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)):
            raise CtxextError(
                f'"{tuned.name}" is no training of "{base.name}": config.json has another {", ".join(changed)}.',
                hint="Give the checkpoint that it was trained from, with the same positions.",
            )
        self.names = frozenset(shapes)
        self.untied: Mapping[str, str] = {}
        self._files = {name: path for path, header in headers.items() for name in header}

    def new(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """The other checkpoint's tensor, of the old one's shape."""
        key = self._key.get(name, name)
        with safe_open(self._files[key], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return tensor


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """What decides what weights mean, with the class's defaults, so that it is the same whoever wrote it."""
    from transformers import AutoConfig

    # The class writes into what it is given.
    others = {key: copy.deepcopy(value) for key, value in without_hub(config).items() if key != "model_type"}
    try:
        with quiet_transformers(), sealed():
            known = AutoConfig.for_model(str(config["model_type"]), **others).to_dict()
    except ValueError:  # A family that transformers does not know, with code of its own.
        known = others
    code = {key: str(name).rsplit("--", 1)[-1] for key, name in (config.get("auto_map") or {}).items()}
    try:
        positions = model_config(config).encoding
    except CtxextError:  # Of a family that has none, or none that is known.
        positions = None
    # Code reads its numbers from the note; without code the encoding says all.
    recipe = provenance(config).get("recipe") if code else None
    return {**_pruned(known), "auto_map": code, "positions": positions, "recipe": recipe}


def _pruned(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _pruned(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in _OF_ITS_WRITER and key not in _ROPE
    }


class PartOf:
    """Some changes, each only a part of the way.

    Args:
        changes: The whole of them.
        share: The part, above 0 and up to 1.
    """

    def __init__(self, changes: Changes, share: float) -> None:
        self.names, self.untied = changes.names, changes.untied
        self._changes, self._share = changes, share

    def new(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """A tensor between the old one and the new, in float32; one that holds no such numbers is the old one."""
        if not old.is_floating_point():
            return old
        wide = old.float()
        return wide.lerp(self._changes.new(name, old).float(), self._share)
