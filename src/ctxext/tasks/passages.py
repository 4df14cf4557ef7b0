"""Retrieval by similarity, the use of embedding models: find the passage that answers a question."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, ClassVar

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.data.prompt import EncodedQuestion, Parts, Pieces, Prompt, QuestionText, lay_out
from ctxext.data.prose import random_number, stream_sentences
from ctxext.tasks.base import RetrievalTask
from ctxext.tasks.needle import PHRASINGS

if TYPE_CHECKING:
    from ctxext.models.answers import Scored
    from ctxext.models.model import LoadedModel


@dataclass(frozen=True)
class PassagePrompt(Prompt):
    """One question about several passages.

    Attributes:
        passages: Tokens of the passages, all of the same length; the first contains the fact.
        queries: Tokens of the question; before a question is selected, of all questions about the passages.
    """

    passages: tuple[list[int], ...] = ()
    queries: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Passages(RetrievalTask):
    """Find the passage with the fact of a question, by similarity.

    All passages of a question have the same prose, and differ only in the fact at one depth.

    Attributes:
        num_passages: Number of passages.
        phrasing: A key of `PHRASINGS`.
        num_digits: Number of digits of each number.
        long_texts: The treatment of a passage beyond the context length: "cut"; "average" of the vectors of its chunks;
            or the "best" chunk.
    """

    easier: ClassVar[str] = ""
    name: str = "passages"
    kinds: tuple[str, ...] = ("masked", "encoder")
    scored: str = "The fact's passage is the most similar one by mean-pooled states; chance is one in eight"
    description: str = (
        "Eight passages of the same prose state one number each. The passage with the answer must be the most similar "
        "to the question, by the cosine of the mean-pooled last hidden states. Chance is one in eight."
    )
    shows: str = "representing a sentence anywhere in a long text"
    options: tuple[str, ...] = ("haystack",)
    long_texts: str = "cut"
    num_passages: int = 8
    phrasing: str = "magic"
    num_digits: int = 5

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question, with the facts of all passages as needles."""
        phrasing = PHRASINGS[self.phrasing]
        keys = prose.object_names(rng, self.num_passages)
        facts = [phrasing.fact.format(key=key, value=random_number(rng, self.num_digits)) for key in keys]
        question = phrasing.question.format(key=keys[0]).partition("?")[0] + "?"
        return Pieces("", iter(()), tuple(f" {fact}" for fact in facts), (QuestionText(question, ""),))

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Count the tokens of the longest passage without prose."""
        around = len(encoder.get_start_tokens()) + len(encoder.get_end_tokens())
        return around + max(len(encoder.encode_piece(fact)) for fact in pieces.needles)

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build all passages for each depth, each of exactly `length` tokens."""
        seed, end = rng.getrandbits(64), encoder.get_end_tokens()
        passages = []
        for fact in pieces.needles:
            parts = Parts(encoder.get_start_tokens(), [encoder.encode_piece(fact)], [EncodedQuestion([], [], ())])
            text = Pieces("", stream_sentences(self.text, random.Random(seed)), (fact,), ())
            prompts = lay_out(text, parts, encoder, length - len(end), depths, random.Random(seed))
            passages.append([[*prompt.ids, *end] for prompt in prompts])
        query = (*encoder.encode_document(pieces.questions[0].question), *end)
        return [PassagePrompt(at_depth[0], 0, (), (), at_depth, (query,)) for at_depth in zip(*passages, strict=True)]

    def score(
        self, loaded: "LoadedModel", questions: Sequence[Sequence[Prompt]], depths: Sequence[int], *, generate: bool
    ) -> "Iterator[Scored]":
        """Yield for each depth whether the correct passage of each question is the most similar one."""
        from ctxext.models.answers import Scored
        from ctxext.models.similarity import are_most_similar

        # Several questions may share passages, so all run in one call.
        prompts = [question[depth] for depth in depths for question in questions]
        pairs = [(prompt.queries[0], prompt.passages) for prompt in prompts]  # type: ignore[attr-defined]
        correct = are_most_similar(loaded, pairs, self.long_texts)
        for number, depth in enumerate(depths):
            yield Scored(depth, correct[number * len(questions) : (number + 1) * len(questions)])


