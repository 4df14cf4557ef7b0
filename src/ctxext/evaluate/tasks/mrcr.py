"""Multi-round co-reference: find the i-th of several texts of the same kind and topic."""

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import islice

from ctxext.data import prose
from ctxext.data.prompt import Pieces, Prompt, QuestionText
from ctxext.data.prose import stream_sentences
from ctxext.evaluate.tasks.base import RetrievalTask

OPENING = (
    "The following is a conversation in which a user asks for texts. At its end the user asks for one of them again.\n"
)
KINDS = ("poem", "short story", "letter", "speech", "news report", "blog post", "diary entry", "riddle")
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")
_PREFIX_LENGTH, _NUM_SENTENCES = 10, 3


@dataclass(frozen=True, kw_only=True)
class CoReference(RetrievalTask):
    """Return one of several texts that were requested in the same words.

    The form and the score of OpenAI MRCR, https://huggingface.co/datasets/openai/mrcr (MIT), with texts of a few
    sentences from generated prose or the user's text: the ratio of `difflib.SequenceMatcher` after a prefix that the
    answer must begin with.

    Attributes:
        num_texts: Number of texts that are requested in the same words.
    """

    shows: str = "distinguishing texts by their order"
    is_written: bool = True
    answer_room: int = 96
    has_depths: bool = False
    num_texts: int

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question."""
        sentences = stream_sentences(self.text, random.Random(rng.getrandbits(64)))
        kind, topic = rng.choice(KINDS), rng.choice(prose.GOODS)
        texts = [_join_sentences(sentences) for _ in range(self.num_texts)]
        number = rng.randrange(self.num_texts)
        prefix = "".join(rng.choices(string.ascii_letters + string.digits, k=_PREFIX_LENGTH))
        question = (
            f"\n\nUser: Prepend {prefix} to the {_ORDINALS[number]} (1 indexed) {kind} about {topic}. "
            "Do not include any other text in your response.\n\nAssistant:"
        )
        answer = f"{prefix}{texts[number]}"
        return Pieces(
            opening=OPENING,
            haystack=_draw_turns(sentences, (kind, topic), random.Random(rng.getrandbits(64))),
            needles=tuple(_format_turn(kind, topic, text) for text in texts),
            questions=(QuestionText(question, f" {answer}", (answer,), (prefix,)),),
            places=tuple(sorted(rng.random() for _ in texts)),
        )

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return the ratio of matching text after the prefix, 0 without it; a space may precede the answer."""
        text, prefix = text.lstrip(), prompt.required[0]
        if not text.startswith(prefix):
            return 0.0
        return SequenceMatcher(None, text.removeprefix(prefix), prompt.answers[0].removeprefix(prefix)).ratio()


def _join_sentences(sentences: Iterator[str]) -> str:
    return "".join(islice(sentences, _NUM_SENTENCES)).strip()


def _format_turn(kind: str, topic: str, text: str) -> str:
    return f"\n\nUser: Write a {kind} about {topic}.\n\nAssistant: {text}"


def _draw_turns(sentences: Iterator[str], without: tuple[str, str], rng: random.Random) -> Iterator[str]:
    """Yield other requests, many of them for the same kind of text or on the same topic."""
    while True:
        chosen = (rng.choice((without[0], rng.choice(KINDS))), rng.choice((without[1], rng.choice(prose.GOODS))))
        if chosen != without:
            yield _format_turn(*chosen, _join_sentences(sentences))


MRCR = tuple(
    CoReference(
        name=f"mrcr-{num_texts}",
        description="A conversation contains several texts for the same request. The answer is one of them, by number, "
        "after a prefix. The score is the ratio of matching text after the prefix; a random one of the texts "
        f"scores {floor} % on average.",
        num_texts=num_texts,
    )
    for num_texts, floor in ((2, 64), (4, 47), (8, 39))
)
"""The task with two, four and eight texts for the same request."""
