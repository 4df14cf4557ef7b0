"""RULER's thirteen tasks: its prompts and scores, with names, values and prose of the package or the user.

https://arxiv.org/abs/2404.06654, https://github.com/NVIDIA/RULER (Apache-2.0), in the form of lm-evaluation-harness.
Prompts have exactly the given length, so tasks about one place have depths; RULER draws depths at random.
"""

import dataclasses
import math
import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, repeat
from typing import Any, Self

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, QuestionText, encode_parts
from ctxext.evaluate.tasks.base import RetrievalTask, match_substrings
from ctxext.evaluate.tasks.documents import Documents, Passage, random_document
from ctxext.evaluate.tasks.needle import FILLER

GENERATOR = 2
"""Version of the prompts, incremented with every change."""

_DESCRIBED = f"RULER, generator {GENERATOR} of ctxext: "


@dataclass(frozen=True, kw_only=True)
class RulerTask(RetrievalTask):
    """A task of RULER. The score of a generated answer is the share of the required parts that it contains."""

    is_written: bool = True
    shows: str = "RULER"


_DRAWS: dict[str, Callable[[random.Random], str]] = {
    "words": lambda rng: prose.object_name(rng).replace(" ", "-"),
    "uuids": prose.random_uuid,
    "numbers": lambda rng: prose.random_number(rng, 7),
}


@dataclass(frozen=True, kw_only=True)
class Niah(RulerTask):
    """Needles in a haystack.

    Attributes:
        haystack: "repeat" for repeated sentences, "prose", or "needles".
        keys: The kind of keys: "words" or "uuids".
        values: The kind of values: "numbers" or "uuids".
        num_keys: Number of keys in the text.
        num_values: Number of values of each key.
        num_queries: Number of keys in the question.
    """

    answer_room: int = 128
    haystack: str = "prose"
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question."""
        keys = _draw_different(_DRAWS[self.keys], max(self.num_keys, self.num_queries), rng)
        values = _draw_different(_DRAWS[self.values], len(keys) * self.num_values, rng)
        by_key = [values[at : at + self.num_values] for at in range(0, len(values), self.num_values)]
        gap = " " if self.haystack == "prose" else "\n"
        queried, answers = keys[: self.num_queries], tuple(chain.from_iterable(by_key[: self.num_queries]))
        query = f"{', '.join(queried[:-1])}, and {queried[-1]}" if len(queried) > 1 else queried[0]
        kind = self.values if len(answers) > 1 else self.values[:-1]
        if len(answers) > 1:
            start, ask, lead = f"Some special magic {kind} are", f"What are all the special magic {kind}", "are"
        else:
            start, ask, lead = f"A special magic {kind} is", f"What is the special magic {kind}", "is"
        question = (
            f"\n{ask} for {query} mentioned in the provided text? "
            f"The special magic {kind} for {query} mentioned in the provided text {lead}"
        )
        return Pieces(
            opening=f"{start} hidden within the following text. Make sure to memorize it. I will quiz you about the "
            f"{kind} afterwards." + ("\n" if gap == " " else ""),
            haystack=self._draw_units(keys, random.Random(rng.getrandbits(64))),
            needles=tuple(
                gap + self._state(key, value) for key, of_key in zip(keys, by_key, strict=True) for value in of_key
            ),
            questions=(QuestionText(question, f" {', '.join(answers)}.", required=answers),),
            padding="" if gap == " " else "\n",
        )

    def _state(self, key: str, value: str) -> str:
        return f"One of the special magic {self.values} for {key} is: {value}."

    def _draw_units(self, keys: list[str], rng: random.Random) -> Iterator[str]:
        if self.haystack == "prose":
            yield from prose.stream_sentences(self.text, rng)
        if self.haystack == "repeat":
            yield from repeat("\n" + FILLER.strip())
        while True:
            key = _DRAWS[self.keys](rng)
            if key not in keys:
                yield "\n" + self._state(key, _DRAWS[self.values](rng))


def _draw_different(draw: Callable[[random.Random], str], count: int, rng: random.Random) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[draw(rng)] = None
    return list(names)


def _draw_names(rng: random.Random, count: int, num_letters: int, letters: str = string.ascii_uppercase) -> list[str]:
    """Draw different words of random letters."""
    return _draw_different(lambda rng: "".join(rng.choices(letters, k=num_letters)), count, rng)


def _make_niah(variant: str, answer: str, **settings: Any) -> Niah:
    return Niah(name=f"niah-{variant}", description=f"{_DESCRIBED}{answer}.", **settings)


_NOISE, _NOISES_OF_EXAMPLE = FILLER + "\n", 10


@dataclass(frozen=True, kw_only=True)
class RulerVariables(RulerTask):
    """Follow a value from variable to variable, after one solved example.

    Attributes:
        num_copies: Number of copies of the value.
    """

    name: str = "ruler-vt"
    description: str = _DESCRIBED + "the five variables that a value passes through (variable tracking)."
    answer_room: int = 30
    has_depths: bool = False
    num_copies: int = 4

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question."""
        start = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        solved, lines, value = self._draw_chain(rng, num_letters=3)
        units = [_NOISE] * _NOISES_OF_EXAMPLE
        for at, line in zip(
            sorted(rng.sample(range(1, len(units)), len(lines)), reverse=True), lines[::-1], strict=True
        ):
            units.insert(at, line)
        example = f"{start}{''.join(units).strip()}\n{self._ask(value)}  {' '.join(solved)}\n\n"
        names, lines, value = self._draw_chain(rng, num_letters=5)
        return Pieces(
            opening=f"{example}\n\n{start}{_NOISE.lstrip()}",
            haystack=repeat(_NOISE),
            needles=tuple(lines),
            questions=(QuestionText(_NOISE + self._ask(value), f" {' '.join(names)}", required=tuple(names)),),
            padding="\n",
            places=tuple(sorted(rng.random() for _ in lines)),
            bare_question=self._ask(value).partition(" Answer:")[0].strip(),
        )

    def _draw_chain(self, rng: random.Random, num_letters: int) -> tuple[list[str], list[str], str]:
        names = _draw_names(rng, self.num_copies + 1, num_letters)
        value = prose.random_number(rng, 5)
        copies = (f" VAR {new} = VAR {old} " for old, new in pairwise(names))
        return names, [f" VAR {names[0]} = {value}", *copies], value

    def _ask(self, value: str) -> str:
        return (
            f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According "
            f"to the chain(s) of variable assignment in the text above, {self.num_copies + 1} variables are assgined "
            f"the value {value}, they are:"
        )


