"""Prompts that begin alike, as a tree: what they have in common is run once."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Branch:
    """Tokens that some prompts have in common, and what follows.

    Attributes:
        start: The first of these tokens.
        end: Behind the last of them.
        prompts: Whose tokens they are.
        children: How it goes on; none where a single prompt ends here.
    """

    start: int
    end: int
    prompts: list[int]
    children: "list[Branch]" = field(default_factory=list)


def grow(ids: torch.Tensor, num_own: int) -> Branch:
    """The tree of some prompts.

    Args:
        ids: Tokens of shape (batch, prompts, length). A batch runs together: its rows share what all of them share.
        num_own: So many tokens at the end belong to each prompt alone.
    """
    count, length = ids.shape[1], ids.shape[2]
    common = [[_common(ids[:, i], ids[:, j], length - num_own) for j in range(count)] for i in range(count)]
    return _grow(common, list(range(count)), 0, length)


def _grow(common: list[list[int]], prompts: list[int], start: int, length: int) -> Branch:
    first = prompts[0]
    if len(prompts) == 1:
        return Branch(start, length, prompts)
    end = min(common[first][other] for other in prompts[1:])
    groups: list[list[int]] = []
    for prompt in prompts:
        own = next((group for group in groups if common[group[0]][prompt] > end), None)
        if own is None:
            groups.append([prompt])
        else:
            own.append(prompt)
    return Branch(start, end, prompts, [_grow(common, group, end, length) for group in groups])


def _common(ours: torch.Tensor, theirs: torch.Tensor, most: int) -> int:
    """How many of the first tokens are the same in every row, at most `most`."""
    differs = (ours != theirs).any(0).nonzero()
    return min(most, int(differs[0])) if len(differs) else most
