"""Schemas of the files of tasks, and their readers.

Readers import this module when they are called: importing pydantic takes a third of the time of `ctxext eval --help`.
"""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypeVar

from pydantic import AfterValidator, FailFast, Field, Strict, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from ctxext.errors import CtxextError
from ctxext.files.content import open_regular
from ctxext.files.schemas import describe_fault
from ctxext.files.strict import parse_entry, parse_json, read_text

_T = TypeVar("_T")

_LARGEST = 1 << 26
"""Maximum number of bytes of a JSON file: the questions of HotpotQA have 47 million."""
_LONGEST_LINE = 1 << 23
"""Maximum number of bytes of a line of JSON lines."""
_MOST_VALUES = 3_000_000
"""Maximum number of commas and brackets of a JSON file: a value takes up to 80 bytes of memory."""
_LONGEST_TEXT = 1 << 18
"""Maximum number of characters of a passage, which the tokenizer reads at once."""
_LONGEST_WORD = 50


def _check_text(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("blank", "text that is not empty")
    return text


def _check_word(word: str) -> str:
    if len(word.strip()) > _LONGEST_WORD or "\n" in word.strip():
        raise PydanticCustomError("long_word", "a word of at most {most} characters", {"most": _LONGEST_WORD})
    return word


def _check_template(template: str) -> str:
    """Raise if a template has other fields than plain {haystack} and {question}, each of them at least once."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise PydanticCustomError("template", "balanced braces") from error
    fields = [part for part in parts if part[1] is not None]
    if any(spec or conversion for _, _, spec, conversion in fields) or {part[1] for part in fields} != TEMPLATE_FIELDS:
        raise PydanticCustomError("template", "plain {{haystack}} and {{question}} as its only fields")
    return template


def _check_spans(spans: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    ends = [0, *(end for _, end in spans)]
    if any(not before <= begin < end for before, (begin, end) in zip(ends, spans, strict=False)):
        raise PydanticCustomError("spans", "pairs of begin and end in order")
    return spans


TEMPLATE_FIELDS = {"haystack", "question"}


class _FailFast(FailFast):
    """Stop at the first wrong entry of a list, as each error takes much memory; pydantic's class has no hash."""

    __hash__ = object.__hash__


_FIRST = _FailFast()
Many = Annotated[list[_T], _FIRST]
Few = Annotated[list[_T], _FIRST, Field(min_length=1, max_length=1000)]
String = Annotated[str, StringConstraints(max_length=_LONGEST_TEXT)]
Text = Annotated[String, AfterValidator(_check_text)]
Word = Annotated[str, AfterValidator(_check_word)]
Number = Annotated[int, Strict(), Field(ge=0, le=1 << 53)]
Bool = Annotated[bool, Strict()] | None


class Context(TypedDict):
    """A document of a question."""

    title: String
    text: String
    isgold: NotRequired[Bool]
    hasanswer: NotRequired[Bool]


class DocumentQuestion(TypedDict):
    """A line of the questions of Lost in the Middle."""

    question: Text
    answers: Few[Text]
    ctxs: Few[Context]


class NeedleArguments(TypedDict):
    """A test of a needle set of NoLiMa."""

    input_args: Many[String]
    gold_answers: NotRequired[Few[Text] | None]


class NeedleSet(TypedDict):
    """A needle of NoLiMa with its questions and tests."""

    id: Annotated[str, StringConstraints(pattern=r"^[0-9]{4}")]
    needle: Text
    questions: Annotated[dict[str, Text], Field(min_length=1, max_length=32)]
    tests: Annotated[dict[str, NeedleArguments], Field(min_length=1, max_length=32)]
    character_set: NotRequired[Few[Text] | None]
    task_template: NotRequired[Annotated[String, AfterValidator(_check_template)] | None]
    distractors: NotRequired[Any]


class FactsRow(TypedDict):
    """A record of BABILong."""

    input: str
    question: String
    target: Text


class FactsPrompt(TypedDict):
    """The prompts of a task of BABILong."""

    instruction: String
    examples: String
    post_prompt: String


class ChoiceQuestion(TypedDict):
    """A question of LongBench v2; only the tokenizer limits the size of its text."""

    difficulty: Literal["easy", "hard"]
    length: Literal["short", "medium", "long"]
    question: Text
    choice_A: String
    choice_B: String
    choice_C: String
    choice_D: String
    answer: Literal["A", "B", "C", "D"]
    context: Annotated[str, AfterValidator(_check_text)]


class Essays(TypedDict):
    """The prose of RULER."""

    text: str


class SquadAnswer(TypedDict):
    """An answer of SQuAD."""

    text: Text


class SquadQuestion(TypedDict):
    """A question of SQuAD."""

    question: String
    answers: Many[SquadAnswer]
    is_impossible: NotRequired[Bool]


class SquadParagraph(TypedDict):
    """A paragraph of SQuAD with its questions."""

    context: Text
    qas: Many[SquadQuestion]


class SquadArticle(TypedDict):
    """An article of SQuAD."""

    paragraphs: Many[SquadParagraph]


class Squad(TypedDict):
    """The file of SQuAD."""

    data: Many[SquadArticle]


class HotpotQuestion(TypedDict):
    """A question of HotpotQA with its paragraphs."""

    question: String
    answer: Text
    context: Few[tuple[String, Many[String]]]
    supporting_facts: NotRequired[Many[tuple[str, int]] | None]


class HotpotDocuments(TypedDict):
    """The documents of a question of HotpotQA in the form of the Hub."""

    title: Few[String]
    sentences: Few[Many[String]]


class HotpotTitles(TypedDict):
    """The titles of the documents that support an answer."""

    title: Many[String]


class HotpotRow(TypedDict):
    """A record of HotpotQA in the form of the Hub."""

    question: String
    answer: Text
    context: HotpotDocuments
    supporting_facts: HotpotTitles


class MmluRow(TypedDict):
    """A record of MMLU."""

    question: String
    choices: Annotated[list[String], _FIRST, Field(min_length=4, max_length=4)]
    answer: Annotated[int, Strict(), Field(ge=0, le=3)]


class KeyTokens(TypedDict):
    """A line of a file of key tokens."""

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    characters: Number
    evaluator: Annotated[str, StringConstraints(max_length=10_000)]
    tokens: Number
    window: Number
    step: Number
    first: Number
    spans: Annotated[tuple[tuple[Number, Number], ...], _FIRST, AfterValidator(_check_spans)]


DOCUMENT_QUESTION = TypeAdapter(DocumentQuestion)
NEEDLE_SETS = TypeAdapter(Annotated[list[NeedleSet], _FIRST, Field(min_length=1, max_length=256)])
FACTS_ROW = TypeAdapter(FactsRow)
FACTS_PROMPT = TypeAdapter(FactsPrompt)
CHOICE_QUESTION = TypeAdapter(ChoiceQuestion)
ESSAYS = TypeAdapter(Essays)
WORD_LIST = TypeAdapter(Many[Word])
WORD_LISTS = TypeAdapter(dict[str, Many[Word]])
SQUAD = TypeAdapter(Squad)
HOTPOT = TypeAdapter(Many[HotpotQuestion])
HOTPOT_ROW = TypeAdapter(HotpotRow)
MMLU_ROW = TypeAdapter(MmluRow)
KEY_TOKENS = TypeAdapter(KeyTokens)


def check_entry(content: Any, schema: TypeAdapter[_T], place: str, hint: str) -> _T:
    """Return content with the fields of a schema; raise with the place and the first wrong field."""
    try:
        return schema.validate_python(content)
    except ValidationError as error:
        raise CtxextError(describe_fault(error, place), hint=hint) from None


def read_json(path: Path) -> Any:
    """Read a JSON file, of a limited size because values take many times the memory of their text."""
    text = read_text(path, _LARGEST)
    if text.count(",") + text.count("[") + text.count("{") > _MOST_VALUES:
        raise CtxextError(f'"{path}" contains more than {_MOST_VALUES} values.', hint="Split it into several files.")
    return parse_json(text, str(path))


def read_entries(path: Path, schema: TypeAdapter[_T], hint: str) -> Iterator[tuple[str, _T]]:
    """Yield the entries of a file of JSON lines with their places; a line ends only with a line feed."""
    try:
        with open_regular(path) as file:
            yield from _read_lines(file, path, schema, hint)
    except OSError as error:
        raise CtxextError(f'"{path}" cannot be read: {error.strerror}.', hint="Check its path.") from error


def _read_lines(file: BinaryIO, path: Path, schema: TypeAdapter[_T], hint: str) -> Iterator[tuple[str, _T]]:
    number = 0
    while line := file.readline(_LONGEST_LINE + 1):
        number += 1
        place = f'Line {number} of "{path}"'
        if len(line) > _LONGEST_LINE:
            raise CtxextError(f"{place} is longer than {_LONGEST_LINE} bytes.", hint=hint)
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise CtxextError(f"{place} is not valid UTF-8: invalid byte at position {error.start}.") from error
        if text:
            yield place, check_entry(parse_entry(text, place), schema, place, hint)
