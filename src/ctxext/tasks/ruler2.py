"""RULER v2's twelve tasks: numbers of keys, questions of MMLU and documents of HotpotQA, to find, copy and use.

nemo_skills/dataset/ruler2 of https://github.com/NVIDIA-NeMo/Skills (Apache-2.0): prepare_niah.py, prepare_mmlu.py,
prepare_qa.py, prepare_data.py and prepare_init.py. A prompt is one user message, and its length is the number of tokens
without the answer. Differences:

- Material: keys are words of the package unless `--words` contains others. Documents that HotpotQA repeats are one
  document, in the order of the file; NVIDIA's order changes with every run.
- Length: each prompt is the longest for its own question. NVIDIA finds one size for all, and makes it smaller for
  prompts that are too long. The chat template and the start tokens count, and NVIDIA's do not.
- Draws: each sample has separate random numbers. The questions of MMLU to find are in an order of `--seed`.
- Numbers of questions and documents are all different; NVIDIA does not exclude equal ones. A key is not in the filler.
- Short lengths: prompts have at least as many questions or documents as the task needs, NVIDIA's 5 or 10.
- Answers have at most 1,024 tokens, or those of `--reason`.
"""

import functools
import random
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from typing_extensions import override

from ctxext.data.encoding import Encoder, no_tokens
from ctxext.data.prompt import Pieces, Prompt, make_message_prompt, too_short
from ctxext.data.prose import random_number
from ctxext.errors import CtxextError
from ctxext.tasks.base import RetrievalTask
from ctxext.tasks.published import PublishedTask
from ctxext.tasks.ruler import frame_values, state_value
from ctxext.tasks.ruler2_files import (
    DOWNLOAD,
    ChoiceQuestion,
    HopQuestion,
    read_choice_questions,
    read_documents,
    read_hop_questions,
)
from ctxext.tasks.ruler2_scores import SCORES
from ctxext.tasks.ruler_files import PACKAGE_WORDS, Words

_Unit = TypeVar("_Unit")
_BLOCK = 16
_NUMBER = "1234567"
"""A number for counting tokens."""

_RANKS = ("1st", "2nd", "3rd", "4th")
_EXAMPLES = "Here are some examples to help you understand the task:"
_TASK = "Here is the actual task you need to solve:"


@dataclass(frozen=True, kw_only=True)
class Seeds(Pieces):
    """The number of a sample and the seed of its draws, instead of the pieces of a text."""

    sample: int
    seed: int

    def make_rng(self, stream: str) -> random.Random:
        """Return the random numbers of one part of the prompt."""
        return random.Random(f"{self.seed} {stream}")


class Written(NamedTuple):
    """The text of a prompt, and the expected texts of its answer."""

    text: str
    expected: tuple[str, ...]


class _Haystack(Generic[_Unit]):
    """The units of a haystack with their numbers of tokens; more are drawn as needed.

    Args:
        units: Endless units.
        state: Returns the text of a unit.
        encoder: The tokenizer.
    """

    def __init__(self, units: Iterator[_Unit], state: Callable[[_Unit], str], encoder: Encoder) -> None:
        self._more, self._state, self._encoder = units, state, encoder
        self._units, self._ends = list[_Unit](), [0]

    def _draw(self) -> None:
        units = [*islice(self._more, _BLOCK)]
        texts = [self._state(unit) for unit in units]
        sizes = self._encoder.count_tokens(texts)
        if not any(sizes):
            raise no_tokens(texts[0])
        self._units += units
        self._ends += [*accumulate(sizes, initial=self._ends[-1])][1:]

    def take(self, count: int) -> Sequence[_Unit]:
        """Return the first units."""
        while len(self._units) < count:
            self._draw()
        return self._units[:count]

    def count_tokens(self, count: int) -> int:
        """Count the tokens of the first units."""
        return self._ends[count]

    def count_units(self, room: int) -> int:
        """Count the first units that have at most `room` tokens."""
        while self._ends[-1] <= room:
            self._draw()
        return max(0, bisect_right(self._ends, room) - 1)


