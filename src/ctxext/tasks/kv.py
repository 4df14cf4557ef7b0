"""Key-value retrieval: one record of a large JSON object, as in Lost in the Middle."""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from typing_extensions import override

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, QuestionText
from ctxext.data.prose import random_number, random_uuid
from ctxext.tasks.base import SeveralNeedles, leaves_room

OPENING = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"


@dataclass(frozen=True, kw_only=True)
class KeyValue(SeveralNeedles):
    """Find the value of a key in a JSON object of random keys and values.

    The wording is that of Lost in the Middle, https://arxiv.org/abs/2307.03172. The first and last record belong to the
    opening and the question, so that the object is valid JSON with any number of records between them.

    Attributes:
        ids: "uuid" as in the paper, or "number" for small models and contexts: numbers of three digits, and longer keys
            after half of those are used.
        num_needles: Number of records with a question; it is 1 in a text that is too short.
    """

    easier: ClassVar[str] = "--kv-ids number or --task needle"
    name: str = "kv"
    description: str = "The text is a JSON object of random keys and values. The answer is the value of one key."
    shows: str = "looking a key up in a long JSON object"
    options: tuple[str, ...] = ("num_needles", "kv_ids", "repeat_question")
    ids: str = "uuid"
    num_needles: int = 1

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        records = self.records(random.Random(rng.getrandbits(64)))
        first, last = next(records), next(records)
        needles = [next(records) for _ in range(self.num_needles)]
        questions = tuple(
            QuestionText(f' {_format_record(*last)}}}\n\nKey: "{key}"\nCorresponding value:', f' "{value}')
            for key, value in needles
        )
        return Pieces(
            opening=OPENING + "{" + _format_record(*first) + ",\n",
            haystack=(f" {_format_record(*record)},\n" for record in records),
            needles=tuple(f" {_format_record(*needle)},\n" for needle in needles),
            questions=questions,
            padding="\n",
            bare_question=f'Key: "{needles[0][0]}"',
        )

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task with one question per text if several would leave no room for a haystack."""
        return self if leaves_room(self, encoder, length) else dataclasses.replace(self, num_needles=1)

    @property
    def advice(self) -> str:
        """The hint about numbers, which are shorter than uuids."""
        return "Or use short ids: --kv-ids number." if self.ids == "uuid" else ""

    def records(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        """Yield endless records with different keys."""
        used: set[str] = set()
        num_digits = 3
        while True:
            if self.ids == "uuid":
                yield random_uuid(rng), random_uuid(rng)
                continue
            if len(used) * 2 >= 9 * 10 ** (num_digits - 1):
                num_digits += 1
            key = random_number(rng, num_digits)
            if key not in used:
                used.add(key)
                yield key, random_number(rng, 3)


def _format_record(key: str, value: str) -> str:
    return f'"{key}": "{value}"'
