"""Retrieval by similarity, for encoders: which of several passages holds the fact that a question is about?"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Ask, Parts, Pieces, Prompt, lay_out
from ctxext.data.prose import endless, random_number
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
    """Find by similarity the passage with the fact that a question is about.

    All passages of a question have the same prose and different facts at the same depth, so that only the facts differ.

    Attributes:
        num_passages: The number of passages.
        phrasing: A key of `PHRASINGS`.
        num_digits: Length of each number.
        text: Prose around the facts, as units that are joined by spaces; empty for the prose of the package.
        long_texts: What happens to a passage that is longer than the model reads: "cut", or it is read in chunks, whose
            vectors are averaged ("average"), or of which the best counts ("best").
    """

    name: ClassVar[str] = "passages"
    kinds: ClassVar[tuple[str, ...]] = ("masked", "encoder")
    scored: ClassVar[str] = "The fact's passage is the most similar one by mean-pooled states; chance is one in eight"
    description: ClassVar[str] = (
        "Eight passages of the same prose tell one number each; the one that a question is about must be the most "
        "similar to it: cosine of the mean-pooled last hidden states. By chance one in eight is right."
    )
    shows: ClassVar[str] = "representing a sentence anywhere in a long text"
    long_texts: ClassVar[str] = "cut"
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
        """All passages for each depth, each of exactly `length` tokens."""
        seed, end = rng.getrandbits(64), encoder.end()
        passages = []
        for fact in pieces.needles:
            parts = Parts(encoder.start(), [encoder.piece(fact)], [Ask([], [], ())])
            text = Pieces("", endless(self.text, random.Random(seed)), (fact,), "", "")
            prompts = lay_out(text, parts, encoder, length - len(end), depths, random.Random(seed))
            passages.append([[*prompt.ids, *end] for prompt in prompts])
        query = (*encoder.document(pieces.question), *end)
        return [PassagePrompt(at_depth[0], 0, (), (), at_depth, query) for at_depth in zip(*passages, strict=True)]

    def score(
        self, loaded: "LoadedModel", questions: Sequence[Sequence[Prompt]], depths: Sequence[int], *, generate: bool
    ) -> Scores:
        """Whether the right passage is the most similar one."""
        from ctxext.evaluate.scoring.similarity import are_most_similar

        # In one call, as several questions may be about the same passages.
        prompts = [question[depth] for depth in depths for question in questions]
        asked = [(prompt.query, prompt.passages) for prompt in prompts]  # type: ignore[attr-defined]
        right = are_most_similar(loaded, asked, self.long_texts)
        for number, depth in enumerate(depths):
            yield depth, right[number * len(questions) : (number + 1) * len(questions)]
