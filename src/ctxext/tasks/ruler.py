"""RULER's thirteen tasks: NVIDIA's prompts, budgets and scores, with material of the package or of the user.

https://arxiv.org/abs/2404.06654, https://github.com/NVIDIA/RULER (Apache-2.0): scripts/data/synthetic, scripts/eval
and scripts/synthetic.yaml. Differences:

- Material: words, prose, documents and questions are the package's, unless `--words`, `--essays`, `--squad` and
  `--hotpot` contain the original ones. Sentences are split by a rule instead of nltk. If a list needs more words than
  there are, adjectives are joined to them; NVIDIA draws all of its words from english_words.json.
- Length: each prompt has its exact length for its own question. NVIDIA finds one size for all and stays a little below
  the length. Prose is cut after the last token that fits; all other texts are followed by line breaks.
- Depths: needles and documents about one place are at the given depths, and a space precedes the first sentence of
  prose at any depth. NVIDIA draws needles' places from 40 depths, and one place for all questions of qa.
- Draws: each sample has separate random numbers. Orders that NVIDIA shuffles with its seed, 42, use `--seed`.
- Names, keys and values of one question are different; NVIDIA does not exclude equal ones. A key is not in the filler.
- Short lengths: below 1,024 tokens `cwe` and `vt` have no solved example, and `cwe` repeats the
  common words 3 times and all others once.
- An answer longer than NVIDIA's budget raises the budget, so that small vocabularies can be measured.
- Chat templates are the model's own; solved examples are in the user's turn, and no space precedes the answer prefix.
"""

import dataclasses
import math
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, pairwise, repeat
from typing import Any, Self

from typing_extensions import override

from ctxext.data import prose
from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, QuestionText
from ctxext.tasks.base import RetrievalTask, match_substrings
from ctxext.tasks.documents import Documents, Passage, random_document
from ctxext.tasks.needle import FILLER
from ctxext.tasks.ruler_files import PACKAGE_WORDS, QuestionSet, Words

GENERATOR = 3
"""Version of the prompts, incremented with every change."""

_DESCRIBED = f"RULER, generator {GENERATOR} of ctxext: "
_SHORTEST_WITH_EXAMPLE = 1024
_CONTROL = re.compile(r"[\x00-\x1f]")


def _clean_answer(text: str) -> str:
    """Clean a generated answer as NVIDIA's evaluate.py does before it is scored."""
    return _CONTROL.sub("\n", text.strip()).strip()


@dataclass(frozen=True, kw_only=True)
class RulerTask(RetrievalTask):
    """A task of RULER. The score of a generated answer is the share of the required parts that it contains.

    Attributes:
        seed: The seed of shuffles that are the same for all samples.
        words: The words of keys and lists; None for those of the package.
    """

    is_written: bool = True
    stays_right: bool = True
    shows: str = "RULER"
    seed: int = 0
    words: Words | None = None

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return RULER's `string_match_all`: the share of the required parts in the text."""
        return match_substrings(_clean_answer(text), prompt.required)


