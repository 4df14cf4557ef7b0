"""A fact hidden in a long text: a pass key in repeated filler, numbered things and people in prose."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

from typing_extensions import override

from ctxext.data import prose
from ctxext.data.prompt import Pieces, QuestionText
from ctxext.data.prose import random_number, stream_sentences
from ctxext.tasks.base import RetrievalTask, SeveralNeedles

OPENING = (
    "Some special magic numbers are hidden in the following text. Memorize them. "
    "You will be asked about them afterwards.\n"
)


@dataclass(frozen=True)
class Phrasing:
    """The wording of a fact and its question, with `{key}` for the thing and `{value}` for its number."""

    fact: str
    question: str


PHRASINGS: dict[str, Phrasing] = {
    "magic": Phrasing(
        "The special magic number for {key} is: {value}.",
        "What is the special magic number for {key}? The special magic number for {key} is:",
    ),
    "code": Phrasing(
        "The code written on the {key} is {value}.",
        "Which code is written on the {key}? The code written on the {key} is",
    ),
    "opens": Phrasing(
        "Remember that the {key} is opened with {value}.",
        "What is the {key} opened with? The {key} is opened with",
    ),
    "number": Phrasing("The number of the {key} is {value}.", "What is the number of the {key}? The answer is"),
}


@dataclass(frozen=True, kw_only=True)
class Needle(SeveralNeedles):
    """Find one sentence in prose among others of the same form.

    Attributes:
        num_needles: Number of facts in the text; the question is about the first, the others are distractors.
        phrasing: A key of `PHRASINGS`, or "any" for a random one per question.
        num_digits: Number of digits of each number.
        filler: "prose", or "same" for sentences in the form of the facts, which are hard for large models of 2026
            (https://arxiv.org/abs/2605.23170).
    """

    easier: ClassVar[str] = "--task passkey"
    name: str = "needle"
    description: str = "A sentence in a long text states a number. The question at the end is about that number."
    shows: str = "finding a sentence in a long text"
    options: tuple[str, ...] = ("num_needles", "filler", "haystack", "repeat_question")
    num_needles: int = 4
    phrasing: str = "magic"
    num_digits: int = 5
    filler: str = "prose"

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        phrasing = PHRASINGS[rng.choice(list(PHRASINGS)) if self.phrasing == "any" else self.phrasing]
        keys = prose.object_names(rng, self.num_needles)
        values = [random_number(rng, self.num_digits) for _ in keys]
        return Pieces(
            opening=OPENING,
            haystack=self._draw_haystack(phrasing, keys, random.Random(rng.getrandbits(64))),
            needles=tuple(
                " " + phrasing.fact.format(key=key, value=value) for key, value in zip(keys, values, strict=True)
            ),
            questions=tuple(
                QuestionText("\n" + phrasing.question.format(key=key), f" {value}")
                for key, value in zip(keys, values, strict=True)
            ),
        )

    def _draw_haystack(self, phrasing: Phrasing, keys: Sequence[str], rng: random.Random) -> Iterator[str]:
        if self.filler == "prose":
            yield from stream_sentences(self.text, rng)
        for key in prose.different_names(rng, prose.object_name, len(prose.ADJECTIVES) * len(prose.OBJECTS)):
            if not key.startswith(tuple(keys)):
                yield " " + phrasing.fact.format(key=key, value=random_number(rng, self.num_digits))


PASSKEY_OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True, kw_only=True)
class PassKey(RetrievalTask):
    """Find a number in a repetitive text.

    The wording is that of Mohtashami and Jaggi, https://arxiv.org/abs/2305.16300.

    Attributes:
        num_digits: Number of digits of the pass key.
    """

    easier: ClassVar[str] = ""
    name: str = "passkey"
    description: str = "A repetitive text contains a pass key. The question at the end is about the pass key."
    shows: str = "finding a pass key in a repetitive text"
    num_digits: int = 5

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        key = random_number(rng, self.num_digits)
        return Pieces(
            opening=PASSKEY_OPENING,
            haystack=repeat(FILLER),
            needles=(f" The pass key is {key}. Remember it. {key} is the pass key.",),
            questions=(QuestionText("\nWhat is the pass key? The pass key is", f" {key}"),),
        )


_ASSOCIATION_OPENING = (
    "The following text mentions some people in passing. Remember who they are; you will be asked about one.\n"
)
PAIRS = (
    ("{person} plays the cello in an orchestra.", "Who is a musician?"),
    ("{person} keeps a parrot that can whistle.", "Who owns a bird?"),
    ("{person} eats neither meat nor fish.", "Who is a vegetarian?"),
    ("{person} was born within sight of the Eiffel Tower.", "Who comes from Paris?"),
    ("{person} cuts hair and trims beards all day.", "Who works as a barber?"),
    ("{person} puts out fires and rescues cats from trees.", "Who works in the emergency services?"),
    ("{person} cannot see without thick glasses.", "Who has poor eyesight?"),
    ("{person} has climbed Everest twice.", "Who is a mountaineer?"),
    ("{person} removes bad teeth and fills the others.", "Who works as a dentist?"),
    ("{person} scored the winning goal in the cup final.", "Who is a football player?"),
    ("{person} has twelve hives behind the house.", "Who keeps bees?"),
    ("{person} flies a jet across the Atlantic every week.", "Who works as a pilot?"),
    ("{person} sleeps all day and guards a factory at night.", "Who works as a watchman?"),
    ("{person} wrote three novels and a book of poems.", "Who is an author?"),
    ("{person} cannot walk and uses a wheelchair.", "Who has a disability?"),
    ("{person} owes the bank a large sum.", "Who is in debt?"),
)
"""Facts and their questions."""


@dataclass(frozen=True, kw_only=True)
class Association(RetrievalTask):
    """Find a sentence that shares no word with the question; only world knowledge connects them.

    Attributes:
        num_people: Number of people in the text; the question is about the first.
    """

    name: str = "association"
    description: str = "A sentence in a long text describes a person. The question uses other words than the text."
    shows: str = "finding a fact that the question words differently"
    options: tuple[str, ...] = ("haystack", "repeat_question")
    num_people: int = 4

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        chosen = rng.sample(PAIRS, self.num_people)
        first = rng.sample(prose.FIRST_NAMES, self.num_people)
        people = [f"{name} {rng.choice(prose.LAST_NAMES)}" for name in first]
        questions = tuple(
            QuestionText(f"\n{question} The full name of that person is", f" {person}")
            for (_, question), person in zip(chosen, people, strict=True)
        )
        return Pieces(
            opening=_ASSOCIATION_OPENING,
            haystack=stream_sentences(self.text, random.Random(rng.getrandbits(64))),
            needles=tuple(" " + fact.format(person=person) for (fact, _), person in zip(chosen, people, strict=True)),
            questions=questions,
        )
