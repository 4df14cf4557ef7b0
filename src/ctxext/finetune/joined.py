"""Parameters whose files have another name for them, or one tensor for several: Nomic BERT's queries, keys and values.

transformers 5 converts such files while loading and back while saving. Its own way back says here which rows of which
stored tensor a parameter is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.checkpoint.opening import Checkpoint
from ctxext.finetune.tensors import AdapterChanges, stored_name
from ctxext.recipes.code.layout import without_code

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Share:
    """A parameter's part of a stored tensor.

    Attributes:
        name: The stored tensor.
        index: Which of its parts, in order of the rows.
        count: The number of parts, of equal size.
    """

    name: str
    index: int
    count: int


def shares_of(checkpoint: Checkpoint, stored: Shapes) -> dict[str, Share]:
    """The shares by parameter; empty if files and class agree, or if more than joining and renaming is between them.

    Args:
        checkpoint: The base.
        stored: Names and shapes of its tensors.
    """
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import Chunk, WeightConverter, revert_weight_conversion
    except ImportError:  # transformers 4 converts nothing.
        return {}
    import torch

    from ctxext.verify.carried import stock_model

    conversions = get_checkpoint_conversion_mapping(str(checkpoint.config.get("model_type"))) or []
    operations = [step for one in conversions if isinstance(one, WeightConverter) for step in one.operations]
    if not operations or not all(isinstance(step, Chunk) for step in operations):
        return {}
    model = stock_model(without_code(checkpoint.config))
    names = list(model.state_dict())
    files = revert_weight_conversion(model, {name: torch.tensor([[at]]) for at, name in enumerate(names)})
    shares = {}
    for file_name, tensor in files.items():
        parts = [names[int(at)] for at in tensor.flatten()]
        place = stored_name(file_name, stored)
        if place is not None:
            shares.update({name: Share(place, index, len(parts)) for index, name in enumerate(parts)})
    return {name: share for name, share in shares.items() if name not in stored}


def with_shares(stored: Shapes, shares: Mapping[str, Share]) -> dict[str, tuple[int, ...]]:
    """The shapes of the stored tensors, and of the parameters that are shares of them."""
    whole = {name: stored[share.name] for name, share in shares.items()}
    return {**stored, **{name: (shape[0] // shares[name].count, *shape[1:]) for name, shape in whole.items()}}


class JoinedChanges:
    """The changes of an adapter to parameters and their shares, by stored tensor.

    Args:
        folder: The adapter, as peft saves it.
        checkpoint: The base.
        stored: Names and shapes of its tensors.
        tied: The output embedding with the input embedding that it is; empty where they are two.

    Raises:
        CtxextError: the adapter cannot be merged, or it changes what the checkpoint does not have.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint, stored: Shapes, *, tied: Mapping[str, str]) -> None:
        self.shares = shares_of(checkpoint, stored)
        self.changes = AdapterChanges(folder, with_shares(stored, self.shares), tied=tied)
        self.untied = self.changes.untied
        self.names = frozenset(self.shares[name].name if name in self.shares else name for name in self.changes.names)

    def new(self, name: str, old: "torch.Tensor") -> "torch.Tensor":
        """The new value of a stored tensor, put together from its shares."""
        import torch

        parts = sorted((share.index, part) for part, share in self.shares.items() if share.name == name)
        if not parts:
            return self.changes.new(name, old)
        values = [
            self.changes.new(part, rows) if part in self.changes.names else rows.float()
            for (_, part), rows in zip(parts, old.chunk(len(parts)), strict=True)
        ]
        return torch.cat(values)
