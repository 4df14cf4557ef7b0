"""The loss of every token of a long text, without logits of shape length × vocabulary.

The base model computes the hidden states of the whole text once. Then the forward of the causal language model runs on
pieces of them, with its base model replaced by one that returns them. So everything between hidden states and logits
(soft caps, scales, norms) is applied, without code for single families.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ctxext.evaluate.model import LoadedModel
from ctxext.evaluate.scoring.exact_match import check_finite
from ctxext.evaluate.scoring.prefix_cache import forget_longer_prompts

_MIN_BYTES = 4 << 20
_PROBE_LENGTH, _PROBE_PIECE = 6, 2
_TOLERANCE = 0.02
_NO_CACHE: Mapping[str, Any] = {"use_cache": False}
_KNOWN: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@torch.inference_mode()
def token_losses(loaded: LoadedModel, ids: torch.Tensor, *, last: int | None = None) -> torch.Tensor:
    """The loss in nats of predicting each token from those before it.

    Args:
        loaded: The model.
        ids: Tokens of shape (batch, length), without padding.
        last: How many of the last tokens to return the loss of; by default all but the first.

    Returns:
        Losses in float64 on the CPU, of shape (batch, last).
    """
    forget_longer_prompts(loaded.model)
    length = ids.shape[1]
    begin = length - 1 - (last or length - 1)
    if not _can_replay(loaded):
        logits = loaded.model(input_ids=ids, use_cache=False).logits[:, begin : length - 1]
        return _checked(loaded, _losses(logits, ids[:, begin + 1 :]))
    output = _base_of(loaded.model)(input_ids=ids, use_cache=False)
    size = _piece_size(loaded.model, ids)
    losses = []
    with _replayed(loaded.model) as head:
        for start in range(begin, length - 1, size):
            end = min(start + size, length - 1)
            losses.append(_losses(head(output, ids, start, end), ids[:, start + 1 : end + 1]))
    return _checked(loaded, torch.cat(losses, dim=1))


def logits_at(loaded: LoadedModel, ids: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The logits of some tokens; those of all tokens are computed first if the head cannot run separately.

    Args:
        loaded: The model.
        ids: Tokens of shape (texts, length).
        chosen: A mask of the same shape.

    Returns:
        Logits of shape (chosen tokens, vocabulary).
    """
    plainly = _plainly(loaded)
    if not _can_replay(loaded):
        logits: torch.Tensor = loaded.model(input_ids=ids, **plainly).logits[chosen]
        return logits
    output = _base_of(loaded.model)(input_ids=ids, **plainly)
    few = type(output)(last_hidden_state=output.last_hidden_state[chosen][None])
    with _replayed(loaded.model, plainly) as head:
        return head(few, ids[chosen][None], 0, int(chosen.sum()))[0]


def _checked(loaded: LoadedModel, losses: torch.Tensor) -> torch.Tensor:
    check_finite(loaded.name, losses)
    return losses


def _losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    picked = logits.gather(-1, targets[..., None])[..., 0]
    return (logits.logsumexp(-1) - picked).double().cpu()


def _piece_size(model: Any, ids: torch.Tensor) -> int:
    """How many positions run at once: their logits take no more memory than the hidden states of the text."""
    config = model.config.get_text_config(decoder=True)
    hidden_bytes = ids.numel() * int(getattr(config, "hidden_size", 1024)) * model.dtype.itemsize
    return int(max(1, max(_MIN_BYTES, hidden_bytes) // (4 * ids.shape[0] * config.vocab_size)))


class _Head:
    """From hidden states to logits, by the forward of the causal language model."""

    def __init__(self, model: Any, plainly: Mapping[str, Any]) -> None:
        self.model, self.plainly = model, plainly
        self.output: Any = None

    def __call__(self, output: Any, ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """The logits of positions `start` to `end` of a base model's output."""
        self.output = type(output)({**output, "last_hidden_state": output.last_hidden_state[:, start:end]})
        logits: torch.Tensor = self.model(input_ids=ids[:, start:end], **self.plainly).logits
        return logits


@contextlib.contextmanager
def _replayed(model: Any, plainly: Mapping[str, Any] = _NO_CACHE) -> Iterator[_Head]:
    """Replace the forward of the base model inside the model: it returns the output that the head holds."""
    head, base = _Head(model, plainly), _base_of(model)
    forward = base.__dict__.get("forward")
    base.forward = lambda *args, **kwargs: head.output
    try:
        yield head
    finally:
        if forward is None:
            del base.forward
        else:
            base.forward = forward


def _base_of(model: Any) -> Any:
    """The part that computes hidden states; the model itself if it has no such part."""
    # Gemma 3 in transformers 4 is its own base_model.
    return next((base for base in (model.base_model, getattr(model, "model", model)) if base is not model), model)


def _can_replay(loaded: LoadedModel) -> bool:
    """Whether pieces give the same losses as the plain forward; tried once per model."""
    if loaded.model not in _KNOWN:
        _KNOWN[loaded.model] = _replay_works(loaded.model, _plainly(loaded))
    return _KNOWN[loaded.model]


def _plainly(loaded: LoadedModel) -> Mapping[str, Any]:
    """Arguments of every call: encoders have no cache."""
    return _NO_CACHE if loaded.kind == "causal" else {}


def _replay_works(model: Any, plainly: Mapping[str, Any]) -> bool:
    base = _base_of(model)
    if base is model:
        return False
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(_PROBE_LENGTH, device=model.device)[None] * 11) % size
    targets = ids.flip(1)  # An encoder reads the tokens themselves and is sure of them.
    try:
        plain = _losses(model(input_ids=ids, **plainly).logits, targets)
        output = base(input_ids=ids, **plainly)
        with _replayed(model, plainly) as head:
            starts = range(0, _PROBE_LENGTH, _PROBE_PIECE)
            pieces = [head(output, ids, start, start + _PROBE_PIECE) for start in starts]
            replayed = [
                _losses(logits, targets[:, at : at + _PROBE_PIECE]) for at, logits in zip(starts, pieces, strict=True)
            ]
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError, KeyError):
        return False
    return bool(torch.allclose(torch.cat(replayed, dim=1), plain, rtol=_TOLERANCE, atol=_TOLERANCE))
