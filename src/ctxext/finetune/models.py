"""The models of a fine-tuning: the base, and its source before the context was extended."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ctxext.checkpoint.auto_class import CAUSAL
from ctxext.checkpoint.head import Head
from ctxext.checkpoint.loading import (
    DTYPES,
    check_device,
    choose_device,
    choose_dtype,
    explain_loading_errors,
    forbid_downloads,
    guard_vocabulary,
    is_bf16_native,
    load_checkpoint,
    quiet_transformers,
    rename,
    stock_class,
)
from ctxext.data.encoding import open_tokenizer
from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network
from ctxext.finetune.attention import attend_by_document
from ctxext.finetune.base import Base
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.recipe import plain_config

with forbid_network():
    from transformers import BitsAndBytesConfig


@dataclass(frozen=True)
class Precision:
    """The device of a training, and the types that it stores and computes in.

    Attributes:
        device: The device of this process.
        weights: The type of the loaded weights; "auto" for the saved type.
        autocast: bf16 or fp16 if matrices are multiplied in that type; empty otherwise.
        in_4bit: Whether frozen weights are stored in 4 bits.
    """

    device: torch.device
    weights: "torch.dtype | str"
    autocast: str
    in_4bit: bool = False

    @property
    def dtype(self) -> str:
        """The type of the computation by its name on the command line."""
        return self.autocast or next(name for name, of in DTYPES.items() if self.weights == getattr(torch, of))

    def __str__(self) -> str:
        text = f"training on {self.device.type} in {self.dtype}"
        if self.device.type != "cpu" and self.dtype != "fp16" and not is_bf16_native(self.device):
            text += f"; {self.device.type} has no native bf16 here, --dtype fp16 may be faster"
        return text


def choose_precision(device: str, dtype: str, *, full: bool, in_4bit: bool = False) -> Precision:
    """Choose the device, and with dtype auto the type: bf16 on devices that compute in it, otherwise float32.

    There, frozen weights keep the saved type.

    Args:
        device: Name of the device, or auto.
        dtype: Name of the type on the command line, or auto.
        full: Whether all weights are trained.
        in_4bit: Whether frozen weights are stored in 4 bits.
    """
    place = choose_device(device)
    on_accelerator = place.type != "cpu"
    has_bf16 = is_bf16_native(place)
    weights = torch.float32 if dtype == "auto" and (full or not has_bf16) else choose_dtype(dtype)
    if has_bf16 and dtype in ("auto", "bf16"):
        return Precision(place, weights, "bf16", in_4bit)
    return Precision(place, weights, "fp16" if on_accelerator and dtype == "fp16" else "", in_4bit)


def load_base(base: Base, precision: Precision, *, by_document: bool = False, config: Any = None) -> tuple[Any, Any]:
    """Load the model and the tokenizer.

    Args:
        base: The checkpoint.
        precision: The device and the types.
        by_document: Whether packed documents are attended to separately, if the model's class supports it.
        config: Load the weights into transformers' class with this configuration.
    """
    dtype = precision.weights
    extra: dict[str, Any] = {} if config is None else {"config": config}
    if precision.in_4bit:
        extra["quantization_config"] = _make_4bit_config(dtype)
    else:
        check_device(base.checkpoint, precision.device.type)
    with stage_checkpoint(base.checkpoint) as stage:
        with explain_loading_errors(f'"{base.checkpoint.name}" cannot be loaded'):
            tokenizer = rename(open_tokenizer(stage.folder), base.checkpoint)
        model = load_checkpoint(
            base.checkpoint, stage.folder, trust=stage.trust and config is None, dtype=dtype, **extra
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # In eval mode bitsandbytes would repack the weights for a kernel without a gradient.
            module.support_avx512bf16_for_cpu = False
    model.config.use_cache = False
    if by_document:
        attend_by_document(model)
    guard_vocabulary(model, tokenizer)
    return model, tokenizer


def _make_4bit_config(dtype: Any) -> Any:
    """Make QLoRA's quantization config (arXiv 2305.14314, section 3): normal floats with quantized scales."""
    if find_spec("bitsandbytes") is None:
        raise CtxextError("--quantize 4bit needs bitsandbytes.", hint='pip install "ctxext[quantize]"')
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )


@dataclass(eq=False)
class SourceModel:
    """The source model, to distil from on sequences within its original context (LongReD, arXiv 2502.07365).

    Attributes:
        model: The source, frozen.
        shared: Pairs of its parameters and the trained model's that share memory; they follow it to a device.
        trained_length: Original context length of the source, in tokens.
        weight: Weight of the divergence relative to the loss.
    """

    model: Any
    shared: list[tuple[torch.nn.Parameter, torch.nn.Parameter]]
    trained_length: int
    weight: float = 5.0

    def __post_init__(self) -> None:
        self.head = Head(self.model)

    def covers(self, positions: torch.Tensor) -> bool:
        """Return whether the source was trained on all positions, (batch, length)."""
        return positions.shape[1] <= self.trained_length and int(positions.max()) < self.trained_length

    @torch.no_grad()
    def read(self, ids: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        """Compute the source's last hidden states, (1, tokens, width), for its head.

        Args:
            ids: (batch, length).
            arguments: Mask and positions.
        """
        if self.model.device != ids.device:
            for parameter, trained in self.shared:
                if trained.device == ids.device and trained.shape == parameter.shape:
                    parameter.data = trained.data
            self.model.to(ids.device)
        return self.head.read(ids, **arguments).flatten(0, 1)[None]


def load_source(base: Base, model: Any, precision: Precision, *, full: bool, by_document: bool) -> SourceModel:
    """Build the source model of an extended base, with the base's weights before training.

    Args:
        base: The checkpoint.
        model: The loaded base.
        precision: The device and the types.
        full: Whether all weights are trained, so that the source needs a copy of them.
        by_document: As in `load_base`.
    """
    if "source_theta" not in provenance(base.checkpoint.config):
        raise CtxextError(
            f'--keep-short needs the source of "{base.checkpoint.name}", which its config.json does not record.',
            hint="Convert its source with ctxext convert.",
        )
    source = _build_source(base, model, precision, full=full, by_document=by_document)
    source.eval().requires_grad_(False)
    source.config.use_cache = False
    is_shared = not full and not precision.in_4bit
    trained = dict(model.named_parameters()) if is_shared else {}
    shared = [(parameter, trained[name]) for name, parameter in source.named_parameters() if name in trained]
    return SourceModel(source, shared, trained_length=base.model.encoding.trained_length)


def _build_source(base: Base, model: Any, precision: Precision, *, full: bool, by_document: bool) -> Any:
    """Build the family's transformers class with the original context; reload quantized weights."""
    with forbid_network():
        from accelerate import init_empty_weights
    kind, config = stock_class(plain_config(base.model).config, CAUSAL)
    if precision.in_4bit:
        return load_base(base, precision, by_document=by_document, config=config)[0]
    with forbid_downloads(), quiet_transformers(), init_empty_weights(include_buffers=False):
        source = kind._from_config(config, dtype=model.dtype)
    weights = model.state_dict()
    source.load_state_dict({name: value.clone() for name, value in weights.items()} if full else weights, assign=True)
    return source
