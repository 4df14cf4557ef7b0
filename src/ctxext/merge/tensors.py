"""Trained changes to a checkpoint's tensors, from an adapter or from fully trained weights."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core.core_schema import bool_schema, dict_schema
from safetensors import SafetensorError, safe_open

from ctxext.checkpoint.opening import WEIGHT_SUFFIXES, Checkpoint
from ctxext.checkpoint.other_files import is_of_trainer
from ctxext.errors import CtxextError
from ctxext.files.content import open_regular
from ctxext.files.offline import forbid_network
from ctxext.files.packages import require
from ctxext.files.schemas import NUMBER, WORD, Schema, check_schema, read_json_object
from ctxext.files.tensor_files import TORCH_NAMES, NewTensor, read_safetensors_header, read_tensor
from ctxext.recipes.code.layout import without_code

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]

_UNSUPPORTED = {
    "target_parameters": "it changes parameters of fused experts",
    "layer_replication": "it repeats layers",
    "use_qalora": "QALoRA pools the inputs of its layers",
    "lora_bias": "its matrices have biases",
    "trainable_token_indices": "it trains single rows of the embeddings",
    "alora_invocation_tokens": "it is active only after certain tokens",
    "arrow_config": "it routes between adapters",
    "use_bdlora": "its matrices consist of blocks",
}
"""Keys of adapters that cannot be merged, with the reasons."""
_BASE_UNCHANGED = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations that do not change the base; PiSSA, OLoRA and others subtract their matrices from it."""
_MOST_CHOICES = 3
"""Maximum number of repetitions and alternatives in a pattern; each one raises the exponent of the matching time."""
BEFORE_QUANTIZING = "If it is quantized, use the original checkpoint, or keep the adapter separate with --no-merge."
_OTHER_VOCABULARY = "Its base has another number of tokens: pass that base, with its embeddings resized to {} rows."
_BY_PEFT = "Train it without that option, or merge it with peft's merge_and_unload()."


_ADAPTER = Schema(
    {
        "lora_alpha": NUMBER,
        "alpha_pattern": dict_schema(WORD, NUMBER),
        **dict.fromkeys(("fan_in_fan_out", "use_rslora", "ensure_weight_tying"), bool_schema()),
    },
    required=["lora_alpha"],
)
"""The used keys of adapter_config.json."""


class AdapterConfig:
    """Configuration of a LoRA adapter saved by peft, with the scaling of its matrices."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "adapter_config.json").is_file():
            raise CtxextError(f'"{folder}" is not an adapter: it has no adapter_config.json.')
        self.content = read_json_object(folder / "adapter_config.json")
        if reason := _find_refusal(self.content):
            raise CtxextError(f'"{folder}" cannot be merged: {reason}.', hint=_BY_PEFT)
        check_schema(self.content, _ADAPTER, "adapter_config.json")
        for pattern in self.content.get("alpha_pattern") or {}:
            fault = "takes too long to match" if _count_choices(pattern) > _MOST_CHOICES else ""
            try:
                re.compile("" if fault else rf"(.*\.)?({pattern})$")  # As in peft's get_pattern_key.
            except (re.error, OverflowError, RecursionError) as error:
                fault = f"is not a regular expression: {error}"
            if fault:
                raise CtxextError(
                    f'"alpha_pattern" in adapter_config.json contains "{pattern}", which {fault}.',
                    hint="Use the end of a module name, for example q_proj.",
                )
        self.is_tied = bool(self.content.get("ensure_weight_tying"))
        self.is_transposed = bool(self.content.get("fan_in_fan_out"))

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a module's product, alpha / rank (or / √rank); patterns match the end of the name."""
        require("peft", "Merging an adapter")
        with forbid_network():
            from peft.utils.other import get_pattern_key

        alphas: Mapping[str, Any] = self.content.get("alpha_pattern") or {}
        alpha = float(alphas.get(get_pattern_key(alphas.keys(), module), self.content["lora_alpha"]))
        return alpha / (rank**0.5 if self.content.get("use_rslora") else rank)


