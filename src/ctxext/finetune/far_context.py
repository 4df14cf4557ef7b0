"""What a model says of a text's tokens from the last part of what came before each, window after window (LongCE).

As the authors' code reads it (arXiv 2410.23771; `finetune/finetune.py` of PKU-ML/LongPPL): windows of a context and a
quarter move by that quarter, whose tokens are judged, so each is read after one to one and a quarter contexts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def num_windows(length: int, context: int) -> int:
    """How many windows there are in a text; the first, which begins with the text, says nothing new and is not read."""
    return max(0, -(-(length - context) // _step(context)) - 1)


def window_length(context: int) -> int:
    """Tokens of a window."""
    return context + _step(context)


def _step(context: int) -> int:
    return max(1, context // 4)


@torch.no_grad()
def _read(base: Any, ids: torch.Tensor, given: Mapping[str, Any], window: slice) -> Any:
    """The model's output on a part of the text, as a text of its own."""
    part = {name: value[:, window] if name == "attention_mask" else value for name, value in given.items()}
    if (positions := given.get("position_ids")) is not None:
        # As many as there are tokens, from where the text's begin: without the skips of --positions pose.
        places = torch.arange(ids[:, window].shape[1], device=positions.device)
        part["position_ids"] = positions[:, :1] + places
    return base(input_ids=ids[:, window], **part)


def read_windows(base: Any, ids: torch.Tensor, given: Mapping[str, Any], context: int) -> Iterator[tuple[slice, Any]]:
    """Read a text window by window, without gradients.

    Args:
        base: Gives hidden states.
        ids: The text, (rows, length).
        given: What `base` is given beside it.
        context: Tokens of the short context.

    Yields:
        The positions in the text that predict tokens after just the short context, and the output whose
        `last_hidden_state` (rows, positions, width) is theirs.
    """
    for number in range(num_windows(ids.shape[1], context)):
        begin = (number + 1) * _step(context)
        window = slice(begin, min(begin + window_length(context), ids.shape[1]))
        output = _read(base, ids, given, window)
        # The state before a token predicts it; what follows the last token of the window is the next window's.
        output.last_hidden_state = output.last_hidden_state[:, context - 1 : -1]
        yield slice(begin + context - 1, window.stop - 1), output
