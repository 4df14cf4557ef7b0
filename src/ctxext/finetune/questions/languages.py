"""Languages of questions: their templates, and the language of a text."""

import functools
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod
from typing import TYPE_CHECKING

from ctxext.data.prose import split_list
from ctxext.files.strict import parse_yaml

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_NUMBER = "number"
_OTHERS = "others.yaml"
_WORD = re.compile(r"[^\W\d_]+")
_LETTER = re.compile(r"[^\W\d_]")
_NUM_SAMPLES, _SAMPLE = 4, 1000
"""Number of samples of a long text, spread evenly, and characters in each."""
_FEWEST = 10
"""Minimum number of words, or of characters in a language without spaces, to recognise a language."""
_SYMBOLS = re.compile(r"[{}\[\]()=<>;_|\\]")
_PROSE, _PER_SYMBOL = 0.08, 2.0
"""Minimum share of function words, and for each symbol of code; the share of symbols is that of all characters."""
_MARGIN = 1.1
"""A language is recognised if its share of function words is this many times that of every other language."""


@dataclass(frozen=True)
class FactForm:
    """The form of a made-up fact, with its question and its answer.

    All three contain slots: {number}, or the name of a slot of the language.
    """

    fact: str
    question: str
    answer: str

    def fill(self, values: Mapping[str, str]) -> "FactForm":
        """Return the form with its slots filled."""
        return FactForm(*(text.format(**values) for text in (self.fact, self.question, self.answer)))


@dataclass(frozen=True)
class Slot:
    """All values of a slot: the combinations of the parts of its form."""

    form: str
    parts: Mapping[str, tuple[str, ...]]

    @property
    def size(self) -> int:
        """Number of values."""
        return prod(map(len, self.parts.values()))

    def sample(self, rng: random.Random, count: int) -> list[str]:
        """Draw different values."""
        return [self._combine(number) for number in rng.sample(range(self.size), count)]

    def _combine(self, number: int) -> str:
        chosen = {}
        for name, words in self.parts.items():
            number, index = divmod(number, len(words))
            chosen[name] = words[index]
        return self.form.format(**chosen)


@dataclass(frozen=True)
class Language:
    """Templates of questions in a language, and the words by which it is recognised.

    Attributes:
        name: Its name in English.
        function_words: Its most frequent words; characters if it has no spaces.
        least_share: Minimum share of these words in a text of the language.
        slots: Values of slots by name.
        facts: Forms of facts.
        openings: Sentences before a text.
        closings: Sentences between a text and the first question.
        quotes: Questions about the continuation of {before}.
        question: Word before a question, for models without a chat template.
        answer: Word before an answer.
        space: Space between words and sentences.
        before: Number of words of a passage in a question, of characters without spaces.
        after: Maximum number of words of its continuation.
    """

    name: str
    function_words: frozenset[str]
    least_share: float
    slots: Mapping[str, Slot]
    facts: tuple[FactForm, ...]
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    quotes: tuple[str, ...]
    question: str
    answer: str
    space: str = " "
    before: int = 7
    after: int = 18

    @property
    def most_facts(self) -> int:
        """Maximum number of facts about different persons, things and topics."""
        return min(slot.size for name, slot in self.slots.items() if name != "word")

    def draw_facts(self, rng: random.Random, count: int) -> list[FactForm]:
        """Draw facts in one to three forms; no two facts have the same person, thing or topic."""
        forms = rng.sample(self.facts, rng.randint(1, 3))
        values = {name: slot.sample(rng, count) for name, slot in self.slots.items() if name != "word"}
        values["word"] = [self.slots["word"].sample(rng, 1)[0] for _ in range(count)]
        values[_NUMBER] = [str(10 + rng.randrange(10 ** rng.choice([2, 3, 4, 4, 5]))) for _ in range(count)]
        return [
            rng.choice(forms).fill({name: drawn[number] for name, drawn in values.items()}) for number in range(count)
        ]

    def split_quote(self, text: str) -> tuple[str, str] | None:
        """Split a sentence into the beginning to quote and its continuation; None if it is too short."""
        words = text.split(" ") if self.space else list(text)
        if len(words) < self.before + self.after // 3:
            return None
        end = self.before + self.after
        return self.space.join(words[: self.before]), self.space.join(words[self.before : end])

    def measure_share(self, words: "_Words") -> float:
        """Return the share of the function words in a text."""
        counts = words.words if self.space else words.letters
        num_words = counts.total()
        return sum(counts[word] for word in self.function_words) / num_words if num_words >= _FEWEST else 0.0


@dataclass(frozen=True)
class _Words:
    """Counts of the words and of the letters of a text, in lower case."""

    words: Counter[str]
    letters: Counter[str]


@functools.cache
def read_languages() -> Mapping[str, Language]:
    """Read the languages of the package by code, English first."""
    from pydantic import TypeAdapter

    reader, languages = TypeAdapter(Language), {}
    files = (file for file in _templates().iterdir() if file.name.endswith(".yaml") and file.name != _OTHERS)
    for file in sorted(files, key=lambda file: (file.name != "en.yaml", file.name)):
        content = parse_yaml(file.read_text(encoding="utf-8"), file.name)
        content["function_words"] = content["function_words"].split()
        for slot in content["slots"].values():
            slot["parts"] = {name: split_list(text) for name, text in slot["parts"].items()}
        languages[file.name.removesuffix(".yaml")] = reader.validate_python(content)
    return languages


@functools.cache
def _read_others() -> Sequence[frozenset[str]]:
    """Read the function words of languages without questions, which are similar to languages with questions."""
    content = parse_yaml((_templates() / _OTHERS).read_text(encoding="utf-8"), _OTHERS)
    return [frozenset(words.split()) for words in content.values()]


def _templates() -> "Traversable":
    return resources.files("ctxext.finetune.questions") / "templates"


def recognise_language(text: str) -> Language | None:
    """Return the language of a text; None for other languages, code and tables."""
    sample = _take_sample(text).lower()
    words = _Words(Counter(_WORD.findall(sample)), Counter(_LETTER.findall(sample)))
    shares = {code: language.measure_share(words) for code, language in read_languages().items()}
    best = max(shares, key=lambda code: shares[code])
    language, share = read_languages()[best], shares.pop(best)
    num_words = max(1, words.words.total())
    others = [sum(map(words.words.__getitem__, other)) / num_words for other in _read_others()]
    num_symbols = len(_SYMBOLS.findall(sample)) / max(1, sum(map(len, sample.split())))
    is_prose = share >= language.least_share and share >= _PROSE + _PER_SYMBOL * num_symbols
    is_clear = share > _MARGIN * max([*shares.values(), *(others if language.space else ())])
    return language if is_prose and is_clear else None


def _take_sample(text: str) -> str:
    """Return a text, or of a long text some places that are spread evenly."""
    if len(text) <= _NUM_SAMPLES * _SAMPLE:
        return text
    step = (len(text) - _SAMPLE) // (_NUM_SAMPLES - 1)
    return "\n".join(text[number * step : number * step + _SAMPLE] for number in range(_NUM_SAMPLES))
