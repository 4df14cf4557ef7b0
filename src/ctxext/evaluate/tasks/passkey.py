"""Pass key retrieval: a number stated once in repeated filler."""

import random
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

from ctxext.data.prompt import Pieces
from ctxext.data.prose import random_number
from ctxext.evaluate.tasks.base import RetrievalTask

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class PassKey(RetrievalTask):
    """Find a number stated once in a text that repeats itself.

    The phrasing of Mohtashami and Jaggi, https://arxiv.org/abs/2305.16300.

    Attributes:
        num_digits: Length of the pass key.
    """

    name: ClassVar[str] = "passkey"
    description: ClassVar[str] = "A pass key stands in a text that repeats itself; it is asked for at the end."
    shows: ClassVar[str] = "finding a pass key in a text that repeats itself"
    num_digits: int = 5

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        key = random_number(rng, self.num_digits)
        return Pieces(
            opening=OPENING,
            haystack=repeat(FILLER),
            needles=(f" The pass key is {key}. Remember it. {key} is the pass key.",),
            question="\nWhat is the pass key? The pass key is",
            answer=f" {key}",
        )