_DRAWS: dict[str, Callable[[random.Random, Words], str]] = {
    "words": lambda rng, words: words.draw_key(rng),
    "uuids": lambda rng, _: prose.random_uuid(rng),
    "numbers": lambda rng, _: prose.random_number(rng, 7),
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
        essays: Sentences of the prose, from the first one on as in RULER; empty for `text` or the package's prose.
    """

    answer_room: int = 128
    haystack: str = "prose"
    keys: str = "words"
    values: str = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    essays: tuple[str, ...] = ()

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        keys = _draw_different(self._draw(self.keys), max(self.num_keys, self.num_queries), rng)
        values = _draw_different(self._draw(self.values), len(keys) * self.num_values, rng)
        by_key = [values[at : at + self.num_values] for at in range(0, len(values), self.num_values)]
        gap = " " if self.haystack == "prose" else "\n"
        queried, answers = keys[: self.num_queries], tuple(chain.from_iterable(by_key[: self.num_queries]))
        query = f"{', '.join(queried[:-1])}, and {queried[-1]}" if len(queried) > 1 else queried[0]
        kind = self.values if len(answers) > 1 else self.values[:-1]
        opening, question = frame_values(kind, query, are_several=len(answers) > 1)
        return Pieces(
            opening=opening + ("\n" if gap == " " else ""),
            haystack=self._draw_units(keys, random.Random(rng.getrandbits(64))),
            needles=tuple(
                gap + state_value(self.values, key, value)
                for key, of_key in zip(keys, by_key, strict=True)
                for value in of_key
            ),
            questions=(QuestionText(question, f" {', '.join(answers)}.", required=answers),),
            padding="" if gap == " " else "\n",
        )

    def _draw(self, kind: str) -> Callable[[random.Random], str]:
        return lambda rng: _DRAWS[kind](rng, self.words or PACKAGE_WORDS)

    def _draw_units(self, keys: list[str], rng: random.Random) -> Iterator[str]:
        if self.haystack == "prose" and self.essays:
            yield from cycle(f" {sentence}" for sentence in self.essays)
        if self.haystack == "prose":
            yield from prose.stream_sentences(self.text, rng)
        if self.haystack == "repeat":
            yield from repeat("\n" + FILLER.strip())
        while True:
            key = self._draw(self.keys)(rng)
            if key not in keys:
                yield "\n" + state_value(self.values, key, self._draw(self.values)(rng))


def frame_values(kind: str, query: str, *, are_several: bool, pronoun: str = "it") -> tuple[str, str]:
    """Return the text before the haystack, and the question after it, about the values of some keys.

    Args:
        kind: The kind of values, as "number", or "numbers" for several.
        query: The keys.
        are_several: Whether the question has several values.
        pronoun: The word for the values in the request to memorize them.
    """
    if are_several:
        start, ask, lead = f"Some special magic {kind} are", f"What are all the special magic {kind}", "are"
    else:
        start, ask, lead = f"A special magic {kind} is", f"What is the special magic {kind}", "is"
    opening = (
        f"{start} hidden within the following text. Make sure to memorize {pronoun}. I will quiz you about the "
        f"{kind} afterwards."
    )
    question = (
        f"\n{ask} for {query} mentioned in the provided text? "
        f"The special magic {kind} for {query} mentioned in the provided text {lead}"
    )
    return opening, question


def state_value(kind: str, key: str, value: str) -> str:
    """Return the sentence about a value of a key."""
    return f"One of the special magic {kind} for {key} is: {value}."


def _draw_different(draw: Callable[[random.Random], str], count: int, rng: random.Random) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[draw(rng)] = None
    return list(names)


def _draw_names(rng: random.Random, count: int, num_letters: int, letters: str = string.ascii_uppercase) -> list[str]:
    """Draw different words of random letters."""
    return _draw_different(lambda rng: "".join(rng.choices(letters, k=num_letters)), count, rng)


def _make_niah(variant: str, answer: str, *, haystack: str = "prose", keys: str = "words", **settings: Any) -> Niah:
    of_keys, of_prose = ("words",) * (keys == "words"), ("essays", "haystack") * (haystack == "prose")
    settings |= {"haystack": haystack, "keys": keys, "options": (*of_keys, *of_prose, "repeat_question")}
    return Niah(name=f"niah-{variant}", description=f"{_DESCRIBED}{answer}.", **settings)


_NOISE = FILLER.strip() + "\n"
_EXAMPLE_TOKENS = 500
_START = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"


@dataclass(frozen=True, kw_only=True)
class RulerVariables(RulerTask):
    """Follow a value from variable to variable, after one solved example.

    Attributes:
        num_copies: Number of copies of the value.
        example_noises: Number of filler lines of the example, as many as fit into 500 tokens; 0 for no example.
            `fit_to_length` sets it.
    """

    name: str = "ruler-vt"
    description: str = _DESCRIBED + "the five variables that a value passes through (variable tracking)."
    answer_room: int = 30
    has_depths: bool = False
    num_copies: int = 4
    example_noises: int = 0

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        example = f"{self._draw_example(rng)}\n" if self.example_noises else ""
        names, lines, value = self._draw_chain(rng, num_letters=5)
        return Pieces(
            opening=f"{example}{_START}",
            haystack=repeat(_NOISE),
            needles=tuple(lines),
            questions=(QuestionText(self._ask(value), " ".join(names), required=tuple(names)),),
            padding="\n",
            bare_question=self._ask(value).partition(" Answer:")[0],
        )

    def _draw_example(self, rng: random.Random) -> str:
        """Draw new names and a new value for the example; its places are the same for all samples."""
        names, lines, value = self._draw_chain(rng, num_letters=3)
        units = [_NOISE] * self.example_noises
        places = sorted(random.Random(self.seed).sample(range(len(units)), len(lines)))
        for number, place in enumerate(places):
            units.insert(place + number, lines[number])
        return f"{_START}{''.join(units)}{self._ask(value)} {' '.join(names)}\n"

    def _draw_chain(self, rng: random.Random, num_letters: int) -> tuple[list[str], list[str], str]:
        names = _draw_names(rng, self.num_copies + 1, num_letters)
        value = str(rng.randrange(10_000, 99_999))
        copies = (f"VAR {new} = VAR {old} \n" for old, new in pairwise(names))
        return names, [f"VAR {names[0]} = {value}\n", *copies], value

    def _ask(self, value: str) -> str:
        return (
            f"Question: Find all variables that are assigned the value {value} in the text above. Answer: According to "
            f"the chain(s) of variable assignment in the text above, {self.num_copies + 1} variables are assigned the "
            f"value {value}, they are: "
        )

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task with the longest example that has 500 tokens without its answer, or none if too short."""
        if length < _SHORTEST_WITH_EXAMPLE:
            return dataclasses.replace(self, example_noises=0)
        fewest = self.num_copies + 1
        shortest = dataclasses.replace(self, example_noises=fewest)._draw_example(random.Random(self.seed))
        size = len(encoder.encode_piece("".join(shortest.rpartition(": ")[:2])))
        more = (_EXAMPLE_TOKENS - size) // len(encoder.encode_piece(_NOISE))
        return dataclasses.replace(self, example_noises=fewest + max(0, more))

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Count the tokens of a question with as many filler lines as lines of the chain."""
        return super().size(pieces, encoder) + len(pieces.needles) * len(encoder.encode_piece(_NOISE))

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build one question with the lines of the chain before different filler lines, in order."""
        room = length - super().size(pieces, encoder)
        num_lines = max(len(pieces.needles), room // len(encoder.encode_piece(_NOISE)))
        places = sorted(rng.sample(range(num_lines), len(pieces.needles)))
        pieces = dataclasses.replace(pieces, places=tuple(place / num_lines for place in places))
        return super().prompts(pieces, encoder, length, depths, rng)


_TRIES = 6
_MOST_TOKENS = 32
"""Maximum number of tokens per unit: with more room for each, the shortest list always fits."""


@dataclass(frozen=True)
class ListPieces(Pieces):
    """A question about a list of words; `draw_list` draws the units of a list of about as many words as requested."""

    draw_list: Callable[[int], list[str]] = lambda num_words: []


@dataclass(frozen=True, kw_only=True)
class _RulerWords(RulerTask):
    """A question about the frequencies of words in a list, which is as long as the prompt allows and never cut.

    Attributes:
        length: Prompt length in tokens; `fit_to_length` sets it.
    """

    has_depths: bool = False
    length: int = 0

    @property
    def fewest(self) -> int:
        """Minimum number of words for which the question has an answer."""
        raise NotImplementedError

    def make_pieces(
        self, opening: str, question: str, answer: str, words: Sequence[str], draw_list: Callable[[int], list[str]]
    ) -> ListPieces:
        """Make a question with the words to name; `prompts` adds the list."""
        questions = (QuestionText(f"\nQuestion: {question}", answer, required=tuple(words)),)
        return ListPieces(opening, repeat("\n"), (), questions, padding="\n", draw_list=draw_list)

    def _shuffle(self, units: list[str]) -> list[str]:
        """Shuffle a list, the same for all samples of the same size as in RULER."""
        random.Random(self.seed).shuffle(units)
        return units

    @override
    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        return dataclasses.replace(self, length=length)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Count the tokens of a question with the shortest list that has an answer."""
        assert isinstance(pieces, ListPieces)
        size = super().size(pieces, encoder)
        is_safe = self.length - size > _MOST_TOKENS * self.fewest
        return size if is_safe else size + _count_tokens(pieces.draw_list(self.fewest), encoder)

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build one question about the longest list that fits."""
        assert isinstance(pieces, ListPieces)
        room = length - super().size(pieces, encoder)
        best, size = pieces.draw_list(self.fewest), 0
        num_words = max(self.fewest, room // 8)
        for _ in range(_TRIES):  # Words have different numbers of tokens, so the maximum is searched for.
            units = pieces.draw_list(num_words)
            tokens = _count_tokens(units, encoder)
            if size < tokens <= room:
                best, size = units, tokens
            num_words = max(self.fewest, int(num_words * room / tokens))
        pieces = dataclasses.replace(pieces, haystack=chain(best, repeat("\n")))
        return super().prompts(pieces, encoder, length, depths, rng)


def _count_tokens(units: Sequence[str], encoder: Encoder) -> int:
    return sum(map(len, encoder.encode_pieces(units)))


@dataclass(frozen=True, kw_only=True)
class RulerCommonWords(_RulerWords):
    """Name the ten most common words of a numbered list, after one solved example."""

    name: str = "ruler-cwe"
    description: str = _DESCRIBED + "the ten most common words of a numbered list."
    answer_room: int = 120
    options: tuple[str, ...] = ("words", "repeat_question")

    @override
    def pieces(self, rng: random.Random) -> ListPieces:
        start = (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often."
        )
        question = (
            "What are the 10 most common words in the above list? Answer: The top 10 words that appear most often in "
            "the list are:"
        )
        example = ""
        if self.length >= _SHORTEST_WITH_EXAMPLE:
            num_words, *times = (40, 10, 3) if self.length >= 4096 else (20, 3, 1)
            words = self._draw_words(rng, num_words)
            listed = "".join(self._list_words(words, *times))
            example = f"{start}{listed}\nQuestion: {question}{_number_words(words[:10])}\n"
        seed = rng.getrandbits(64)

        def draw_list(num_units: int) -> list[str]:
            often, seldom = self._times
            num_others = (num_units - 10 * often) // seldom
            return self._list_words(self._draw_words(random.Random(seed), 10 + num_others), often, seldom)

        common = self._draw_words(random.Random(seed), 10)
        return self.make_pieces(f"{example}{start}", question, _number_words(common), common, draw_list)

    @property
    def fewest(self) -> int:
        """Number of words of a list with ten common words and five others."""
        often, seldom = self._times
        return 10 * often + 5 * seldom

    @property
    def _times(self) -> tuple[int, int]:
        """Number of repetitions of the words to name and of all others: as in RULER, and fewer in short lists."""
        return (30, 3) if self.length >= 4096 else (6, 1) if self.length >= _SHORTEST_WITH_EXAMPLE else (3, 1)

    def _list_words(self, words: Sequence[str], often: int, seldom: int) -> list[str]:
        """Return the units of a list with ten words much more common than all others."""
        first, *others = self._shuffle([*words[:10]] * often + [*words[10:]] * seldom)
        return [f"\n1. {first}", *(f" {number}. {word}" for number, word in enumerate(others, 2))]

    def _draw_words(self, rng: random.Random, count: int) -> list[str]:
        """Draw different words in random order; adjectives are joined to them if there are not enough."""
        known = self.words or PACKAGE_WORDS
        words = rng.sample(known.words, len(known.words))
        used = dict.fromkeys(words)
        while len(words) < count:
            longer = (f"{adjective}-{word}" for adjective in known.adjectives for word in words)
            new = [word for word in dict.fromkeys(longer) if word not in used]
            rng.shuffle(new)
            used |= dict.fromkeys(new)
            words = [*words, *new]
        return words[:count]


def _number_words(words: Sequence[str]) -> str:
    return "".join(f" {number}. {word}" for number, word in enumerate(words, 1))


@dataclass(frozen=True, kw_only=True)
class RulerFrequentWords(_RulerWords):
    """Name the three most frequent coded words; their frequencies follow a Zipf distribution."""

    name: str = "ruler-fwe"
    description: str = _DESCRIBED + "the three most frequent words of a coded text."
    answer_room: int = 50

    @override
    def pieces(self, rng: random.Random) -> ListPieces:
        num_words = max(4, (self.length - type(self).answer_room) // 50)  # The authors' room, in every form.
        words = self._shuffle(sorted(_draw_names(rng, num_words, 6, string.ascii_lowercase)))
        words[0] = "..."  # The most frequent word is noise.

        def draw_list(num_units: int) -> list[str]:
            # The share of the n-th word is that of the zeta distribution with exponent 2: 1 / (ζ(2) n²).
            counts = (int(num_units * 6 / (math.pi * rank) ** 2) for rank in range(1, num_words + 1))
            return self._shuffle([f" {word}" for word, count in zip(words, counts, strict=True) for _ in range(count)])

        return self.make_pieces(
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words.",
            "Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
            "appeared words in the above coded text? Answer: According to the coded text above, the three most "
            "frequently appeared words are:",
            f" {', '.join(words[1:4])}.",
            words[1:4],
            draw_list,
        )

    @property
    def fewest(self) -> int:
        """Minimum number of words that makes the fourth word more common than the fifth."""
        return 53


@dataclass(frozen=True, kw_only=True)
class RulerQuestions(Documents):
    """Answer a question of SQuAD, of the user, or about a random fact, from one of many numbered documents.

    Attributes:
        label: The heading of each document.
        question_set: The questions of the first option, sample by sample from the first; None for the other questions.
        sample: Index of the sample; `draw` sets it.
    """

    name: str = "ruler-qa-1"
    description: str = _DESCRIBED + "a question that one of many documents answers."
    shows: str = "RULER"
    options: tuple[str, ...] = ("squad", "documents", "repeat_question")
    opening: str = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nThe following are given documents.\n\n"
    )
    label: str = "Document {number}:\n"
    document: str = "{text}\n\n"
    ask_for: str = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
        "\n\nQuestion: {question} Answer:"
    )
    ask: str = "fact"
    question_set: QuestionSet | None = None
    sample: int = 0

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the task with the user's questions, one per text as in RULER."""
        return dataclasses.replace(
            self, questions=options.get("questions", ()), question_set=options.get(self.options[0])
        )

    def draw(self, rng: random.Random, sample: int) -> Pieces:
        """Return the text of a sample: the questions of a question set are in the order of the file."""
        return dataclasses.replace(self, sample=sample).pieces(rng)

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        if self.question_set is None:
            return dataclasses.replace(super().pieces(rng), label=self.label)
        known = self.question_set
        chosen = known.questions[self.sample % len(known.questions)]
        question = self.ask_for.replace("{question}", chosen.question)
        return Pieces(
            opening=self.opening,
            haystack=(f"{known.documents[i]}\n\n" for i in self._draw_indices(random.Random(rng.getrandbits(64)))),
            needles=tuple(f"{known.documents[index]}\n\n" for index in chosen.documents),
            questions=(QuestionText(question, f" {chosen.answers[0]}", chosen.answers),),
            padding="\n",
            label=self.label,
        )

    def _draw_indices(self, rng: random.Random) -> Iterator[int]:
        """Yield the related documents, then all others, then all again; each part in random order."""
        assert self.question_set is not None
        known = self.question_set
        chosen = known.questions[self.sample % len(known.questions)]
        count, used = len(known.documents), {*chosen.documents, *chosen.related}
        related = [index for index in chosen.related if index not in chosen.documents]
        yield from rng.sample(related, len(related))
        others = [index for index in range(count) if index not in used]
        yield from rng.sample(others, len(others))
        while True:
            yield from rng.sample(range(count), count)

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return RULER's `string_match_part`: 1 if one of the answers is in the text, else 0."""
        return max(match_substrings(_clean_answer(text), (answer,)) for answer in prompt.answers)


@dataclass(frozen=True, kw_only=True)
class RulerTwoHops(RulerQuestions):
    """Answer a question from two of many documents; one names the subject of the other."""

    name: str = "ruler-qa-2"
    description: str = _DESCRIBED + "a question that two of many documents answer together."
    options: tuple[str, ...] = ("hotpot", "documents", "repeat_question")
    document: str = "{title}\n{text}\n\n"

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