def _count_choices(pattern: str) -> float:
    """Return an upper bound of the choices in a regular expression; infinity for repeated groups and flags.

    Matching takes at most about (length of the name) to the power of this number of steps.
    """
    if re.search(r"\\[0-9]|\(\?P=|\(\?[a-zA-Z]*[:)]", pattern.replace("(?:", "(")):
        return math.inf
    plain = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", plain)
    plain = plain.replace("(?", "(")
    if re.search(r"\)[*+?{]", plain):
        return math.inf
    return len(re.findall(r"[*+?{]", plain)) + ("|" in plain) * max(1, plain.count("("))


def _find_refusal(config: Mapping[str, Any]) -> str:
    """Return the reason why an adapter cannot be merged; empty if it can."""
    if config.get("peft_type") != "LORA":
        return f"it is {config.get('peft_type')}, and only LoRA can be merged"
    if config.get("bias", "none") != "none":
        return f'it trains biases ("bias": "{config["bias"]}")'
    initialization = config.get("init_lora_weights")
    if initialization not in _BASE_UNCHANGED:
        return f'its "{initialization}" weights change the base; save it with path_initial_model_for_weight_conversion'
    return next((f'{reason} ("{key}")' for key, reason in _UNSUPPORTED.items() if config.get(key)), "")


_PREFIX = "base_model.model."
_A, _B = "lora_A.weight", "lora_B.weight"
_LORA = (
    *(_A, _B, "lora_embedding_A", "lora_embedding_B"),
    *("lora_magnitude_vector", "lora_magnitude_vector.weight", "base_layer.weight"),
)


EXTRA_WEIGHTS = ("trainable_params.bin", "non_lora_trainables.bin")
"""Files of fully trained weights that LongLoRA and LLaVA save next to an adapter."""


def _check_extra_weights(folder: Path) -> None:
    """Raise if the folder contains other weights, which a merge would omit silently."""
    known = ("adapter_model.", *EXTRA_WEIGHTS)
    for path in sorted(folder.iterdir()):
        if path.suffix in WEIGHT_SUFFIXES and not path.name.startswith(known) and not is_of_trainer(path.name):
            raise CtxextError(
                f'"{folder}" contains "{path.name}", and the effect of these weights is unknown.',
                hint="Move the file elsewhere to merge the adapter without it.",
            )


def _read_extra_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in EXTRA_WEIGHTS by name; empty if the file does not exist."""
    if not path.is_symlink() and not path.exists():
        return {}
    import torch

    try:
        if path.is_symlink():
            raise ValueError("it is a link")
        with open_regular(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or not all(torch.is_tensor(tensor) for tensor in content.values()):
            raise ValueError("it is not a dictionary of tensors")
    except Exception as error:  # Unpickling can raise any exception.
        if isinstance(error, CtxextError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CtxextError(
            f'"{path}" contains weights trained with the adapter, but cannot be read: {reason}',
            hint="Save it as a dictionary of tensors by name, or remove it to merge the adapter without them.",
        ) from error
    return {str(name): tensor for name, tensor in content.items()}


def read_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors of a checkpoint, from its headers."""
    shapes = {name: tuple(entry["shape"]) for name, entry in checkpoint.headers.items()}
    if not shapes:
        raise CtxextError(
            f'"{checkpoint.name}" has no safetensors weights to merge into.',
            hint="Save it with transformers, or keep the adapter separate with --no-merge.",
        )
    return shapes


def _explain_shape(trained: Sequence[int], stored: Sequence[int]) -> str:
    """Return the hint for a tensor of another shape: other rows alone are another vocabulary."""
    is_resized = len(trained) == len(stored) == 2 and trained[1] == stored[1]
    return _OTHER_VOCABULARY.format(trained[0]) if is_resized else BEFORE_QUANTIZING


def check_type(name: str, dtype: str) -> None:
    """Raise if a tensor is not stored as plain numbers, as in quantized checkpoints."""
    if dtype not in TORCH_NAMES:
        raise CtxextError(f'Cannot merge into "{name}": it is stored as {dtype}.', hint=BEFORE_QUANTIZING)