@dataclass(frozen=True, kw_only=True)
class Ruler2Task(RetrievalTask, Generic[_Unit]):
    """A task of RULER v2. Its prompt has the largest number of haystack units that fit into the length.

    Attributes:
        match: The name of the score, a key of `SCORES`.
        fewest: Minimum number of haystack units.
        length: The length in tokens that `fit_to_length` was called with.
    """

    shows: str = "RULER v2"
    is_written: bool = True
    is_exact: bool = False
    has_one_form: bool = True
    has_depths: bool = False
    answer_room: int = 1024
    match: str = "all"
    fewest: int = 1
    length: int = 0

    @abstractmethod
    def draw_units(self, seeds: Seeds) -> Iterator[_Unit]:
        """Yield endless haystack units."""

    @abstractmethod
    def state_unit(self, unit: _Unit) -> str:
        """Return the text of a unit, for counting its tokens."""

    @abstractmethod
    def write(self, seeds: Seeds, units: Sequence[_Unit]) -> Written:
        """Write a prompt with some haystack units."""

    @override
    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        return replace(self, length=length)

    @override
    def draw(self, rng: random.Random, sample: int) -> Pieces:
        return Seeds("", iter(()), (), (), sample=sample, seed=rng.getrandbits(64))

    @override
    def pieces(self, rng: random.Random) -> Pieces:
        return self.draw(rng, 0)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Return an upper limit of the number of tokens of a prompt and its answer.

        Raises:
            CtxextError: The shortest prompt is longer than the length.
        """
        assert isinstance(pieces, Seeds)
        shortest = self.write(pieces, [*islice(self.draw_units(pieces), self.fewest)])
        size = len(encoder.encode_message(shortest.text))
        if 0 < self.length < size:
            raise too_short(self.length, size, f'The task "{self.name}"')
        return max(self.length, size) + self.answer_room

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build the longest prompt of at most `length` tokens.

        The tokens of a prompt are estimated from those of its units. The estimate is corrected by the last prompt
        until it stays the same.
        """
        assert isinstance(pieces, Seeds)
        haystack = _Haystack(self.draw_units(pieces), self.state_unit, encoder)
        tried: dict[int, tuple[list[int], Written]] = {}
        count = self.fewest
        while count not in tried:
            written = self.write(pieces, haystack.take(count))
            ids = encoder.encode_message(written.text)
            tried[count] = ids, written
            room = length - len(ids) + haystack.count_tokens(count)
            count = max(self.fewest, haystack.count_units(room))
        fitting = [count for count, (ids, _) in tried.items() if len(ids) <= length]
        if not fitting:
            raise too_short(length, len(tried[self.fewest][0]), f'The task "{self.name}"')
        _, written = tried[max(fitting)]
        prompt = make_message_prompt(encoder, written.text, self.answer_room, written.expected)
        return [prompt for _ in depths]

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return the score of a generated answer by NVIDIA's rule for the task."""
        return SCORES[self.match].compute(text, prompt.answers)


