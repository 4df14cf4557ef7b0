"""Retrieval as embedding models are used for: which of several documents has a sentence about a topic?"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import ClassVar

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Ask, Asked, Parts, Pieces, Prompt, lay_out
from ctxext.data.prose import endless
from ctxext.evaluate.tasks.passages import PassagePrompt, Passages


def _read_topics() -> dict[str, str]:
    """The sentence about each topic, from topics.txt."""
    text = resources.files("ctxext.data").joinpath("topics.txt").read_text(encoding="utf-8")
    return dict(line.split(": ", 1) for line in text.splitlines())


TOPICS: Mapping[str, str] = _read_topics()


_PASSAGES = 8
_MOST = len(TOPICS) // _PASSAGES
"""How many topics a document may have."""


@dataclass(frozen=True)
class TopicsPrompt(PassagePrompt):
    """One question about several documents.

    Attributes:
        queries: For each document the tokens of the question about it.
    """

    queries: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Topics(Passages):
    """Find by similarity the document with a sentence about a topic.

    Each document has a sentence about a topic of its own at every depth, and is asked for by each of them, so that few
    documents must be read. Eight questions in a row are about the same eight documents.
    """

    name: ClassVar[str] = "topics"
    questions_per_text: ClassVar[int] = _PASSAGES
    scored: ClassVar[str] = "The document with the sentence is the most similar one; chance is one in eight"
    description: ClassVar[str] = (
        "Eight documents of prose have a sentence about a topic of their own at each depth. The document that "
        'is asked for ("What is known about volcanoes?") must be the most similar one: cosine of the vectors by the '
        "model's own pooling. Texts that are longer than the model reads are cut. By chance one in eight is right."
    )
    shows: ClassVar[str] = "finding a document by one sentence in it"

    def pieces(self, rng: random.Random) -> Pieces:
        """The sentences and questions about all topics, in the order in which documents and depths take them."""
        topics = rng.sample(list(TOPICS), len(TOPICS))
        asks = tuple(Asked(f"What is known about {topic}?", "") for topic in topics)
        return Pieces("", iter(()), tuple(f" {TOPICS[topic]}" for topic in topics), "", "", asks=asks)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """How many tokens a document takes without any prose, at most."""
        longest = sorted(len(encoder.piece(fact)) for fact in pieces.needles)[-_MOST:]
        return len(encoder.start()) + len(encoder.end()) + sum(longest)

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """All documents for each depth, each of exactly `length` tokens."""
        end, count = encoder.end(), min(len(depths), _MOST)
        documents, queries = [], []
        for first in range(0, _PASSAGES * count, count):
            mine = slice(first, first + count)
            facts = [encoder.piece(fact) for fact in pieces.needles[mine]]
            parts = Parts(encoder.start(), facts, [Ask([], [], ())] * count)
            text = Pieces("", endless(self.text, random.Random(rng.getrandbits(64))), (), "", "")
            laid = lay_out(text, parts, encoder, length - len(end), depths, random.Random(rng.getrandbits(64)))
            documents.append([[*prompt.ids, *end] for prompt in laid])
            about = [(*encoder.document(asked.question), *end) for asked in pieces.asks[mine]]
            num_texts = -(-len(depths) // count)
            queries.append([about[number // num_texts] for number in range(len(depths))])
        return [
            TopicsPrompt(texts[0], 0, (), (), texts, asked[0], asked)
            for texts, asked in zip(zip(*documents, strict=True), zip(*queries, strict=True), strict=True)
        ]

    def asking(self, prompts: list[Prompt], number: int) -> list[Prompt]:
        """The question about one of the documents, which comes first."""
        asked: list[Prompt] = []
        for prompt in prompts:
            assert isinstance(prompt, TopicsPrompt)
            passages = (*prompt.passages[number:], *prompt.passages[:number])
            asked.append(replace(prompt, ids=passages[0], passages=passages, query=prompt.queries[number]))
        return asked


class TopicsAveraged(Topics):
    """The same questions; a long document is read in chunks, whose vectors are averaged."""

    name: ClassVar[str] = "topics-averaged"
    same_questions_as: ClassVar[str] = Topics.name
    long_texts: ClassVar[str] = "average"
    description: ClassVar[str] = (
        "The questions of topics. A document that is longer than the model reads is read in chunks of that length, and "
        "the mean of their vectors is its one vector: the rival of a longer table."
    )


class TopicsBestChunk(Topics):
    """The same questions; a long document is read in chunks, and the most similar counts."""

    name: ClassVar[str] = "topics-best-chunk"
    same_questions_as: ClassVar[str] = Topics.name
    long_texts: ClassVar[str] = "best"
    description: ClassVar[str] = (
        "The questions of topics. A document that is longer than the model reads is read in chunks of that length, and "
        "the most similar of their vectors counts."
    )