_TRIES = 6
_MOST_TOKENS = 32
"""Maximum number of tokens per unit: with more room for each, the shortest list always fits."""


@dataclass(frozen=True, kw_only=True)
class _RulerWords(RulerTask):
    """A question about the frequencies of words in a list, which is as long as the prompt allows and never cut.

    Attributes:
        length: Prompt length in tokens; `fit_to_length` sets it.
        room: Maximum number of tokens of the list; `fit_to_length` sets it.
        count: Counts the tokens of units; `fit_to_length` sets it.
    """

    has_depths: bool = False
    length: int = 0
    room: int = 0
    count: Callable[[Sequence[str]], int] = len

    @property
    def fewest(self) -> int:
        """Minimum number of words for which the question has an answer."""
        raise NotImplementedError

    def units(self, rng: random.Random, num_words: int) -> tuple[list[str], list[str]]:
        """Draw the units of a list of about `num_words` words, and the words to name."""
        raise NotImplementedError

    def about_list(self, rng: random.Random, opening: str, question: str, answer: Callable[[list[str]], str]) -> Pieces:
        """Draw one question about the longest list that fits; `answer` formats the words to name."""
        seed = rng.getrandbits(64)
        _, words = self.units(random.Random(seed), self.fewest)
        return Pieces(
            opening=opening,
            haystack=chain(self._find_longest(seed), repeat("\n")),
            needles=(),
            questions=(QuestionText(f"\nQuestion: {question}", answer(words), required=tuple(words)),),
            padding="\n",
        )

    def _find_longest(self, seed: int) -> Iterator[str]:
        """Yield the units of the longest list that fits, computed on demand."""
        best, size = self.units(random.Random(seed), self.fewest)[0], 0
        num_words = max(self.fewest, self.room // 8)
        for _ in range(_TRIES):  # Words have different numbers of tokens, so the maximum is searched for.
            tried = self.units(random.Random(seed), num_words)[0]
            tokens = self.count(tried)
            if size < tokens <= self.room:
                best, size = tried, tokens
            num_words = max(self.fewest, int(num_words * self.room / tokens))
        yield from best

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task with the room for the list in a prompt."""
        parts = encode_parts(self.pieces(random.Random(0)), encoder, answer_room=self.answer_room)
        room = max(0, length - parts.size)
        return dataclasses.replace(
            self, length=length, room=room, count=lambda units: sum(map(len, encoder.encode_pieces(units)))
        )

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Count the tokens of a question with the shortest list that has an answer."""
        if self.room > _MOST_TOKENS * self.fewest:
            return super().size(pieces, encoder)
        units = encoder.encode_pieces([*islice(pieces.haystack, self.fewest)])
        return super().size(pieces, encoder) + sum(map(len, units))


@dataclass(frozen=True, kw_only=True)
class RulerCommonWords(_RulerWords):
    """Name the ten most common words of a numbered list."""

    name: str = "ruler-cwe"
    description: str = _DESCRIBED + "the ten most common words of a numbered list."
    answer_room: int = 120

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question."""
        return self.about_list(
            rng,
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often.",
            "What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in "
            "the list are:",
            lambda words: "".join(f" {number}. {word}" for number, word in enumerate(words, 1)),
        )

    @property
    def fewest(self) -> int:
        """Number of words of a list with ten common words and ten others."""
        often, seldom = self._times
        return 10 * (often + seldom)

    @property
    def _times(self) -> tuple[int, int]:
        """Number of repetitions of the words to name and of all others: as in RULER, and fewer in short lists."""
        return (30, 3) if self.length >= 4096 else (6, 1) if self.length >= 1024 else (3, 1)

    def units(self, rng: random.Random, num_words: int) -> tuple[list[str], list[str]]:
        """Draw a list with ten words much more common than all others."""
        often, seldom = self._times
        num_others = (num_words - 10 * often) // seldom
        words = _draw_words(rng, 10 + num_others)
        common, others = words[:10], words[10:]
        listed = common * often + others * seldom
        rng.shuffle(listed)
        return [f"{' ' if number > 1 else chr(10)}{number}. {word}" for number, word in enumerate(listed, 1)], common


_SINGLE = dict.fromkeys((*prose.OBJECTS, *prose.GOODS, *prose.SITES, *prose.TRADES, *prose.ADJECTIVES))
_WORDS = [*_SINGLE, *(f"{adjective}-{noun}" for adjective in prose.ADJECTIVES for noun in prose.OBJECTS)]


def _draw_words(rng: random.Random, count: int) -> list[str]:
    """Draw different words in random order; lists beyond about 40,000 tokens also need longer words."""
    words = rng.sample(_WORDS, len(_WORDS))
    known = dict.fromkeys(words)
    while len(words) < count:
        longer = (f"{adjective}-{word}" for adjective in prose.ADJECTIVES for word in words)
        new = [word for word in dict.fromkeys(longer) if word not in known]
        rng.shuffle(new)
        known |= dict.fromkeys(new)
        words = [*words, *new]
    return words[:count]


@dataclass(frozen=True, kw_only=True)
class RulerFrequentWords(_RulerWords):
    """Name the three most frequent coded words; their frequencies follow a Zipf distribution."""

    name: str = "ruler-fwe"
    description: str = _DESCRIBED + "the three most frequent words of a coded text."
    answer_room: int = 50

    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question."""
        return self.about_list(
            rng,
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words.",
            "Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
            "appeared words in the above coded text? Answer: According to the coded text above, the three most "
            "frequently appeared words are:",
            lambda words: f" {', '.join(words)}.",
        )

    @property
    def fewest(self) -> int:
        """Minimum number of words that makes the fourth word more common than the fifth."""
        return 53

    def units(self, rng: random.Random, num_words: int) -> tuple[list[str], list[str]]:
        """Draw a list in which the n-th word has a share of 6 / (π n)²; the first is noise."""
        words = ["...", *_draw_names(rng, max(4, self.length // 50) - 1, 6, string.ascii_lowercase)]
        counts = [int(num_words * 6 / (math.pi * rank) ** 2) for rank in range(1, len(words) + 1)]
        listed = [f" {word}" for word, count in zip(words, counts, strict=True) for _ in range(count)]
        rng.shuffle(listed)
        return listed, words[1:4]


@dataclass(frozen=True, kw_only=True)
class RulerQuestions(Documents):
    """Answer the user's question, or one about a random fact, from one of many documents."""

    name: str = "ruler-qa-1"
    description: str = _DESCRIBED + "a question that one of many documents answers."
    shows: str = "RULER"
    opening: str = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nThe following are given documents.\n\n"
    )
    document: str = "Document {number}:\n{text}\n\n"
    ask_for: str = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nQuestion: {question} Answer:"
    )
    ask: str = "fact"

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the task with the user's questions, one per text as in RULER."""
        return dataclasses.replace(self, questions=options["questions"])

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return RULER's `string_match_part`: 1 if one of the answers is in the text, else 0."""
        return max(match_substrings(text, (answer,)) for answer in prompt.answers)


@dataclass(frozen=True, kw_only=True)
class RulerTwoHops(RulerQuestions):
    """Answer a question from two of many documents; one names the subject of the other."""

    name: str = "ruler-qa-2"
    description: str = _DESCRIBED + "a question that two of many documents answer together."
    document: str = "Document {number}:\n{title}\n{text}\n\n"

    def draw_documents(
        self, rng: random.Random, gold_numbers: Sequence[int]
    ) -> tuple[list[Passage], list[tuple[str, str]], Iterator[Passage]]:
        """Draw documents about a thing's owner and the owner's home, the question, and other documents."""
        key, person, place = prose.object_name(rng), prose.person_name(rng), rng.choice(prose.PLACES)
        golds = [Passage(f"The {key}", f"The owner of the {key} is {person}.", is_gold=True), _make_home(person, place)]
        others = _draw_others(random.Random(rng.getrandbits(64)), key, person)
        return golds, [(f"Where does the owner of the {key} live?", f" {place}")], others


def _make_home(person: str, place: str) -> Passage:
    return Passage(person, f"{person} lives in {place}.")


def _draw_others(rng: random.Random, key: str, person: str) -> Iterator[Passage]:
    while True:
        thing, somebody = prose.object_name(rng), prose.person_name(rng)
        if thing.split()[-1] != key.split()[-1] and somebody != person:
            yield dataclasses.replace(random_document(rng, thing, 0)[0], title=f"The {thing}")
            yield _make_home(somebody, rng.choice(prose.PLACES))


_NEEDLES = "a text of nothing but needles"
RULER: tuple[RetrievalTask, ...] = (
    _make_niah("single-1", "a number in a repetitive text", haystack="repeat"),
    _make_niah("single-2", "a number in prose"),
    _make_niah("single-3", "a uuid in prose", values="uuids"),
    _make_niah("multikey-1", "one of four numbers in prose", num_keys=4),
    _make_niah("multikey-2", f"one number in {_NEEDLES}", haystack="needles"),
    _make_niah("multikey-3", f"the uuid of a uuid in {_NEEDLES}", haystack="needles", keys="uuids", values="uuids"),
    _make_niah("multivalue", "four numbers of one key in prose", has_depths=False, num_values=4),
    _make_niah("multiquery", "the numbers of four keys in prose", has_depths=False, num_queries=4),
    *(RulerVariables(), RulerCommonWords(), RulerFrequentWords(), RulerQuestions(), RulerTwoHops()),
)
