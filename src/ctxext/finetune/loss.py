"""The loss of a long sequence without its logits: memory never holds length × vocabulary.

The base model computes the hidden states once. Then the causal language model's own forward is called on pieces of
them, with the base model standing in for itself: whatever a family does between hidden states and logits (soft caps,
scales, norms) it does here too. Where nothing is trained behind the hidden states, a piece's gradient is computed at
once, while its logits are there; otherwise each piece is checkpointed.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from ctxext.errors import CtxextError
from ctxext.finetune.comparison import (
    Comparison,
    Divergence,
    Head,
    NextToken,
    Source,
)

IGNORED = -100
NO_CACHE: Mapping[str, Any] = {"use_cache": False}
# On a CPU small enough that memory is reused instead of asked for again; on an accelerator large enough to fill it.
_PIECE_BYTES = {"cpu": 24 << 20}
_ACCELERATOR_BYTES = 256 << 20
_PROBE_LENGTH, _PROBE_PIECE = 16, 5
_TOLERANCE = 0.02


class Parts(Protocol):
    """What adds up the loss of each part of the positions."""

    sums: torch.Tensor

    def add(self, part: int, total: torch.Tensor, count: int) -> None:
        """The summed loss of so many tokens that lie in a part."""
        ...


def use_chunked_loss(
    model: Any,
    piece: int | None = None,
    source: Source | None = None,
    by_position: Parts | None = None,
    *,
    tokens_per_step: int | None = None,
    is_masked: bool = False,
    offloads: bool = False,
) -> Any:
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
        offloads: Whether what checkpointing keeps for the way back waits in the machine's memory.

    Returns:
        The model's forward, as it was before.
    """
    plainly: Mapping[str, Any] = {} if is_masked else NO_CACHE
    if not _can_replay(model, plainly):
        raise CtxextError(
            f'The loss of "{type(model).__name__}" cannot be computed in pieces: its logits depend on more than the '
            "last hidden states."
        )
    stock = model.forward

    def forward(
        input_ids: Any,
        labels: Any,
        num_items_in_batch: Any = None,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        given = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        # The hidden state at a position predicts the next token; the last one predicts nothing. Where a sequence is
        # spread over devices its neighbour is elsewhere, and the Trainer gives labels that are shifted already.
        targets = labels if is_masked else shift_labels
        if targets is None:
            targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        kept = targets != IGNORED
        size = positions_at_once(model, labels.device, piece)
        is_frozen = not any(parameter.requires_grad for parameter in _head_parameters(model))

        # Without checkpointing this would move the weights too, as all that backward needs is kept through it.
        moved = torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else contextlib.nullcontext()
        with moved:
            output = model.base_model(input_ids=input_ids, **plainly, **given)

        def summed(hidden: torch.Tensor, ids: torch.Tensor, compare: Callable[[slice], Comparison]) -> torch.Tensor:
            total = hidden[:, :0].sum()  # Nothing yet, but with a gradient, for a batch that learns nothing.
            for begin in range(0, _most(model, hidden.shape[1], hidden.device), size):
                rows = slice(begin, begin + size)
                head = functools.partial(logits_of, model, stock, type(output), ids[:, rows], plainly=plainly)
                if is_frozen:
                    total = total + _EagerLoss.apply(hidden[:, rows], compare(rows), head)  # type: ignore[no-untyped-call]
                else:
                    total = total + checkpoint(
                        _piece_loss, hidden[:, rows], compare(rows), head, use_reentrant=False, preserve_rng_state=False
                    )
            return total

        def loss_of(chosen: torch.Tensor) -> torch.Tensor:
            # Only positions that are learned need logits; in a row, as the head sees each by itself.
            wanted = targets[chosen]
            hidden, ids = output.last_hidden_state[chosen][None], input_ids[chosen][None]
            return summed(hidden, ids, lambda rows: NextToken(wanted[rows]))

        total = loss_of(kept) if by_position is None or model.training else _loss_by_part(kept, by_position, loss_of)
        count = kept.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = total / torch.as_tensor(count, device=total.device)
        if source is not None and model.training and source.knows(given["position_ids"]):
            said, head = source.read(input_ids, given)
            hidden, ids = output.last_hidden_state.flatten(0, 1)[None], input_ids.flatten()[None]
            total = summed(hidden, ids, lambda rows: Divergence(said[:, rows], head))
            # What many processes and batches give to one step adds up to a mean over its tokens.
            loss = loss + source.weight * total / (tokens_per_step or ids.numel())
        return CausalLMOutputWithPast(loss=loss)

    model.forward = forward
    return stock


def _most(model: Any, count: int, device: torch.device) -> int:
    """How many positions the process with the most has, where the head is in shards; its last pieces may be empty.

    Then each call of the head waits for the same call in all processes.
    """
    head = model.get_output_embeddings()
    if not (hasattr(head, "unshard") or any(hasattr(weight, "ds_id") for weight in head.parameters())):
        return count
    most = torch.tensor(count, device=device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)


def _loss_by_part(
    kept: torch.Tensor, by_position: Parts, loss_of: Callable[[torch.Tensor], torch.Tensor]
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


def positions_at_once(model: Any, device: torch.device, piece: int | None) -> int:
    """Of how many positions the logits are there at once."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return piece or max(1, _PIECE_BYTES.get(device.type, _ACCELERATOR_BYTES) // (4 * vocabulary))


def _head_parameters(model: Any) -> Iterator[torch.nn.Parameter]:
    """What lies between hidden states and logits: all that is not in the base model, and the output embedding."""
    inside = {id(parameter) for parameter in model.base_model.parameters()}
    yield from (parameter for parameter in model.parameters() if id(parameter) not in inside)
    yield from model.get_output_embeddings().parameters()


def logits_of(
    model: Any, forward: Any, kind: type, ids: torch.Tensor, hidden: torch.Tensor, plainly: Mapping[str, Any] = NO_CACHE
) -> torch.Tensor:
    """The logits of some hidden states, by the model's forward; encoders know no cache."""
    with _standing_in(model, kind(last_hidden_state=hidden)):
        logits: torch.Tensor = forward(input_ids=ids, **plainly).logits
    return logits


def _piece_loss(hidden: torch.Tensor, comparison: Comparison, head: Head) -> torch.Tensor:
    """The summed loss of one piece, in float32."""
    return comparison.loss(head(hidden).float().flatten(0, 1))


class _EagerLoss(torch.autograd.Function):
    """The summed loss of one piece, its gradient computed in the same breath."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, comparison: Comparison, head: Head) -> torch.Tensor:
        """Compute loss and gradient; only the gradient, as large as the hidden states, is kept."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = head(leaf)
        loss, slope = comparison.loss_and_slope(logits.detach().float().flatten(0, 1))
        (gradient,) = torch.autograd.grad(logits, leaf, slope.view_as(logits).to(logits.dtype))
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Scale the gradient by what the loss is multiplied with."""
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None


@contextlib.contextmanager
def _standing_in(model: Any, output: Any) -> Iterator[None]:
    """Inside this context the base model returns a given output instead of computing; OPT calls the decoder in it."""
    inner = [model.base_model]
    # What ModernBERT names its decoder makes the logits.
    others = (None, model, model.base_model, model.get_output_embeddings())
    if (decoder := model.get_decoder()) not in others:
        inner.append(decoder)
    forwards = [module.__dict__.get("forward") for module in inner]
    for module in inner:
        module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        for module, forward in zip(inner, forwards, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


@torch.no_grad()
def _can_replay(model: Any, plainly: Mapping[str, Any]) -> bool:
    """Try it on a few tokens: the pieces must give the logits of the plain forward."""
    base = getattr(model, "base_model", None)
    if base is None or base is model:
        return False
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_PROBE_LENGTH, device=model.device)[None] * 11) % size
    was_training, forward = model.training, model.forward
    model.eval()
    try:
        with whole_weights(model):
            plain = forward(input_ids=ids, **plainly).logits.float()
            replayed = _replayed(model, forward, ids, plainly)
    finally:
        model.train(was_training)
    if replayed is None or replayed.shape != plain.shape or not plain.isfinite().any():
        return False
    return torch.allclose(replayed, plain, atol=_TOLERANCE * float(plain[plain.isfinite()].std()))


def whole_weights(model: Any) -> contextlib.AbstractContextManager[None]:
    """Inside this context weights are whole that DeepSpeed (ZeRO 3) loads as shards."""
    if not any(hasattr(weight, "ds_id") for weight in model.parameters()):
        return contextlib.nullcontext()
    zero: Any = sys.modules["deepspeed"].zero  # Whoever made the shards has loaded it.
    gathered: contextlib.AbstractContextManager[None] = zero.GatheredParameters(list(model.parameters()))
    return gathered


def _replayed(model: Any, forward: Any, ids: torch.Tensor, plainly: Mapping[str, Any]) -> torch.Tensor | None:
    """The logits in pieces; None where the forward stops for lack of what it did not get."""
    output, pieces = model.base_model(input_ids=ids, **plainly), []
    try:
        for begin in range(0, _PROBE_LENGTH, _PROBE_PIECE):
            rows = slice(begin, begin + _PROBE_PIECE)
            with _standing_in(model, type(output)(last_hidden_state=output.last_hidden_state[:, rows])):
                pieces.append(forward(input_ids=ids[:, rows], **plainly).logits.float())
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError, KeyError):
        return None
    return torch.cat(pieces, dim=1)
