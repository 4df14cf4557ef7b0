"""Logits of a few positions at a time, so that length × vocabulary logits are never in memory.

The base model computes the hidden states once. Then the forward of the language model runs on chunks of them, with its
base model replaced by one that returns the chunk. So everything between hidden states and logits (soft caps, scales,
norms) is applied, without code for single families.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Small on a CPU, so that memory is reused; large on an accelerator, to use it fully.
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
    zero: Any = sys.modules["deepspeed"].zero  # DeepSpeed is imported, because it created the shards.
    gathered: contextlib.AbstractContextManager[None] = zero.GatheredParameters(list(model.parameters()))
    return gathered


def base_of(model: Any) -> Any:
    """Return the submodule that computes hidden states, or the model itself if there is none."""
    return next((part for part in (model.base_model, getattr(model, "model", model)) if part is not model), model)


class Head:
    """The part of a language model between hidden states and logits, as in its present forward.

    A test with a few tokens shows whether logits depend only on the last hidden states. If not, the head is not
    separate: `read` returns the logits of the whole text, and a call returns its input.

    Args:
        model: A transformers causal or masked language model; adapters may be added before or after.
        is_masked: Whether it is a masked language model, without a cache.
    """

    def __init__(self, model: Any, *, is_masked: bool = False) -> None:
        self.model, self.forward = model, model.forward
        self.options: Mapping[str, Any] = {} if is_masked else {"use_cache": False}
        self.is_separate = True
        self.is_separate = self._gives_plain_logits()

    def read(self, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Compute the last hidden states of tokens.

        Args:
            ids: (batch, length), without padding.
            arguments: Further arguments of the base model.

        Returns:
            (batch, length, width).
        """
        if not self.is_separate:
            logits: torch.Tensor = self.forward(input_ids=ids, **{**self.options, **arguments}).logits
            return logits
        output = base_of(self.model)(input_ids=ids, **{**self.options, **arguments})
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
        # A slice of a row has a longer first stride. For torch it is a batch, for which it copies the head's weights.
        hidden = hidden.flatten(0, 1).reshape(hidden.shape)
        with self._base_returns(self._kind(last_hidden_state=hidden)):
            logits: torch.Tensor = self.forward(input_ids=ids, **self.options).logits
        return logits

    def pieces(self, hidden: torch.Tensor, size: int) -> Iterator[slice]:
        """Split the positions of hidden states (batch, positions, width) into chunks.

        If the head's weights are sharded, each call waits for all processes. Then the number of chunks is that of the
        process with the most positions, and the last ones may be empty.
        """
        most, last = hidden.shape[1], self.model.get_output_embeddings() if self.is_separate else torch.nn.Identity()
        if hasattr(last, "unshard") or any(hasattr(weight, "ds_id") for weight in last.parameters()):
            count = torch.tensor(most, device=hidden.device)
            torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MAX)
            most = int(count)
        return (slice(begin, begin + size) for begin in range(0, most, size))

    def measure_losses(self, hidden: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss in nats on a target after each position, with the logits of a few positions at a time.

        Args:
            hidden: (1, positions, width).
            ids: Their tokens, (1, positions).
            targets: (positions,).

        Returns:
            Losses in float32, (positions,).
        """
        # Into one tensor: a small one for each piece would lie where the logits of the piece were, and the next ones
        # would not fit there, so that the process would grow to length × vocabulary.
        losses = torch.zeros(len(targets), dtype=torch.float32, device=hidden.device)
        for piece in self.pieces(hidden, positions_at_once(self.model)):
            losses[piece] = torch.nn.functional.cross_entropy(
                self(hidden[:, piece], ids[:, piece])[0].float(), targets[piece], reduction="none"
            )
        return losses

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the weights between hidden states and logits, including the output embedding."""
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
        """Return whether chunks of a few tokens have the logits of the plain forward."""
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
