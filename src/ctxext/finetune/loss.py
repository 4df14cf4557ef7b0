"""The loss of a long sequence without its logits: memory never holds length × vocabulary.

The base model computes the hidden states once. Then the causal language model's own forward is called on pieces of
them, with the base model standing in for itself: whatever a family does between hidden states and logits (soft caps,
scales, norms) it does here too. Each piece is checkpointed: its logits live only while they are used.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ctxext.errors import CtxextError

IGNORED = -100
_PIECE_BYTES = 64 << 20
_PROBE_LENGTH, _PROBE_PIECE = 16, 5
_TOLERANCE = 0.02


def use_chunked_loss(model: Any, piece: int | None = None) -> None:
    """Replace a causal language model's forward by one that returns the loss alone, computed piece by piece.

    It stays inside the model's call, so that whatever wraps the model (data parallel, FSDP, autocast) works unchanged.

    Args:
        model: A causal language model of transformers; adapters may be inside already or come later.
        piece: Positions at once, over all rows; by default as many as make 64 MiB of float32 logits.

    Raises:
        CtxextError: the model's forward cannot be taken apart like this.
    """
    if not _can_replay(model):
        raise CtxextError(
            f'The loss of "{type(model).__name__}" cannot be computed in pieces: its logits depend on more than the '
            "last hidden states."
        )
    own = model.forward
    vocabulary = model.config.get_text_config(decoder=True).vocab_size

    def forward(input_ids: Any, labels: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        given = {name: value for name, value in kwargs.items() if value is not None and name != "return_dict"}
        output = model.base_model(input_ids=input_ids, use_cache=False, **given)
        # The hidden state at a position predicts the next token; the last one predicts nothing.
        targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        at_once = piece or max(1, _PIECE_BYTES // (4 * vocabulary))
        size = max(1, at_once // len(input_ids))
        total = torch.zeros((), device=labels.device)
        for begin in range(0, input_ids.shape[1], size):
            rows = slice(begin, begin + size)
            total = total + checkpoint(
                _piece_loss,
                *(model, own, output.last_hidden_state[:, rows], input_ids[:, rows], targets[:, rows], type(output)),
                use_reentrant=False,
                preserve_rng_state=False,
            )
        count = (targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutputWithPast(loss=total / torch.as_tensor(count, device=total.device))

    model.forward = forward


def _piece_loss(model: Any, own: Any, hidden: Any, ids: Any, targets: Any, kind: type) -> torch.Tensor:
    """The summed loss of one piece, in float32."""
    with _standing_in(model.base_model, kind(last_hidden_state=hidden)):
        logits = own(input_ids=ids, use_cache=False).logits
    flat = logits.float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="sum")


@contextlib.contextmanager
def _standing_in(base: Any, output: Any) -> Iterator[None]:
    """While this lasts, the base model returns what it is told instead of computing."""
    own = base.__dict__.get("forward")
    base.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own


@torch.no_grad()
def _can_replay(model: Any) -> bool:
    """Try it on a few tokens: the pieces must give the logits of the plain forward."""
    base = getattr(model, "base_model", None)
    if base is None or base is model:
        return False
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_PROBE_LENGTH, device=model.device)[None] * 11 + 5) % size
    was_training, own = model.training, model.forward
    model.eval()
    pieces = []
    try:
        plain = own(input_ids=ids, use_cache=False).logits.float()
        output = base(input_ids=ids, use_cache=False)
        for begin in range(0, _PROBE_LENGTH, _PROBE_PIECE):
            rows = slice(begin, begin + _PROBE_PIECE)
            with _standing_in(base, type(output)(last_hidden_state=output.last_hidden_state[:, rows])):
                pieces.append(own(input_ids=ids[:, rows], use_cache=False).logits.float())
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError, KeyError):
        return False
    finally:
        model.train(was_training)
    replayed = torch.cat(pieces, dim=1)
    if replayed.shape != plain.shape or not plain.isfinite().any():
        return False
    close = (plain - replayed).abs() <= _TOLERANCE * plain[plain.isfinite()].std()
    return bool((close | (plain == replayed)).all())
