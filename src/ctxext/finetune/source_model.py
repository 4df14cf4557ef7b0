"""The model before its window was extended, to stay close to on short sequences; it shares the weights of the base."""

from dataclasses import dataclass
from typing import Any

import torch

from ctxext.checkpoint.auto_class import CAUSAL
from ctxext.checkpoint.head import Head
from ctxext.checkpoint.loading import quiet_transformers, sealed, stock_class
from ctxext.errors import CtxextError
from ctxext.finetune.base import Base, load_base
from ctxext.finetune.options import TrainingOptions
from ctxext.recipes.encodings.rotary import provenance
from ctxext.recipes.recipe import plain_config


@dataclass(eq=False)
class SourceModel:
    """What the source says of sequences that fit in the window it was trained on (LongReD, arXiv 2502.07365).

    Attributes:
        model: The source, frozen.
        shared: Its parameters that are another model's too, each with that model's; they follow it to a device.
        trained_length: Tokens of the window that the source was trained on.
        weight: How much a nat of divergence weighs beside a nat of loss.
    """

    model: Any
    shared: list[tuple[torch.nn.Parameter, torch.nn.Parameter]]
    trained_length: int
    weight: float = 5.0

    def __post_init__(self) -> None:
        self.head = Head(self.model)

    def knows(self, positions: torch.Tensor) -> bool:
        """Whether all positions, (batch, length), are ones that the source was trained on."""
        return positions.shape[1] <= self.trained_length and int(positions.max()) < self.trained_length

    @torch.no_grad()
    def read(self, ids: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """The source's last hidden states, (1, tokens, width), for its head.

        Args:
            ids: (batch, length).
            given: Mask and positions.
        """
        if self.model.device != ids.device:
            for parameter, other in self.shared:
                if other.device == ids.device and other.shape == parameter.shape:
                    parameter.data = other.data
            self.model.to(ids.device)
        return self.head.read(ids, **given).flatten(0, 1)[None]


def load_source(base: Base, model: Any, options: TrainingOptions) -> SourceModel:
    """Build the model that a base was extended from, with the weights of the base, before anything is trained."""
    if "source_theta" not in provenance(base.checkpoint.config):
        raise CtxextError(
            f'--keep-short needs to know what "{base.checkpoint.name}" was before it was extended.',
            hint="Extend its source with ctxext convert.",
        )
    source = _built(base, model, options)
    source.eval().requires_grad_(False)
    source.config.use_cache = False
    is_shared = not options.full and options.quantize == "none"
    theirs = dict(model.named_parameters()) if is_shared else {}
    shared = [(parameter, theirs[name]) for name, parameter in source.named_parameters() if name in theirs]
    return SourceModel(source, shared, trained_length=base.model.encoding.trained_length)


def _built(base: Base, model: Any, options: TrainingOptions) -> Any:
    """The stock class of the family around the trained window; quantized weights are read again."""
    from accelerate import init_empty_weights

    kind, config = stock_class(plain_config(base.model).config, CAUSAL)
    if options.quantize != "none":
        return load_base(base, options, config=config)[0]
    with sealed(), quiet_transformers(), init_empty_weights(include_buffers=False):
        source = kind._from_config(config, dtype=model.dtype)
    weights = model.state_dict()
    source.load_state_dict(
        {name: value.clone() for name, value in weights.items()} if options.full else weights, assign=True
    )
    return source
