"""Multi-round co-reference: find the i-th of several texts of the same kind and topic."""

import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import islice

from typing_extensions import override

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, QuestionText
from ctxext.data.prose import stream_sentences
from ctxext.data.turns import PLAIN_TURNS, TurnLayout
from ctxext.tasks.base import RetrievalTask

OPENING = (
    "The following is a conversation in which a user asks for texts. At its end the user asks for one of them again.\n"
)
EXAMPLES = "Here are some examples of conversations succeeded by a follow-up question answered correctly:"
KINDS = ("poem", "short story", "letter", "speech", "news report", "blog post", "diary entry", "riddle")
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
_PREFIX_LENGTH, _NUM_SENTENCES, _NUM_EXAMPLES = 10, 3, 2
_PAGE = 1300
"""Minimum number of characters of a page: about 300 tokens."""

_USER, _ASSISTANT = "\x00user\x00", "\x00assistant\x00"
"""Marks of the turns of a conversation, replaced by the text of the chat template."""

Topic = tuple[str, str]
"""The kind of a text, and its topic."""


@dataclass(frozen=True, kw_only=True)
class CoReference(RetrievalTask):
    """Return one of several texts that were requested in the same words, in a conversation that is one plain text.

    The form of the example of OpenAI MRCR, https://huggingface.co/datasets/openai/mrcr (MIT), with texts of a few
    sentences from generated prose or the user's text.

    Attributes:
        num_texts: Number of texts that are requested in the same words.
    """

    shows: str = "distinguishing short texts by their order"
    options: tuple[str, ...] = ("haystack", "repeat_question")
    is_written: bool = True
    answer_room: int = 96
    has_depths: bool = False
    num_texts: int

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        sentences = stream_sentences(self.text, random.Random(rng.getrandbits(64)))
        chosen = rng.choice(KINDS), rng.choice(prose.GOODS)
        texts = [self.write_text(sentences) for _ in range(self.num_texts)]
        number, prefix = rng.randrange(self.num_texts), _draw_prefix(rng)
        request, answer = _format_question(prefix, number, chosen), f"{prefix}{texts[number]}"
        return Pieces(
            opening=OPENING,
            haystack=self._draw_turns(sentences, chosen, random.Random(rng.getrandbits(64))),
            needles=tuple(self.format_turn(chosen, text) for text in texts),
            questions=(QuestionText(f"\n\nUser: {request}\n\nAssistant:", f" {answer}", (answer,), (prefix,)),),
            places=tuple(sorted(rng.random() for _ in texts)),
            bare_question=f"User: {request}",
            next_turn=PLAIN_TURNS.next_turn,
        )

    def write_text(self, sentences: Iterator[str]) -> str:
        """Return a text of a few sentences."""
        return _join_sentences(sentences)

    def format_turn(self, chosen: Topic, text: str) -> str:
        """Return a request with its answer."""
        return f"\n\nUser: Write a {chosen[0]} about {chosen[1]}.\n\nAssistant: {text}"

    def _draw_turns(self, sentences: Iterator[str], without: Topic, rng: random.Random) -> Iterator[str]:
        """Yield other requests, many of them for the same kind of text or on the same topic."""
        while True:
            yield self.format_turn(_draw_other(without, rng), self.write_text(sentences))

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return the score of an answer; without a chat template it follows a space and ends before the next turn."""
        if prompt.next_turn:
            text = text.removeprefix(PLAIN_TURNS.space).partition(prompt.next_turn)[0]
        return mrcr_score(text, prompt.answers[0], prompt.required[0])


@dataclass(frozen=True, kw_only=True)
class ChatCoReference(CoReference):
    """Return one of several pages that were requested in the same words, as messages through the chat template.

    The messages of OpenAI MRCR, https://huggingface.co/datasets/openai/mrcr (MIT): two worked examples, requests with
    their answers, and the last request. Without a chat template the same messages are one plain text. The first text is
    longer than a page, up to the exact length of the prompt.
    """

    shows: str = "distinguishing texts by their order"
    answer_room: int = 448
    has_one_form: bool = True

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question, with marks between the messages."""
        pieces = super().pieces(rng)
        sentences = stream_sentences(self.text, random.Random(rng.getrandbits(64)))
        examples = "\n\n".join([EXAMPLES, *(_write_example(sentences, rng) for _ in range(_NUM_EXAMPLES))])
        request = pieces.bare_question.removeprefix("User: ")
        return replace(
            pieces,
            opening=f"{examples}{next(pieces.haystack)}",
            questions=(pieces.questions[0]._replace(answer=pieces.questions[0].answers[0]),),
            bare_question=request,
            continuation=sentences,
        )

    def write_text(self, sentences: Iterator[str]) -> str:
        """Return a text of about a page."""
        text = ""
        while len(text) < _PAGE:
            text += next(sentences)
        return text.strip()

    def format_turn(self, chosen: Topic, text: str) -> str:
        """Return a request with its answer, with marks before them."""
        return f"{_USER}{_format_request(chosen)}{_ASSISTANT}{text}"

    @override
    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        return super().size(_render(pieces, encoder.turn_layout), encoder)

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build one question as a conversation of exactly `length` tokens, its answer included."""
        return super().prompts(_render(pieces, encoder.turn_layout), encoder, length, depths, rng)

    @property
    def advice(self) -> str:
        """The hint about shorter texts."""
        return f"Or use short texts: --task mrcr-flat-{self.num_texts}."


def mrcr_score(text: str, answer: str, prefix: str) -> float:
    """Return the ratio of matching text after the prefix, 0 without it, as defined in the README of openai/mrcr."""
    if not text.startswith(prefix):
        return 0.0
    return SequenceMatcher(None, text.removeprefix(prefix), answer.removeprefix(prefix)).ratio()


def _join_sentences(sentences: Iterator[str]) -> str:
    return "".join(islice(sentences, _NUM_SENTENCES)).strip()


def _draw_prefix(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + string.digits, k=_PREFIX_LENGTH))


def _draw_other(without: Topic, rng: random.Random) -> Topic:
    """Draw a kind and topic that differ from the given ones together, often only in one of them."""
    while True:
        chosen = (rng.choice((without[0], rng.choice(KINDS))), rng.choice((without[1], rng.choice(prose.GOODS))))
        if chosen != without:
            return chosen


def _format_request(chosen: Topic) -> str:
    return f"write a {chosen[0]} about {chosen[1]}"


def _format_question(prefix: str, number: int, chosen: Topic) -> str:
    return (
        f"Prepend {prefix} to the {_ORDINALS[number]} (1 indexed) {chosen[0]} about {chosen[1]}. "
        "Do not include any other text in your response."
    )


def _write_example(sentences: Iterator[str], rng: random.Random) -> str:
    """Write a worked example: two texts for the same request, one for another, and the answer to the last request."""
    chosen, prefix, number = (rng.choice(KINDS), rng.choice(prose.GOODS)), _draw_prefix(rng), rng.randrange(2)
    texts = [_join_sentences(sentences) for _ in range(3)]
    requests = [chosen, _draw_other(chosen, rng), chosen]
    turns = [
        *((_format_request(request), text) for request, text in zip(requests, texts, strict=True)),
        (_format_question(prefix, number, chosen), f"{prefix}{texts[2 * number]}"),
    ]
    lines = "\n\n".join(f"User: {request}\nAssistant: {text}" for request, text in turns)
    return f"======EXAMPLE======\n{lines}\n\n======END EXAMPLE======"


def _render(pieces: Pieces, layout: TurnLayout) -> Pieces:
    """Replace the marks between messages by the text of a layout."""

    def render(text: str) -> str:
        return text.replace(_USER, layout.request).replace(_ASSISTANT, layout.answer)

    (question,) = pieces.questions
    ask = f"{layout.request}{pieces.bare_question}{layout.end}"
    return replace(
        pieces,
        opening=layout.begin + render(pieces.opening.replace(_USER, layout.first_request, 1)),
        haystack=map(render, pieces.haystack),
        needles=tuple(map(render, pieces.needles)),
        questions=(question._replace(question=ask, answer=f"{layout.space}{question.answer}"),),
        is_rendered=True,
        next_turn=layout.next_turn,
    )


MRCR_FLAT = tuple(
    CoReference(
        name=f"mrcr-flat-{num_texts}",
        same_questions_as=f"mrcr-{num_texts}",
        description="A conversation in one text contains several short texts for the same request. The answer is one "
        "of them, by number, after a prefix. The score is the ratio of matching text after the prefix; a random one of "
        f"the texts scores {floor} % on average.",
        num_texts=num_texts,
    )
    for num_texts, floor in ((2, 64), (4, 47), (8, 39))
)
"""The flat form with two, four and eight texts for the same request."""

MRCR = tuple(
    ChatCoReference(
        name=f"mrcr-{num_texts}",
        description="A conversation contains several pages for the same request. The answer is one of them, by number, "
        "after a prefix. The score is the ratio of matching text after the prefix; a random one of the pages "
        f"scores {floor} % on average.",
        num_texts=num_texts,
    )
    for num_texts, floor in ((2, 52), (4, 27), (8, 15))
)
"""The task with two, four and eight pages for the same request."""