def _read_topics() -> dict[str, str]:
    """Read the sentence about each topic from topics.txt."""
    text = resources.files("ctxext.data").joinpath("topics.txt").read_text(encoding="utf-8")
    return dict(line.split(": ", 1) for line in text.splitlines())


TOPICS: Mapping[str, str] = _read_topics()


_PASSAGES = 8
_MOST = len(TOPICS) // _PASSAGES
"""Maximum number of topics per document."""


@dataclass(frozen=True, kw_only=True)
class Topics(Passages):
    """Find the document with a sentence about a topic, by similarity.

    Each document has a sentence about another topic at every depth, with a question about each of them, so that few
    documents must be read. Eight consecutive questions are about the same eight documents.
    """

    name: str = "topics"
    questions_per_text: int = _PASSAGES
    scored: str = "The document with the sentence is the most similar one; chance is one in eight"
    description: str = (
        "Eight documents of prose have a sentence about another topic at each depth. The document with the topic of "
        'the question ("What is known about volcanoes?") must be the most similar one, by the cosine of the vectors '
        "from the model's pooling. Texts beyond the context length are cut. Chance is one in eight."
    )
    shows: str = "finding a document by one sentence in it"

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the sentences and questions about all topics, in the order of documents and depths."""
        topics = rng.sample(list(TOPICS), len(TOPICS))
        questions = tuple(QuestionText(f"What is known about {topic}?", "") for topic in topics)
        return Pieces("", iter(()), tuple(f" {TOPICS[topic]}" for topic in topics), questions)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Count the tokens of the longest document without prose."""
        longest = sorted(len(encoder.encode_piece(fact)) for fact in pieces.needles)[-_MOST:]
        return len(encoder.get_start_tokens()) + len(encoder.get_end_tokens()) + sum(longest)

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build all documents for each depth, each of exactly `length` tokens."""
        end, count = encoder.get_end_tokens(), min(len(depths), _MOST)
        documents, queries = [], []
        for first in range(0, _PASSAGES * count, count):
            part = slice(first, first + count)
            facts = [encoder.encode_piece(fact) for fact in pieces.needles[part]]
            parts = Parts(encoder.get_start_tokens(), facts, [EncodedQuestion([], [], ())] * count)
            prose_pieces = Pieces("", stream_sentences(self.text, random.Random(rng.getrandbits(64))), (), ())
            laid = lay_out(prose_pieces, parts, encoder, length - len(end), depths, random.Random(rng.getrandbits(64)))
            documents.append([[*prompt.ids, *end] for prompt in laid])
            about = [(*encoder.encode_document(text.question), *end) for text in pieces.questions[part]]
            num_texts = -(-len(depths) // count)
            queries.append([about[number // num_texts] for number in range(len(depths))])
        return [
            PassagePrompt(texts[0], 0, (), (), texts, questions)
            for texts, questions in zip(zip(*documents, strict=True), zip(*queries, strict=True), strict=True)
        ]

    def select_question(self, prompts: list[Prompt], number: int) -> list[Prompt]:
        """Return the question about one of the documents, with this document first."""
        selected: list[Prompt] = []
        for prompt in prompts:
            assert isinstance(prompt, PassagePrompt)
            passages = (*prompt.passages[number:], *prompt.passages[:number])
            selected.append(replace(prompt, ids=passages[0], passages=passages, queries=(prompt.queries[number],)))
        return selected


_LONGER = "Documents beyond the context length are read in chunks, and "
TOPICS_IN_CHUNKS = tuple(
    Topics(
        name=f"topics-{variant}",
        same_questions_as=Topics.name,
        long_texts=long_texts,
        description=f"The questions of topics. {_LONGER}{scoring}.",
    )
    for variant, long_texts, scoring in (
        ("averaged", "average", "the mean of the chunks' vectors is used: the alternative to a longer position table"),
        ("best-chunk", "best", "the most similar chunk counts"),
    )
)