def list_changed_tensors(changes: Changes, origin: Path, strength: float = 1.0) -> list[NewTensor]:
    """Return the trained tensors of a file of the base, and the output embeddings added to it.

    Args:
        changes: The trained changes.
        origin: The file.
        strength: Share of each change that is made, up to 1: weights between those of the base and the trained ones
            (WiSE-FT, arXiv 2109.01903, equation 1).
    """
    header = read_safetensors_header(origin)
    make = functools.partial(_make_tensor, origin=origin, changes=changes, strength=strength)
    tensors = [make(name, entry=entry) for name, entry in header.items() if name in changes.names]
    return tensors + [
        make(head, entry=header[name], copied=name)
        for head, name in changes.untied.items()
        if name in header and head not in header
    ]


def _make_tensor(
    name: str, *, origin: Path, entry: Mapping[str, Any], changes: Changes, strength: float, copied: str = ""
) -> NewTensor:
    """Return a tensor with its new values; one that the file lacks starts as a copy of the tensor `copied`."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])

    def pieces(raw: memoryview) -> Iterator[bytes]:
        import torch

        content = read_tensor(origin, copied) if copied else bytes(raw)
        if name not in changes.names:
            yield content
            return
        check_type(name, dtype)
        stored = getattr(torch, TORCH_NAMES[dtype])
        old = torch.frombuffer(bytearray(content), dtype=stored).reshape(shape)
        new = changes.compute(name, old)
        if new.shape != shape:
            raise CtxextError(f'"{name}" was trained as {tuple(new.shape)} but is stored as {shape}.')
        if strength != 1:
            new = torch.lerp(old.float(), new.float(), strength)
        new = new.to(stored)  # A finite number may overflow in the stored type.
        if not torch.isfinite(new).all():
            raise CtxextError(
                f'"{name}" would contain infinite numbers or NaN in {dtype}.',
                hint="Check lora_alpha, alpha_pattern and the tensors of the adapter.",
            )
        yield new.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return NewTensor(name, Path(origin.name), dtype, None if copied else shape, shape, pieces)


@dataclass(frozen=True)
class _Product:
    """Factors of the product added to a weight; DoRA then sets the norm of each row (embeddings: each column)."""

    first: torch.Tensor  # (rank, columns)
    second: torch.Tensor  # (rows, rank)
    magnitude: torch.Tensor | None
    across: int  # The dimension over which DoRA computes norms.
    is_transposed: bool  # The weight is stored transposed, as in GPT-2's layers.

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.second.shape[0], self.first.shape[1]
        return shape[::-1] if self.is_transposed else shape

    def add_to(self, old: torch.Tensor, scale: float) -> torch.Tensor:
        old = old.T if self.is_transposed else old
        new: torch.Tensor = old.float() + scale * (self.second.float() @ self.first.float())
        if self.magnitude is not None:
            new = new * (self.magnitude.float() / new.norm(dim=self.across)).unsqueeze(self.across)
        return new.T if self.is_transposed else new


def _make_product(parts: Mapping[str, torch.Tensor], *, is_transposed: bool) -> _Product | None:
    """Return the matrices of a weight; None if one is missing or their shapes do not match."""
    is_embedding = "lora_embedding_A" in parts
    a, b = ("lora_embedding_A", "lora_embedding_B") if is_embedding else (_A, _B)
    if a not in parts or b not in parts or {parts[a].ndim, parts[b].ndim} != {2}:
        return None
    # Matrices of an embedding are stored transposed.
    first, second = (parts[b].T, parts[a].T) if is_embedding else (parts[a], parts[b])
    if first.shape[0] != second.shape[1] or not first.shape[0]:
        return None
    magnitude = parts.get("lora_magnitude_vector", parts.get("lora_magnitude_vector.weight"))
    if magnitude is not None and tuple(magnitude.shape) != (first.shape[1] if is_embedding else second.shape[0],):
        return None
    return _Product(first, second, magnitude, 0 if is_embedding else 1, is_transposed and not is_embedding)


class AdapterChanges:
    """Changes by a LoRA adapter: (alpha / rank) · B · A, with DoRA's magnitudes, and fully trained tensors.

    `tied` maps tied output embeddings to their input embeddings; `untied` those that become separate tensors.
    """

    def __init__(
        self, folder: Path, stored: Shapes, *, tied: Mapping[str, str], shares: Mapping[str, Share] | None = None
    ) -> None:
        self.config, self.shares = AdapterConfig(folder), shares or {}
        stored = add_shares(stored, self.shares)
        path = folder / "adapter_model.safetensors"
        if not path.is_file():
            raise CtxextError(f'"{folder}" has no adapter_model.safetensors.')
        owners: dict[str, dict[str, torch.Tensor]] = {}
        keys = read_safetensors_header(path)  # Raises an error with the name of a broken file.
        try:
            with safe_open(path, "pt") as file:
                for key in keys:
                    owner, part = _split(key.removeprefix(_PREFIX))
                    owners.setdefault(owner, {})[part] = file.get_tensor(key)
        except SafetensorError as error:
            raise CtxextError(f'"{path}" cannot be read: {str(error).splitlines()[0]}.') from error
        _check_extra_weights(folder)
        for name in EXTRA_WEIGHTS:
            for key, tensor in _read_extra_weights(folder / name).items():
                owners.setdefault(key.removeprefix(_PREFIX), {})["whole"] = tensor
        # With the matrices of an embedding, peft also saves the unchanged embedding.
        owners = {owner: parts for owner, parts in owners.items() if set(parts) != {"base_layer.weight"}}
        self.parts = self._match_parts(folder, owners, stored, tied)
        self.untied: Mapping[str, str] = {} if self._stay_tied(tied) else dict(tied)
        for head, embedding in tied.items():
            if not self.untied:
                self.parts.pop(head, None)
                if head in stored and embedding in self.parts:
                    self.parts[head] = self.parts[embedding]
        self.names = frozenset(self.shares[name].name if name in self.shares else name for name in self.parts)

    def _match_parts(
        self, folder: Path, owners: Mapping[str, dict[str, torch.Tensor]], stored: Shapes, tied: Mapping[str, str]
    ) -> dict[str, torch.Tensor | _Product]:
        """Return the parts by stored name; a tied output embedding is not stored and keeps the adapter's name."""
        parts: dict[str, torch.Tensor | _Product] = {}
        for owner, tensors in owners.items():
            name = find_stored_name(owner, stored) or find_stored_name(owner, tied)
            if name is None:
                raise CtxextError(
                    f'"{folder}" changes "{owner}", which this checkpoint does not have.',
                    hint="Pass the adapter's base model.",
                )
            whole = tensors.get("whole")
            part = _make_product(tensors, is_transposed=self.config.is_transposed) if whole is None else whole
            if part is None:
                raise CtxextError(f'"{folder}" has missing or mismatched matrices for "{owner}".')
            expected = stored[name] if name in stored else stored[tied[name]]
            if tuple(part.shape) != tuple(expected):
                raise CtxextError(
                    f'"{folder}" does not fit: "{name}" has shape {tuple(part.shape)}, expected {expected}.',
                    hint=_explain_shape(part.shape, expected),
                )
            parts[name] = part
        return parts

    def _stay_tied(self, tied: Mapping[str, str]) -> bool:
        """Return whether input and output embedding are also one tensor in the adapter."""
        for head, embedding in tied.items():
            first, second = self.parts.get(embedding), self.parts.get(head)
            if second is None and (first is None or self.config.is_tied):
                continue
            if first is None or second is None or not _are_alike(first, second):
                return False
        return True

    def compute(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the adapter added, in float32 or its training type, joined from its shares."""
        import torch

        shares = sorted((share.index, part) for part, share in self.shares.items() if share.name == name)
        if not shares:
            return self._add_change(name, old)
        rows = old.chunk(len(shares))
        return torch.cat([self._add_change(part, some) for (_, part), some in zip(shares, rows, strict=True)])

    def _add_change(self, name: str, old: torch.Tensor) -> torch.Tensor:
        part = self.parts.get(name)
        if isinstance(part, _Product):
            return part.add_to(old, self.config.scale(name.removesuffix(".weight"), part.first.shape[0]))
        return old.float() if part is None else part


def _are_alike(first: torch.Tensor | _Product, second: torch.Tensor | _Product) -> bool:
    if isinstance(first, _Product) and isinstance(second, _Product):
        pairs = (first.first, second.first), (first.second, second.second)
        return all(left.float().equal(right.float()) for left, right in pairs)
    return not isinstance(first, _Product) and not isinstance(second, _Product) and first.equal(second)


class WholeChanges:
    """Fully trained weights saved by transformers; tied embeddings stay tied."""

    def __init__(self, folder: Path, stored: Shapes, *, tied: Mapping[str, str]) -> None:
        self.untied: Mapping[str, str] = {}
        self.files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self.files.update(dict.fromkeys(read_safetensors_header(path), file))
        # Tensors that the trained class does not have keep their stored values.
        self.trained = {place: name for name in self.files if (place := find_stored_name(name, stored)) is not None}
        self.trained |= {head: self.trained[name] for head, name in tied.items() if head in stored}
        unknown = [name for name in self.files if name not in self.trained.values() and name not in tied]
        if unknown:
            raise CtxextError(f'The trained model has "{unknown[0]}", which the base does not have.')
        self.names = frozenset(self.trained)

    def compute(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """Return the trained tensor."""
        key = self.trained[name]
        tensor: torch.Tensor = self.files[key].get_tensor(key)
        return tensor


def find_stored_name(owner: str, stored: Iterable[str]) -> str | None:
    """Return the name under which a checkpoint stores a parameter; None if there is no unique one.

    Some checkpoints omit the prefix of the base model. The first BERT names the weights of its norms gamma and beta.
    Vision-language models were saved as language_model.model and are loaded as model.language_model.
    """
    names = set(stored)
    old = owner.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    candidates = (owner, owner.partition(".")[2], f"model.{owner}", old)
    if match := next((name for name in candidates if name in names), None):
        return match
    place = _strip_modules(owner)
    alike = [name for name in names if _strip_modules(name) == place]
    return alike[0] if len(alike) == 1 else None


def _strip_modules(name: str) -> str:
    """Return a parameter's name without the modules around the text model."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def _split(key: str) -> tuple[str, str]:
    """Split a tensor key into the parameter name and the LoRA part; "whole" for a fully trained parameter."""
    for part in _LORA:
        if key.endswith(f".{part}"):
            return key.removesuffix(part) + "weight", part
    return key, "whole"


@dataclass(frozen=True)
class Share:
    """A parameter's part of a stored tensor, as in Nomic BERT's queries, keys and values.

    transformers 5 converts such files on loading and back on saving.

    Attributes:
        name: The stored tensor.
        index: Index of the part, in order of the rows.
        count: The number of parts, of equal size.
    """

    name: str
    index: int
    count: int


def find_shares(checkpoint: Checkpoint, stored: Shapes) -> dict[str, Share]:
    """Return the shares by parameter; empty if files and class agree, or differ by more than joining and renaming."""
    import torch
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter, revert_weight_conversion

    from ctxext.verify.rotation import stock_model

    conversions = get_checkpoint_conversion_mapping(str(checkpoint.config.get("model_type"))) or []
    operations = [step for entry in conversions if isinstance(entry, WeightConverter) for step in entry.operations]
    if not operations or not all(isinstance(step, Chunk) for step in operations):
        return {}
    model = stock_model(without_code(checkpoint.config))
    names = list(model.state_dict())
    files = revert_weight_conversion(model, {name: torch.tensor([[at]]) for at, name in enumerate(names)})
    shares = {}
    for file_name, tensor in files.items():
        parts = [names[int(at)] for at in tensor.flatten()]
        place = find_stored_name(file_name, stored)
        if place is not None:
            shares.update({name: Share(place, index, len(parts)) for index, name in enumerate(parts)})
    return {name: share for name, share in shares.items() if name not in stored}


def add_shares(stored: Shapes, shares: Mapping[str, Share]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored tensors, and of the parameters that are shares of them."""
    whole = {name: stored[share.name] for name, share in shares.items()}
    return {**stored, **{name: (shape[0] // shares[name].count, *shape[1:]) for name, shape in whole.items()}}


Changes = AdapterChanges | WholeChanges
