"""The loss of a long sequence without its logits: memory never holds length × vocabulary (`checkpoint/head.py`).

If nothing is trained behind the hidden states, a piece's gradient is computed at once, while its logits exist.
Otherwise each piece is checkpointed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from ctxext.checkpoint.head import Head, positions_at_once
from ctxext.errors import CtxextError

if TYPE_CHECKING:
    from ctxext.finetune.models import SourceModel

IGNORED = -100

NUM_PARTS = 4
"""Number of equal parts of a sequence for the loss by position."""

Comparison = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From logits of shape (positions, vocabulary), in float32, to their summed loss and its gradient."""


class PositionLosses:
    """Adds up the loss of each part of the positions, over all batches of an evaluation."""

    def __init__(self) -> None:
        self.sums = torch.zeros(2, NUM_PARTS, dtype=torch.float64)

    def add(self, part: int, total: torch.Tensor, count: int) -> None:
        """Add the summed loss of so many tokens that lie in a part."""
        self.sums[:, part] += torch.tensor([float(total), count], dtype=torch.float64)

    def take(self, device: torch.device) -> list[float | None]:
        """Return the mean of each part over all processes, None where nothing is learned; then it begins again."""
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
) -> Head:
    """Replace a language model's forward by one that returns the loss alone, computed piece by piece.

    It stays inside the model's call, so that whatever wraps the model (data parallel, FSDP, autocast) works unchanged.

    Args:
        model: A causal or masked language model of transformers; adapters may be inside already or come later.
        piece: Learned positions at once, over all rows; by default as many as make 24 MiB of float32 logits, or 256
            MiB on an accelerator.
        source: A model to stay close to where it knows the positions.
        by_position: Told, while the model is not in training, how much of the loss lies in each part of the sequences.
        tokens_per_step: Tokens of an optimizer step over all processes, over which a divergence is averaged; by
            default those of the call.
        is_masked: Whether labels say what stands at their own position, not at the next.

    Returns:
        The model's head, by its forward as it was before.
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
        **kwargs: Any,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        given = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        # The hidden state at a position predicts the next token; the last one predicts nothing.
        targets = labels if is_masked else torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        kept = targets != IGNORED
        is_frozen = not any(parameter.requires_grad for parameter in head.parameters())
        states = head.read(input_ids, **given)

        def summed(chosen: torch.Tensor, compare: Callable[[slice], Comparison]) -> torch.Tensor:
            # In a row, as the head sees each position by itself.
            hidden, ids = states[chosen][None], input_ids[chosen][None]
            total = hidden[:, :0].sum()  # Nothing yet, but with a gradient, for a batch that learns nothing.
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

        def loss_of(chosen: torch.Tensor) -> torch.Tensor:
            wanted = targets[chosen]  # Only positions that are learned need logits.
            return summed(chosen, lambda rows: next_tokens(wanted[rows]))

        total = loss_of(kept) if by_position is None or model.training else _loss_by_part(kept, by_position, loss_of)
        count = kept.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = total / torch.as_tensor(count, device=total.device)
        if source is not None and model.training and source.knows(given["position_ids"]):
            said = source.read(input_ids, given)
            total = summed(torch.ones_like(kept), lambda rows: divergence(said[:, rows], source.head))
            # What many processes and batches give to one step adds up to a mean over its tokens.
            loss = loss + source.weight * total / (tokens_per_step or input_ids.numel())
        return CausalLMOutputWithPast(loss=loss)

    model.forward = forward
    return head


def _loss_by_part(
    kept: torch.Tensor, by_position: PositionLosses, loss_of: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The loss of all kept positions (b, l), part of the sequence by part, each noted."""
    parts = by_position.sums.shape[1]
    place = torch.arange(kept.shape[1], device=kept.device) * parts // kept.shape[1]
    total = torch.zeros((), device=kept.device)
    for part in range(parts):
        chosen = kept & (place == part)
        loss = loss_of(chosen)
        by_position.add(part, loss, int(chosen.sum()))
        total = total + loss
    return total


def next_tokens(targets: torch.Tensor) -> Comparison:
    """Cross-entropy with the tokens that came, (positions,); its gradient is the softmax, minus one at the target."""

    def compare(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, columns = logits.log_softmax(-1), targets[:, None]
        loss = -scores.gather(1, columns).sum()
        slope = scores.exp_()
        return loss, slope.scatter_add_(1, columns, slope.new_full((1, 1), -1.0).expand_as(columns))

    return compare


def divergence(hidden: torch.Tensor, head: Head) -> Comparison:
    """Kullback-Leibler divergence from a model's predictions, given by its hidden states, (1, positions, width)."""

    def compare(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Nothing between hidden states and logits looks at the ids; their number must fit.
        said = head(hidden, hidden.new_zeros(hidden.shape[:2], dtype=torch.long))[0].float().log_softmax(-1)
        scores, shares = logits.log_softmax(-1), said.exp()
        return (shares * (said - scores)).sum(), scores.exp_().sub_(shares)

    return compare


class _Compared(torch.autograd.Function):
    """The summed loss of logits; its gradient, of the logits' shape, takes the only further memory."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, compare: Comparison) -> torch.Tensor:
        """Compute the loss, and keep its gradient."""
        loss, slope = compare(logits)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Scale the gradient by what the loss is multiplied with."""
        (slope,) = ctx.saved_tensors
        return slope.mul_(outer[0]), None


class _Eager(torch.autograd.Function):
    """The summed loss of one piece, its gradient computed in the same breath."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, piece_loss: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Compute loss and gradient; only the gradient, as large as the hidden states, is kept."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            loss = piece_loss(leaf)
        ctx.save_for_backward(*torch.autograd.grad(loss, leaf))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Scale the gradient by what the loss is multiplied with."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None
