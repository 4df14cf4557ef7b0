"""The positions that a training sequence is given."""

import random
from collections.abc import Sequence


def pose_positions(length: int, target: int, rng: random.Random) -> list[int]:
    """Positions of a short window that jump once, so that over many windows every distance of a long one is seen.

    PoSE (arXiv 2309.10400, section 3.2) with two chunks: the first begins at 0, the second is moved by a skip that is
    uniform from 0 to target - length. Where the window is cut is uniform too.

    Args:
        length: Tokens in the window.
        target: Tokens in the context that is trained for; all positions are below it.
        rng: Decides cut and skip.

    Returns:
        `length` positions that rise.
    """
    cut = rng.randint(1, max(1, length - 1))
    skip = rng.randint(0, max(0, target - length))
    return [position if position < cut else position + skip for position in range(length)]


def restarting_positions(starts: Sequence[bool]) -> list[int]:
    """Positions that start again with each document, which also keeps attention inside it.

    Args:
        starts: For each token whether a document begins there.
    """
    positions: list[int] = []
    for is_start in starts:
        positions.append(0 if is_start or not positions else positions[-1] + 1)
    return positions
