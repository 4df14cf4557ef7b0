"""Which of several passages holds a fact? What an encoder can be asked: how alike a question and a passage are."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.data.haystack import endless
from ctxext.data.prompt import Ask, Parts, Pieces, Prompt, lay_out
from ctxext.data.prose import random_number
from ctxext.evaluate.tasks.base import RetrievalTask, Scores
from ctxext.evaluate.tasks.needle import PHRASINGS

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel


@dataclass(frozen=True)
class PassagePrompt(Prompt):
    """One question about several passages.

    Attributes:
        passages: Their tokens, all of the same length; the first holds the fact.
        query: The tokens of the question.
    """

    passages: tuple[list[int], ...] = ()
    query: tuple[int, ...] = ()


@dataclass(frozen=True)
class Passages(RetrievalTask):
    """Tell by similarity which passage holds the fact that a question is about.

    All passages of a question have the same prose and each a fact of its own at the same depth, so that nothing but the
    fact tells them apart.

    Attributes:
        num_passages: How many there are to choose from.
        phrasing: A key of `PHRASINGS`.
        num_digits: Length of each number.
        text: Prose around the facts, as units that are joined by spaces; empty for the prose of the package.
    """

    name: ClassVar[str] = "passages"
    kinds: ClassVar[tuple[str, ...]] = ("masked", "encoder")
    scored: ClassVar[str] = "The fact's passage is the most similar one by mean-pooled states; chance is one in eight"
    description: ClassVar[str] = (
        "Eight passages of the same prose tell one number each; the one that a question is about must be the most "
        "similar to it: cosine of the mean-pooled last hidden states. By chance one in eight is right."
    )
    shows: ClassVar[str] = "representing a sentence anywhere in a long text"
    num_passages: int = 8
    phrasing: str = "magic"
    num_digits: int = 5
    text: tuple[str, ...] = ()

    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question: as needles the facts of all passages."""
        phrasing = PHRASINGS[self.phrasing]
        keys = prose.object_names(rng, self.num_passages)
        facts = [phrasing.fact.format(key=key, value=random_number(rng, self.num_digits)) for key in keys]
        question = phrasing.question.format(key=keys[0]).partition("?")[0] + "?"
        return Pieces("", iter(()), tuple(f" {fact}" for fact in facts), question, "")

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """How many tokens the largest passage takes without any prose."""
        around = len(encoder.start()) + len(encoder.end())
        return around + max(len(encoder.piece(fact)) for fact in pieces.needles)

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """For each depth all passages, every one of exactly `length` tokens."""
        seed, end = rng.getrandbits(64), encoder.end()
        made = []
        for fact in pieces.needles:
            parts = Parts(encoder.start(), [encoder.piece(fact)], [Ask([], [], "")])
            own = Pieces("", endless(self.text, random.Random(seed)), (fact,), "", "")
            found = lay_out(own, parts, encoder, length - len(end), depths, random.Random(seed))
            made.append([[*prompt.ids, *end] for prompt in found])
        query = (*encoder.document(pieces.question), *end)
        return [PassagePrompt(passages[0], 0, (), (), passages, query) for passages in zip(*made, strict=True)]

    def score(
        self, loaded: "LoadedModel", questions: Sequence[Sequence[Prompt]], depths: Sequence[int], *, generate: bool
    ) -> Scores:
        """Whether the right passage is the most similar one."""
        from ctxext.evaluate.scoring.similarity import are_most_similar

        for depth in depths:
            asked = [question[depth] for question in questions]
            yield depth, are_most_similar(loaded, [(one.query, one.passages) for one in asked])  # type: ignore[attr-defined]
