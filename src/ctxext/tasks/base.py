"""The base classes of tasks, and the units for scheduling and recording their work."""

import dataclasses
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from typing_extensions import override

from ctxext.data.encoding import BASE_FORM, Encoder, PromptForm
from ctxext.data.prompt import Pieces, Prompt, encode_parts, lay_out

if TYPE_CHECKING:
    from ctxext.models.answers import Scored
    from ctxext.models.model import LoadedModel

_Document = TypeVar("_Document")

Record = dict[str, Any]
"""One line of results: `task`, `length`, `depth`, the `samples` it covers and the result of each."""

_LARGE_ROOM = 1024
"""Tokens of an answer above which they, and not the question, make a prompt too long."""


class Key(NamedTuple):
    """Identifier of a sample: task, length, depth and index."""

    task: str
    length: int
    depth: float | None
    sample: int


def keys_of(record: Record) -> list[Key]:
    """Return the samples that a record covers."""
    return [Key(record["task"], record["length"], record["depth"], sample) for sample in record["samples"]]


def list_text_numbers(record: Record) -> list[int]:
    """Return the text number of each sample of a record; by default each sample has a separate text."""
    return list(record.get("texts") or record["samples"])


@dataclass(frozen=True)
class Work(ABC):
    """Some samples of a task at one length that run together.

    The result for a key must not depend on which other keys are measured.
    """

    task: "Task"
    length: int

    @property
    def label(self) -> str:
        """The text of the progress line."""
        return f"{self.task.name} {self.length}"

    @property
    @abstractmethod
    def keys(self) -> list[Key]:
        """The keys of all samples."""

    def list_readings(self, keys: Collection[Key], *, can_share: bool) -> list[int]:
        """Return the length of each text to read for some of the samples, if prompts may share a cache or not."""
        return [key.length for key in keys]

    def count_written(self, keys: Collection[Key]) -> int:
        """Return the usual number of tokens to generate for some of the samples."""
        return 0

    @abstractmethod
    def run(self, loaded: "LoadedModel", keys: set[Key]) -> Iterator[Record]:
        """Measure some of the samples, and yield one record per cell."""


