"""Logits of a few positions at a time, so that memory never contains length × vocabulary numbers.

The base model computes the hidden states once. Then the language model's own forward runs on pieces of them, with its
base model replaced by one that returns them. So everything between hidden states and logits (soft caps, scales, norms)
is applied, without code for single families.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# On a CPU small enough that memory is reused instead of allocated again; on an accelerator large enough to fill it.
_PIECE_BYTES = {"cpu": 24 << 20}
_ACCELERATOR_BYTES = 256 << 20
_PROBE_LENGTH, _PROBE_PIECE = 16, 5
_TOLERANCE = 0.02


def positions_at_once(model: Any, piece: int | None = None) -> int:
    """Return the number of positions with logits in memory at once, in float32."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return piece or max(1, _PIECE_BYTES.get(model.device.type, _ACCELERATOR_BYTES) // (4 * vocabulary))


def gather_weights(model: Any) -> contextlib.AbstractContextManager[None]:
    """Gather the weights that DeepSpeed (ZeRO 3) loads as shards, for the duration of the context."""
    if not any(hasattr(weight, "ds_id") for weight in model.parameters()):
        return contextlib.nullcontext()
    zero: Any = sys.modules["deepspeed"].zero  # DeepSpeed is loaded, since it created the shards.
    gathered: contextlib.AbstractContextManager[None] = zero.GatheredParameters(list(model.parameters()))
    return gathered


def base_of(model: Any) -> Any:
    """Return the part that computes hidden states; the model itself if it has no such part."""
    # Gemma 3 in transformers 4 is its own base_model.
    return next((part for part in (model.base_model, getattr(model, "model", model)) if part is not model), model)


class Head:
    """The part of a language model between hidden states and logits, as in its forward when this is built.

    If the logits depend on more than the last hidden states, which a few tokens show, the head is not separate: `read`
    then returns the logits of the whole text, and a call returns those it is given.

    Args:
        model: A causal or masked language model of transformers; adapters may be inside already or come later.
        is_masked: Whether it predicts masked tokens, and has no cache.
    """

    def __init__(self, model: Any, *, is_masked: bool = False) -> None:
        self.model, self.forward = model, model.forward
        self.options: Mapping[str, Any] = {} if is_masked else {"use_cache": False}
        self.is_separate = True
        self.is_separate = self._gives_plain_logits()

    def read(self, ids: torch.Tensor, **given: Any) -> torch.Tensor:
        """Compute the last hidden states of tokens.

        Args:
            ids: (batch, length), without padding.
            given: Further arguments of the base model.

        Returns:
            (batch, length, width).
        """
        if not self.is_separate:
            logits: torch.Tensor = self.forward(input_ids=ids, **self.options, **given).logits
            return logits
        output = base_of(self.model)(input_ids=ids, **self.options, **given)
        self._kind = type(output)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits of hidden states, (batch, positions, vocabulary).

        Args:
            hidden: (batch, positions, width).
            ids: Their tokens, (batch, positions).
        """
        if not self.is_separate:
            return hidden
        with self._base_returns(self._kind(last_hidden_state=hidden)):
            logits: torch.Tensor = self.forward(input_ids=ids, **self.options).logits
        return logits

    def pieces(self, hidden: torch.Tensor, size: int) -> Iterator[slice]:
        """Cut positions into pieces, of hidden states of shape (batch, positions, width).

        If the head's weights are in shards, each call waits for the same call in all processes. Then there are as many
        pieces as the process with the most positions has, and the last ones may be empty.
        """
        most, last = hidden.shape[1], self.model.get_output_embeddings() if self.is_separate else torch.nn.Identity()
        if hasattr(last, "unshard") or any(hasattr(weight, "ds_id") for weight in last.parameters()):
            count = torch.tensor(most, device=hidden.device)
            torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
            most = int(count)
        return (slice(begin, begin + size) for begin in range(0, most, size))

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the weights between hidden states and logits: those outside the base, and the output embedding's."""
        inside = {id(parameter) for parameter in base_of(self.model).parameters()}
        yield from (parameter for parameter in self.model.parameters() if id(parameter) not in inside)
        yield from self.model.get_output_embeddings().parameters()

    @contextlib.contextmanager
    def _base_returns(self, output: Any) -> Iterator[None]:
        """Replace the forward of the base model, and of the decoder in it, which OPT's forward calls."""
        base, decoder = base_of(self.model), self.model.get_decoder()
        inner = [base, *(part for part in base.children() if part is decoder)]
        forwards = [part.__dict__.get("forward") for part in inner]
        for part in inner:
            part.forward = lambda *args, **kwargs: output
        try:
            yield
        finally:
            for part, forward in zip(inner, forwards, strict=True):
                if forward is None:
                    del part.forward
                else:
                    part.forward = forward

    @torch.no_grad()
    def _gives_plain_logits(self) -> bool:
        """Return whether pieces of a few tokens give the logits of the plain forward."""
        model = self.model
        if not hasattr(model, "base_model") or base_of(model) is model:
            return False
        size = model.config.get_text_config(decoder=True).vocab_size
        ids = (torch.arange(_PROBE_LENGTH, device=model.device)[None] * 11) % size
        was_training = model.training
        model.eval()
        try:
            with gather_weights(model):
                plain = self.forward(input_ids=ids, **self.options).logits.float()
                hidden = self.read(ids)
                parts = zip(*(torch.split(whole, _PROBE_PIECE, dim=1) for whole in (hidden, ids)), strict=True)
                replayed = torch.cat([self(*part).float() for part in parts], dim=1)
        except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError, KeyError):
            return False
        finally:
            model.train(was_training)
        if replayed.shape != plain.shape or not plain.isfinite().any():
            return False
        return torch.allclose(replayed, plain, atol=_TOLERANCE * float(plain[plain.isfinite()].std()))