@dataclass(frozen=True, kw_only=True)
class Ruler2Values(Ruler2Task[tuple[str, str]]):
    """Name the values of a key among other keys with as many values each.

    Attributes:
        num_values: Number of values of each key.
        words: The words of keys; None for those of the package.
    """

    options: tuple[str, ...] = ("words",)
    num_values: int = 1
    words: Words | None = None

    def _draw_needle(self, seeds: Seeds) -> tuple[str, list[str]]:
        rng = seeds.make_rng("needle")
        return self._draw_key(rng), [random_number(rng, 10) for _ in range(self.num_values)]

    def _draw_key(self, rng: random.Random) -> str:
        return (self.words or PACKAGE_WORDS).draw_key(rng)

    @override
    def draw_units(self, seeds: Seeds) -> Iterator[tuple[str, str]]:
        rng, (needle, _) = seeds.make_rng("haystack"), self._draw_needle(seeds)
        while True:
            if (key := self._draw_key(rng)) != needle:
                yield key, random_number(rng, 10)

    @override
    def state_unit(self, unit: tuple[str, str]) -> str:
        return f"{state_value('numbers', *unit)}\n"

    @override
    def write(self, seeds: Seeds, units: Sequence[tuple[str, str]]) -> Written:
        rng, (needle, values) = seeds.make_rng("layout"), self._draw_needle(seeds)
        keys = [key for key, _ in units[: -(-len(units) // self.num_values)]] * self.num_values
        stated = [(key, value) for key, (_, value) in zip(keys, units, strict=False)]
        rng.shuffle(stated)
        places = sorted(rng.sample(range(len(stated)), len(values)), reverse=True)
        for place, value in zip(places, values, strict=True):
            stated.insert(place, (needle, value))
        return write_values(stated, needle)


def write_values(stated: Sequence[tuple[str, str]], query: str) -> Written:
    """Write the question about the values of a key after all keys and values."""
    values = tuple(value for key, value in stated if key == query)
    kind, pronoun = ("numbers", "them") if len(values) > 1 else ("number", "it")
    opening, question = frame_values(kind, query, are_several=len(values) > 1, pronoun=pronoun)
    lines = (state_value("numbers", key, value) for key, value in stated)
    return Written("\n".join((opening, *lines)) + question, values)


def _draw_numbers(rng: random.Random, count: int, times: int = 1) -> list[str]:
    """Draw numbers of seven digits in random order, each of them so many times."""
    numbers = rng.sample(range(10**6, 10**7), -(-count // times)) * times
    rng.shuffle(numbers)
    return [str(number) for number in numbers[:count]]


def _draw_in_turn(rng: random.Random, entries: Sequence[_Unit]) -> Iterator[_Unit]:
    """Yield all entries in random order, then all again; a shuffled list of all would take longer than a prompt."""
    while True:
        used = set[int]()
        while len(used) < len(entries):
            number = rng.randrange(len(entries))
            if number not in used:
                used.add(number)
                yield entries[number]


@functools.lru_cache(maxsize=4)
def _shuffle_range(seed: int, count: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


@dataclass(frozen=True, kw_only=True)
class Ruler2Published(Ruler2Task[_Unit], PublishedTask):
    """A task with material from the user's folder.

    Attributes:
        opening: The text before the questions or documents.
        ask: The question after them, with the names of its values in braces.
        expects: What the answer should contain, by the name that `arrange` uses.
        ruler2: The folder with MMLU and HotpotQA.
        seed: The seed of the order of questions.
    """

    download: ClassVar[str] = DOWNLOAD

    options: tuple[str, ...] = ("ruler2",)
    opening: str
    ask: str
    expects: str
    ruler2: Path | None = None
    seed: int = 0

    def check_sample(self, sample: int, count: int) -> int:
        """Return the number of a sample; raise if there are fewer questions."""
        if sample >= count:
            message = f'"{self.find_folder()}" contains {count} questions for "{self.name}".'
            raise CtxextError(message, hint=f"Samples times depths must not exceed that number: --samples {count}")
        return sample


class Numbered(NamedTuple):
    """A question of a text with its number."""

    number: str
    question: ChoiceQuestion

    def __str__(self) -> str:
        return f"Question {self.number}: {self.question.text}"


@dataclass(frozen=True, kw_only=True)
class Ruler2Questions(Ruler2Published[ChoiceQuestion]):
    """Copy or answer a question of MMLU's test among questions of its training split.

    Attributes:
        example: A solved example, for questions of the haystack; empty for no examples.
        num_examples: Number of examples.
        num_alike: Number of questions with the same number; the question to copy is the n-th of them.
    """

    example: str = ""
    num_examples: int = 0
    num_alike: int = 1

    @property
    def _questions(self) -> tuple[ChoiceQuestion, ...]:
        return read_choice_questions(tuple(self.find("all/test*")))

    @override
    def draw_units(self, seeds: Seeds) -> Iterator[ChoiceQuestion]:
        questions = read_choice_questions(tuple(self.find("all/auxiliary_train*")))
        return _draw_in_turn(seeds.make_rng("haystack"), questions)

    @override
    def state_unit(self, unit: ChoiceQuestion) -> str:
        return f"{Numbered(_NUMBER, unit)}\n\n"

    @override
    def write(self, seeds: Seeds, units: Sequence[ChoiceQuestion]) -> Written:
        rng, count = seeds.make_rng("layout"), len(self._questions)
        needle = self._questions[_shuffle_range(self.seed, count)[self.check_sample(seeds.sample, count)]]
        *numbers, number = _draw_numbers(rng, len(units) + 1, self.num_alike)
        numbered = [Numbered(*pair) for pair in zip(numbers, units, strict=True)]
        examples = numbered[: self.num_examples]
        rng.shuffle(numbered)
        place = rng.randint(0, len(numbered))
        numbered.insert(place, Numbered(number, needle))
        return self.arrange(numbered, place, examples)

    def arrange(self, numbered: Sequence[Numbered], place: int, examples: Sequence[Numbered]) -> Written:
        """Write a prompt about the question at a place."""
        needle = numbered[place]
        alike = [entry for entry in numbered if entry.number == needle.number]
        rank = _RANKS[sum(entry.number == needle.number for entry in numbered[:place])]
        ask = self.ask.format(number=needle.number, rank=rank)
        if examples:
            solved = (
                self.ask.format(number=entry.number) + self.example.format(question=entry, letter=entry.question.letter)
                for entry in examples
            )
            ask = "\n\n".join((_EXAMPLES, *solved, f"{_TASK}\n\n{ask}"))
        expected = {
            "question": [needle.question.text],
            "alike": [entry.question.text for entry in alike],
            "letter": [needle.question.letter],
        }
        return Written("\n\n".join((self.opening, *map(str, numbered), ask)), tuple(expected[self.expects]))


@dataclass(frozen=True, kw_only=True)
class Ruler2Documents(Ruler2Published[str]):
    """Find the documents of a question of HotpotQA among those of its training split, or answer it."""

    @override
    def draw_units(self, seeds: Seeds) -> Iterator[str]:
        documents = read_documents(tuple(self.find("distractor/train*")))
        return _draw_in_turn(seeds.make_rng("haystack"), documents)

    @override
    def state_unit(self, unit: str) -> str:
        return f"{_state_document(_NUMBER, unit)}\n\n"

    @override
    def write(self, seeds: Seeds, units: Sequence[str]) -> Written:
        rng = seeds.make_rng("layout")
        questions = read_hop_questions(tuple(self.find("distractor/validation*")))
        question = questions[self.check_sample(seeds.sample, len(questions))]
        documents = [*question.documents, *question.distractors, *units]
        numbered = [*zip(_draw_numbers(rng, len(documents)), documents, strict=True)]
        golds = numbered[: len(question.documents)]
        rng.shuffle(numbered)
        return self.arrange(numbered, golds, question)

    def arrange(
        self, numbered: Sequence[tuple[str, str]], golds: Sequence[tuple[str, str]], question: HopQuestion
    ) -> Written:
        """Write a prompt with numbered documents, and those that support the answer in the order of the file."""
        documents = (_state_document(number, text) for number, text in numbered)
        expected = {
            "first": [golds[0][0]],
            "numbers": [number for number, _ in golds],
            "answer": [question.answer],
        }
        ask = self.ask.format(document=golds[0][1], question=question.question)
        return Written("\n\n".join((self.opening, *documents, ask)), tuple(expected[self.expects]))


def _state_document(number: str, text: str) -> str:
    return f"Document {number}:\n{text}"


_COPY = "Below are some questions. I will ask you to copy one of them. Please copy and paste the question you find."
_COPY_ALL = (
    "Below are some questions. I will ask you to copy some of them. Please copy and paste the questions you find."
)
_SOLVE = (
    "Below are some questions. I will ask you to solve one of them. Please solve the question you find and make sure "
    "to put the answer (and only answer) inside \\boxed\\{\\}."
)
_FIND_TEXT = (
    "Below are some documents. I will give you a text at the end. Please find the document index of the text. Only "
    "give me the index without any document contents."
)
_FIND_HELP = (
    "Below are some documents. I will give you a question at the end. Please find the index of the most relevant "
    "document that can help answer the question. Only give me the index without any document contents."
)
_ANSWER = (
    "Below are some documents. I will ask you to answer a question based on the documents. Please answer the question."
)
_SOLUTION = "\nSolution: \\boxed{{{letter}}}"
_SOLVED = {"match": "multichoice", "opening": _SOLVE, "expects": "letter", "num_examples": 5, "fewest": 5}
_ALIKE = {"num_alike": 4, "fewest": 3}


def _make_task(make: Callable[..., RetrievalTask], name: str, answer: str, **settings: Any) -> RetrievalTask:
    scored = SCORES[settings["match"]].description
    return make(name=f"ruler2-{name}", description=f"RULER v2: {answer}.", scored=scored, **settings)


RULER2 = (
    _make_task(Ruler2Values, "mk-niah-basic", "the number of a key among other keys", match="all"),
    _make_task(
        Ruler2Questions,
        "mk-niah-easy",
        "a copy of the question with a number",
        match="all",
        opening=_COPY,
        ask="Please copy the Question {number} from the context.",
        expects="question",
    ),
    _make_task(
        Ruler2Questions,
        "mk-niah-medium",
        "a copy of the question with a number, and its answer",
        ask="Please copy the Question {number} from the context and then solve it with an answer from A, B, C, D.",
        example=f"\n{{question}}{_SOLUTION}",
        **_SOLVED,
    ),
    _make_task(
        Ruler2Questions,
        "mk-niah-hard",
        "the answer of the question with a number",
        ask="Please solve the Question {number} from the context with an answer from A, B, C, D.",
        example=_SOLUTION,
        **_SOLVED,
    ),
    _make_task(
        Ruler2Values,
        "mv-niah-basic",
        "the four numbers of a key among other keys",
        match="all",
        num_values=4,
        fewest=4,
    ),
    _make_task(
        Ruler2Questions,
        "mv-niah-easy",
        "copies of all questions with a number",
        match="all",
        opening=_COPY_ALL,
        ask="Please find and copy all the Question {number} from the context.",
        expects="alike",
        **_ALIKE,
    ),
    _make_task(
        Ruler2Questions,
        "mv-niah-medium",
        "copies of all questions with a number, and of the n-th at the end",
        match="2steps",
        opening=_COPY,
        ask="Please first copy all the Question {number} from the context and then copy the {rank} (1 indexed) "
        "Question {number} at the end.",
        expects="question",
        **_ALIKE,
    ),
    _make_task(
        Ruler2Questions,
        "mv-niah-hard",
        "a copy of the n-th question with a number",
        match="all",
        opening=_COPY,
        ask="Please copy the {rank} (1 indexed) Question {number} from the context.",
        expects="question",
        **_ALIKE,
    ),
    _make_task(
        Ruler2Documents,
        "qa-basic",
        "the number of a document",
        match="part",
        opening=_FIND_TEXT,
        ask="Text: {document}\nMost relevant document index:",
        expects="first",
    ),
    _make_task(
        Ruler2Documents,
        "qa-easy",
        "the number of a document that answers a question",
        match="part",
        opening=_FIND_HELP,
        ask="Question: {question}\nIndex of the most relevant document that can help answer the question:",
        expects="numbers",
    ),
    _make_task(
        Ruler2Documents,
        "qa-medium",
        "copies of the documents that answer a question, and the answer",
        match="part",
        opening=_ANSWER,
        ask="Please first find and copy paste the documents relevant to the following question and then answer it "
        "based on the documents you find.\n\nQuestion: {question}",
        expects="answer",
    ),
    _make_task(
        Ruler2Documents,
        "qa-hard",
        "the answer of a question from two documents",
        match="part",
        opening=_ANSWER,
        ask="Please answer the following question based on the documents.\n\nQuestion: {question}",
        expects="answer",
    ),
)
"""The twelve tasks."""
