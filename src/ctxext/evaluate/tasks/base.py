"""What a task is, and the unit in which its work is handed out, done and written down."""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from typing_extensions import Self

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, encode_parts, lay_out

if TYPE_CHECKING:
    from ctxext.evaluate.model import LoadedModel

Record = dict[str, Any]
"""One line of results: `task`, `length`, `depth`, the `samples` it covers and what was measured for each."""

Scores = Iterator[tuple[int, Sequence[float]]]
"""The number of a depth, and for each question whether it is answered, or which share of a list."""


class Key(NamedTuple):
    """One sample of one cell."""

    task: str
    length: int
    depth: float | None
    sample: int


def keys_of(record: Record) -> list[Key]:
    """The samples that a record covers."""
    return [Key(record["task"], record["length"], record["depth"], sample) for sample in record["samples"]]


class Work(Protocol):
    """Some samples that run together.

    What is measured for one key must not depend on which other keys are wanted.
    """

    @property
    def label(self) -> str:
        """What the progress line says."""
        ...

    @property
    def keys(self) -> list[Key]:
        """Everything it can measure."""
        ...

    def run(self, loaded: "LoadedModel", wanted: set[Key]) -> Iterator[Record]:
        """Measure what is wanted, one record per cell."""
        ...


class Task(ABC):
    """What every task states of itself.

    Attributes:
        name: On the command line and in reports.
        description: What a report says above its figures.
        shows: What its figures show; a model card says it where they are missing.
        kinds: Which kinds of models can be asked, of `checkpoint_info.KINDS`.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    shows: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ("causal",)


class RetrievalTask(Task):
    """A question about one place in a long text. Implementations are frozen dataclasses: their fields are settings.

    Attributes:
        scored: How an answer is found right, in a few words.
        is_written: Whether the model always writes its answers freely.
        answer_room: Tokens that it may write then; 0 where the answer's own length is the room.
        has_depths: Whether there is one place that is asked for. Where what is asked for lies everywhere, as many
            questions are asked of a length as other tasks ask at all their depths, and a record's depth is None.
    """

    scored: ClassVar[str] = "Exact match"
    is_written: ClassVar[bool] = False
    answer_room: ClassVar[int] = 0
    has_depths: ClassVar[bool] = True

    @abstractmethod
    def pieces(self, rng: random.Random) -> Pieces:
        """The text of one question; the same for the same state of `rng`."""

    def score(
        self, loaded: "LoadedModel", questions: Sequence[Sequence[Prompt]], depths: Sequence[int], *, generate: bool
    ) -> Scores:
        """Whether each question is answered at each of some depths: by exact match, if a task says nothing else.

        Args:
            loaded: The model.
            questions: For each question its prompts, one per depth; all of the same length.
            depths: Numbers of the depths that are wanted.
            generate: Let the model write its answers instead of one teacher-forced forward.
        """
        from ctxext.evaluate.scoring.exact_match import score_depths
        from ctxext.evaluate.scoring.generation import generate_exact, generate_lists

        if self.is_written:
            return generate_lists(loaded, questions, depths)
        return (generate_exact if generate else score_depths)(loaded, questions, depths)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """How many tokens a question takes without its haystack."""
        return encode_parts(pieces, encoder, answer_room=self.answer_room).size

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """One question as prompts of exactly `length` tokens, one for each depth."""
        parts = encode_parts(pieces, encoder, answer_room=self.answer_room)
        return lay_out(pieces, parts, encoder, length, depths, rng)

    def fitting(self, encoder: Encoder, length: int) -> Self:
        """The task as it is asked at a length in tokens."""
        return self

    @property
    def advice(self) -> str:
        """What helps where a question does not fit into a length; empty where nothing does."""
        return ""
