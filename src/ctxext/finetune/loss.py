"""Loss of a long sequence without logits of length × vocabulary in memory (`checkpoint/head.py`).

If nothing after the hidden states is trained, a piece's gradient is computed at once, while its logits exist.
Otherwise each piece is checkpointed.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from ctxext.checkpoint.head import Head, positions_at_once
from ctxext.errors import CtxextError
from ctxext.files.offline import forbid_network

if TYPE_CHECKING:
    from ctxext.finetune.models import SourceModel

IGNORED = -100

NUM_PARTS = 4
"""Number of equal parts of a sequence for the loss by position."""

Comparison = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function from logits of shape (positions, vocabulary), in float32, to their summed loss and its gradient."""


class PositionLosses:
    """Sums of the loss by part of the positions, over all batches of an evaluation."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, NUM_PARTS, dtype=torch.float64)

    def add(self, part: int, total: torch.Tensor, count: int) -> None:
        """Add the summed loss of `count` tokens in a part."""
        self.sums[:, part] += torch.tensor([float(total), count], dtype=torch.float64)

    def take(self, device: torch.device) -> list[float | None]:
        """Return the mean of each part over all processes, None for a part without learned tokens; reset the sums."""
        sums, self.sums = self.sums, torch.zeros_like(self.sums)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            sums = sums.float().to(device)
            torch.distributed.all_reduce(sums)
        return [float(total / count) if count else None for total, count in sums.T.cpu()]


def use_chunked_loss(
    model: Any,
    piece: int | None = None,
    source: "SourceModel | None" = None,
    by_position: PositionLosses | None = None,
    *,
    tokens_per_step: int | None = None,
    is_masked: bool = False,
    offloads: bool = False,
) -> Head:
    """Replace a language model's forward by one that returns the loss alone, computed piece by piece.

    The loss stays inside the model's call, so that wrappers (data parallel, FSDP, autocast) work unchanged.

    Args:
        model: A transformers causal or masked language model; adapters may be added before or later.
        piece: Learned positions at once, over all rows; by default as many as give 24 MiB of float32 logits, or 256
            MiB on an accelerator.
        source: A model to distil from on positions that it was trained on.
        by_position: Receives the loss of each part of the sequences while the model is in eval mode.
        tokens_per_step: Tokens of an optimizer step over all processes, over which a divergence is averaged; by
            default those of the call.
        is_masked: Whether labels are for their own position, not for the next one.
        offloads: Whether to keep what the backward pass needs in the memory of the machine; with checkpointing these
            are the inputs of the layers.

    Returns:
        The model's head, with the model's original forward.
    """
    head = Head(model, is_masked=is_masked)
    if not head.is_separate:
        raise CtxextError(
            f'The loss of "{type(model).__name__}" cannot be computed in pieces: its logits depend on more than the '
            "last hidden states."
        )

    def forward(
        input_ids: Any,
        labels: Any,
        num_items_in_batch: Any = None,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        with forbid_network():
            from transformers.modeling_outputs import CausalLMOutputWithPast

        arguments = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        # The hidden state at a position predicts the next token; the last one predicts nothing.
        targets = labels if is_masked else shift_labels  # Of parts, they are shifted before the split.
        if targets is None:
            targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        mask = targets != IGNORED
        is_frozen = not any(parameter.requires_grad for parameter in head.parameters())
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else contextlib.nullcontext():
            states = head.read(input_ids, **arguments)

        def sum_losses(chosen: torch.Tensor, compare: Callable[[slice], Comparison]) -> torch.Tensor:
            # Flatten to one row, because the head treats each position separately.
            hidden, ids = states[chosen][None], input_ids[chosen][None]
            total = hidden[:, :0].sum()  # Zero with a gradient, for a batch without learned tokens.
            for rows in head.pieces(hidden, positions_at_once(model, piece)):

                def piece_loss(hidden: torch.Tensor, rows: slice = rows) -> torch.Tensor:
                    loss: torch.Tensor = _Compared.apply(  # type: ignore[no-untyped-call]
                        head(hidden, ids[:, rows])[0].float(), compare(rows)
                    )
                    return loss

                if is_frozen:
                    total = total + _Eager.apply(hidden[:, rows], piece_loss)  # type: ignore[no-untyped-call]
                else:
                    total = total + checkpoint(
                        piece_loss, hidden[:, rows], use_reentrant=False, preserve_rng_state=False
                    )
            return total

        def loss_at(chosen: torch.Tensor) -> torch.Tensor:
            expected = targets[chosen]  # Only learned positions need logits.
            return sum_losses(chosen, lambda rows: compare_with_targets(expected[rows]))

        total = loss_at(mask) if by_position is None or model.training else _loss_by_part(mask, by_position, loss_at)
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = total / torch.as_tensor(count, device=total.device)
        if source is not None and model.training and source.covers(arguments["position_ids"]):
            theirs = source.read(input_ids, arguments)
            total = sum_losses(torch.ones_like(mask), lambda rows: compare_with_source(theirs[:, rows], source.head))
            # The contributions of all processes and batches to a step sum to a mean over its tokens.
            loss = loss + source.weight * total / (tokens_per_step or input_ids.numel())
        return CausalLMOutputWithPast(loss=loss)

    model.forward = forward
    return head


def _loss_by_part(
    mask: torch.Tensor, by_position: PositionLosses, loss_at: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the summed loss of the positions in `mask` (b, l), and add the loss of each part to `by_position`."""
    parts = by_position.sums.shape[1]
    place = torch.arange(mask.shape[1], device=mask.device) * parts // mask.shape[1]
    total = torch.zeros((), device=mask.device)
    for part in range(parts):
        chosen = mask & (place == part)
        loss = loss_at(chosen)
        by_position.add(part, loss, int(chosen.sum()))
        total = total + loss
    return total


def compare_with_targets(targets: torch.Tensor) -> Comparison:
    """Return the cross-entropy with target tokens, (positions,); its gradient is softmax minus one at the target."""

    def compare(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, columns = logits.log_softmax(-1), targets[:, None]
        loss = -scores.gather(1, columns).sum()
        slope = scores.exp_()
        return loss, slope.scatter_add_(1, columns, slope.new_full((1, 1), -1.0).expand_as(columns))

    return compare


def compare_with_source(hidden: torch.Tensor, head: Head) -> Comparison:
    """Return the Kullback-Leibler divergence from a model's predictions; `hidden` has shape (1, positions, width)."""

    def compare(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The head ignores the ids; only their number must match.
        source_scores = head(hidden, hidden.new_zeros(hidden.shape[:2], dtype=torch.long))[0].float().log_softmax(-1)
        scores, shares = logits.log_softmax(-1), source_scores.exp()
        return (shares * (source_scores - scores)).sum(), scores.exp_().sub_(shares)

    return compare


class _Compared(torch.autograd.Function):
    """Summed loss of logits; its gradient, of the logits' shape, is the only additional memory."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, compare: Comparison) -> torch.Tensor:
        """Compute the loss, and save its gradient."""
        loss, slope = compare(logits)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Scale the saved gradient by the gradient of the loss."""
        (slope,) = ctx.saved_tensors
        return slope.mul_(outer[0]), None


class _Eager(torch.autograd.Function):
    """Summed loss of one piece, with its gradient computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, piece_loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Compute loss and gradient; save only the gradient, of the hidden states' size."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            loss = piece_loss(leaf)
        ctx.save_for_backward(*torch.autograd.grad(loss, leaf))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Scale the saved gradient by the gradient of the loss."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None
