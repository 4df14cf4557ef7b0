"""Latent association: a needle and a question without common content words."""

import random
from dataclasses import dataclass
from typing import ClassVar

from ctxext.data import prose
from ctxext.data.prompt import Asked, Pieces
from ctxext.data.prose import endless
from ctxext.evaluate.tasks.base import RetrievalTask

OPENING = "The following text mentions some people in passing. Remember who they are; you will be asked about one.\n"
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


@dataclass(frozen=True)
class Association(RetrievalTask):
    """Find a sentence that has no word in common with the question, so that only knowledge connects them.

    Attributes:
        num_needles: The number of people in the text; the question is about the first.
        text: Prose to hide them in, as sentences; empty for the prose of the package.
    """

    name: ClassVar[str] = "association"
    description: ClassVar[str] = (
        "A person is told about in a long text, and asked for in words that the text does not use."
    )
    shows: ClassVar[str] = "finding what is not asked for word by word"
    num_needles: int = 4
    text: tuple[str, ...] = ()

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question."""
        chosen = rng.sample(PAIRS, self.num_needles)
        first = rng.sample(prose.FIRST_NAMES, self.num_needles)
        people = [f"{name} {rng.choice(prose.LAST_NAMES)}" for name in first]
        asks = tuple(
            Asked(f"\n{question} The full name of that person is", f" {person}")
            for (_, question), person in zip(chosen, people, strict=True)
        )
        return Pieces(
            opening=OPENING,
            haystack=endless(self.text, random.Random(rng.getrandbits(64))),
            needles=tuple(" " + fact.format(person=person) for (fact, _), person in zip(chosen, people, strict=True)),
            question=asks[0][0],
            answer=asks[0][1],
            asks=asks,
        )
