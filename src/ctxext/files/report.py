"""What this package uses of a report.json."""

from collections.abc import Mapping
from typing import Annotated, Any

from ctxext.files.schema import Limits, Schema
from ctxext.files.schemas import Length, Number, Offset, Word

Name = Annotated[str, Limits(max_length=500, pattern=r"^[^\x00-\x1f\x7f-\x9f<>|]*$")]
"""A name that is shown on a page."""

Figure = Annotated[float, Limits(ge=0)]
Fraction = Annotated[float, Limits(ge=0, le=1)]


class Cell(Schema):
    """Right answers of one task at one length and depth; an answer of several parts may be right in part."""

    task: Name
    length: Length
    depth: Fraction | None = None
    correct: Annotated[float, Limits(ge=0, finite=True)]
    samples: Offset
    share: Fraction
    texts: list[list[Figure]] | None = None

    @classmethod
    def missing(cls, content: Mapping[str, Any]) -> str:
        """Texts are said of every question: a number, how many answers are correct, and how many there are."""
        texts = content.get("texts")
        is_whole = texts is None or (
            all(len(text) == 3 and text[1] <= text[2] for text in texts)
            and sum(text[2] for text in texts) == content["samples"]
        )
        return "" if is_whole else "the texts of its questions"


class Point(Schema):
    """The loss of a stretch of text."""

    start: Offset
    end: Offset
    loss: Number
    count: Offset


class AtLength(Schema):
    """The perplexity over the first so many tokens."""

    perplexity: Figure


class Perplexity(Schema):
    """The loss on long text."""

    task: Name = "perplexity"
    length: Length
    curve: list[Point]
    lengths: dict[Annotated[str, Limits(pattern=r"^\d{1,10}$")], AtLength]


class Against(Schema):
    """The difference from the source."""

    loss: Number
    low: Number | None
    high: Number | None
    ratio: Figure


class Short(Schema):
    """The loss inside the trained window."""

    length: Length
    loss: Number
    perplexity: Figure
    against: Against | None = None


class Reach(Schema):
    """An effective length and its interval; null is none, as too little is right at the shortest length."""

    length: Length | None
    low: Length | None
    high: Length | None

    @classmethod
    def missing(cls, content: Mapping[str, Any]) -> str:
        """A length has its interval."""
        is_whole = content["length"] is None or content["high"] is not None
        return "" if is_whole else "a length with its interval"


class Effective(Schema):
    """Effective lengths by task."""

    tasks: dict[Name, Reach]


class Entry(Schema):
    """One model."""

    name: Name
    summary: Name
    kind: Name = "causal"
    digest: Name
    trained_length: Length | None = None
    context_length: Length | None = None
    cells: list[Cell]
    perplexity: Perplexity | None
    short: Short | None
    effective: Effective | None = None
    harness: dict[Name, dict[Name, Number]] | None = None


class GivenFile(Schema):
    """A file that was given, as its reader knows it."""

    name: Annotated[str, Limits(min_length=1, max_length=500)]


Given = GivenFile | Annotated[str, Limits(min_length=1, max_length=10_000)] | None
"""A file, or where a data set is."""


class Settings(Schema):
    """What was asked."""

    tasks: list[Name]
    lengths: list[Length] | None = None
    depths: list[Fraction]
    samples: Length
    seed: int
    generate: bool
    num_needles: Length | None = None
    kv_ids: Name | None = None
    filler: Name | None = None
    stride: Length | None = None
    haystack: Given = None
    data: Given = None
    documents: Given = None
    harness: list[Name] | None = None


class Loading(Schema):
    """How the models were loaded."""

    dtype: Name | None = None
    engine: Name | None = None
    engine_arguments: dict[str, Any] | None = None


class Report(Schema):
    """report.json."""

    settings: Settings
    loading: Loading | None = None
    models: list[Entry]
    versions: dict[str, Word | None]