@dataclass(frozen=True)
class DocumentPlan:
    """The documents that a model reads, and the lengths to read.

    Attributes:
        kind: The kind of model, one of the values of `checkpoint_info.KINDS`.
        encoder: The tokenizer.
        lengths: Context lengths in tokens.
        longest: The longest length of any model, and the number of tokens of a document.
        trained_length: The original context length.
        data: Files or data sets with documents, read in turn if there are several; None is the package's prose.
        text: The name of the kind of text; empty if there is only one.
        samples: The number of documents to read.
        seed: The random seed of the prose.
        stride: The stride of the sliding window; None for no window.
        evaluator: The model that picks the key tokens of `longppl`.
        key_tokens: A file of key tokens to read or write.
    """

    kind: str
    encoder: Encoder
    lengths: tuple[int, ...]
    longest: int
    trained_length: int
    data: tuple[str | None, ...]
    samples: int
    seed: int
    text: str = ""
    stride: int | None = None
    evaluator: str | None = None
    key_tokens: Path | None = None

    def documents(self, length: int, most: int | None = None) -> list[list[int]]:
        """Return the token ids of documents of at least `length` tokens, each cut to `most`, by default `length`."""
        from ctxext.data.texts import read_corpus

        options = {"length": length, "most": most or length, "seed": self.seed}
        return self.in_turn(lambda data, count: read_corpus(data, self.encoder, count=count, **options))

    def in_turn(self, read: Callable[[str | None, int], list[_Document]]) -> list[_Document]:
        """Return documents of all places in turn; `read` returns those of one place, up to a number."""
        count = -(-self.samples // len(self.data))
        each = [read(data, count) for data in self.data]
        in_turn = [document for turn in itertools.zip_longest(*each) for document in turn if document is not None]
        return in_turn[: self.samples]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task; its variants differ in the values of its fields.

    Attributes:
        name: The name on the command line and in reports.
        description: The text above the results in a report.
        shows: The ability that the task measures; a model card names it if results are missing.
        kinds: The kinds of models that the task supports, of `checkpoint_info.KINDS`.
        separates_texts: Whether it reads the same number of documents of every kind of text, and reports each kind.
        options: The task options that it uses: fields of `Settings`, which refuses those that no task uses.
    """

    name: str
    description: str
    shows: str
    kinds: tuple[str, ...] = ("causal",)
    separates_texts: bool = False
    options: tuple[str, ...] = ()

    def documents_to_read(self, plan: DocumentPlan) -> Sequence[Work]:
        """Return the work on each document; by default a task reads none."""
        return ()


@dataclass(frozen=True, kw_only=True)
class RetrievalTask(Task):
    """A question about one place in a long text.

    Attributes:
        scored: A short description of the scoring.
        is_written: Whether the model always generates its answers, in any form of prompts.
        stays_right: Whether an answer with the full score keeps it whatever follows, so that generation may stop there.
        answer_room: Maximum number of generated tokens; 0 for the number of tokens of the answer.
        is_chat: Whether the authors send the prompt as a user message, without the first words of the answer.
        has_one_form: Whether prompts are whole messages, which have no other form.
        reasons_in_text: Whether the model may also reason without a chat template.
        form: The form of the prompts.
        has_depths: Whether the question is about one place. If not, a record's depth is None, and each length has as
            many questions as other tasks have at all depths.
        is_exact: Whether prompts have exactly the length in tokens, not only about as many.
        base_length: The effective length is relative to the best score of each question up to this length, as in
            NoLiMa; 0 for RULER's rule.
        groups: The groups of questions with separate results, in order. A prompt lists those of its question.
        same_questions_as: The task with the same questions in another form; empty for separate questions.
        questions_per_text: Number of consecutive questions about the same text, which is read only once.
        text: Sentences to hide needles in, if the task uses any; empty for the package's prose.
        easier: Options of an easier task, for models that cannot do this one at any length; empty if there is none.
    """

    easier: ClassVar[str] = "--task needle"

    scored: str = "Exact match"
    is_written: bool = False
    stays_right: bool = False
    answer_room: int = 0
    is_chat: bool = False
    has_one_form: bool = False
    reasons_in_text: bool = False
    form: PromptForm = BASE_FORM
    has_depths: bool = True
    is_exact: bool = True
    base_length: int = 0
    groups: tuple[str, ...] = ()
    same_questions_as: str = ""
    questions_per_text: int = 1
    text: tuple[str, ...] = ()
    options: tuple[str, ...] = ("repeat_question",)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the task with those of the user's options that are its fields."""
        names = {field.name for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: value for name, value in options.items() if name in names})

    @abstractmethod
    def pieces(self, rng: random.Random) -> Pieces:
        """Draw the text of one question, the same for the same state of `rng`."""

    def draw(self, rng: random.Random, sample: int) -> Pieces:
        """Return the text of a sample: by default a random one."""
        return self.pieces(rng)

    def number_text(self, sample: int) -> int:
        """Return the number of a sample's text; results of the same text are counted together in intervals."""
        return sample // self.questions_per_text

    def score(
        self, loaded: "LoadedModel", questions: Sequence[Sequence[Prompt]], depths: Sequence[int], *, generate: bool
    ) -> "Iterator[Scored]":
        """Score questions at some depths: by exact match, or by `grade` if answers are always generated.

        Args:
            loaded: The model.
            questions: The prompts of each question, one per depth; all of the same length.
            depths: Indices of the depths to score.
            generate: Generate the answers instead of running one teacher-forced forward.
        """
        from ctxext.models.answers import Scored, generate_exact, generate_graded, score_depths

        if self.is_generated:
            stays_right = self.stays_right or not self.is_written
            return generate_graded(loaded, questions, depths, self.grade, self.form, until_right=stays_right)
        scores = (generate_exact if generate else score_depths)(loaded, questions, depths)
        return (Scored(depth, right) for depth, right in scores)

    @property
    def is_generated(self) -> bool:
        """Whether the model generates its answers: in chat it may word them freely."""
        return self.is_written or self.form.is_chat

    def use_form(self, form: PromptForm) -> Self:
        """Return the task with prompts in a form, and with its room for answers."""
        return dataclasses.replace(self, form=form, answer_room=max(self.answer_room, form.room))

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return the score of a generated answer, from 0 to 1.

        By default RULER's `string_match_all`, or whether the text contains one of the answers.
        """
        return match_substrings(text, prompt.required) if prompt.required else contains_any(text, prompt.answers)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Count the tokens of a question without its haystack."""
        return encode_parts(pieces, encoder, answer_room=self.answer_room).size

    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        """Build one question as prompts of exactly `length` tokens, one for each depth."""
        parts = encode_parts(pieces, encoder, answer_room=self.answer_room)
        return lay_out(pieces, parts, encoder, length, depths, rng)

    def select_question(self, prompts: list[Prompt], number: int) -> list[Prompt]:
        """Return the prompts of one of the questions about a text; by default there is only one."""
        return prompts

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task adapted to a prompt length."""
        return self

    def count_texts(self, num_depths: int) -> int:
        """Return the number of texts to read for one question at some depths, if prompts may share a cache.

        Prompts of a text with one needle share about half, up to their needles.
        """
        return -(-(num_depths + 1) // 2)

    @property
    def advice(self) -> str:
        """The hint for questions that do not fit into a length; empty by default."""
        return "Or use fewer tokens: --reason N, or --no-think." if self.form.room > _LARGE_ROOM else ""


@dataclass(frozen=True, kw_only=True)
class SeveralNeedles(RetrievalTask):
    """Questions about several places in one text: each needle is the target of one, and one prefill serves all.

    Attributes:
        num_needles: Number of needles in a text.
    """

    num_needles: int = 1

    @override
    def count_texts(self, num_depths: int) -> int:
        return -(-num_depths // self.num_needles)


def contains_any(text: str, answers: Sequence[str]) -> float:
    """Return 1 if a text contains one of the answers, ignoring case, else 0."""
    return float(any(answer.strip().lower() in text.lower() for answer in answers))


def match_substrings(text: str, parts: Sequence[str]) -> float:
    """Return the share of the parts that a text contains, ignoring case."""
    return sum(part.lower() in text.lower() for part in parts) / len(parts)


def leaves_room(task: RetrievalTask, encoder: Encoder, length: int) -> bool:
    """Return whether a task's questions leave at least half of a length for the haystack."""
    return 2 * task.size(task.pieces(random.Random(0)), encoder) <= length
