"""What is asked of the models: tasks, lengths, depths, samples."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ctxext.data.haystack import read_haystack
from ctxext.errors import CtxextError
from ctxext.evaluate.tasks.base import RetrievalTask
from ctxext.evaluate.tasks.documents import Documents, read_questions
from ctxext.evaluate.tasks.kv import KeyValue
from ctxext.evaluate.tasks.needle import Needle
from ctxext.evaluate.tasks.registry import RETRIEVAL_TASKS, TASKS
from ctxext.files import sha256_of
from ctxext.limits import check_numbers


@dataclass(frozen=True)
class Settings:
    """What is asked.

    Attributes:
        tasks: Names from `TASKS`.
        lengths: Prompt lengths in tokens; by default each model's original context length and context length.
        depths: Where needles go, from 0 to 1.
        samples: Questions per cell, and documents per text.
        seed: Decides every question.
        num_needles: Facts in the haystack of `needle`; by default four, three of them distractors.
        kv_ids: What keys and values of `kv` are: "uuid" or "number".
        haystack: A text file to hide needles, facts and assignments in; by default prose from the package.
        data: Text for `perplexity` and `short`: a text, JSON lines or parquet file, or a `datasets` id.
        documents: A JSON lines file of questions for `documents`; by default made-up facts.
        stride: Also measure perplexity with a sliding window of this stride.
        generate: Let the model write its answers instead of one teacher-forced forward.
        allow_beyond: Ask for lengths beyond a model's context length too.
        batch_size: Prompts that run at once; by default as many as fit into memory.
        harness: Tasks of lm-evaluation-harness.
        original_length: What the models were trained on, in tokens, where their files do not say it.
    """

    tasks: tuple[str, ...] = ("needle", "short")
    lengths: tuple[int, ...] = ()
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 20
    seed: int = 0
    num_needles: int = 4
    kv_ids: str = "uuid"
    haystack: Path | None = None
    data: str | None = None
    documents: Path | None = None
    stride: int | None = None
    generate: bool = False
    allow_beyond: bool = False
    batch_size: int | None = None
    harness: tuple[str, ...] = ()
    original_length: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self)
        for task in self.tasks:
            if task not in TASKS:
                raise CtxextError(f'There is no task "{task}".', hint=f"Tasks: {', '.join(TASKS)}.")
        for name in ("tasks", "depths"):
            if not getattr(self, name):
                raise CtxextError(f"There are no {name}.", hint=f"Name at least one with --{name.removesuffix('s')}.")
        if any(not 0 <= depth <= 1 for depth in self.depths):
            raise CtxextError("A depth is a share of the haystack.", hint="Write --depths 0,50,100 in percent.")
        for name in ("samples", "num_needles", "stride", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise CtxextError(f"{name} must be at least 1, not {value}.")
        if self.kv_ids not in ("uuid", "number"):
            raise CtxextError(f'"{self.kv_ids}" is not a kind of ids.', hint="Choose --kv-ids uuid or number.")

    def retrieval_tasks(self) -> list[RetrievalTask]:
        """The retrieval tasks with their settings; files are read here.

        Raises:
            CtxextError: a file cannot be read or holds nothing usable.
        """
        text = read_haystack(self.haystack) if self.haystack else ()
        questions = read_questions(self.documents) if self.documents else ()
        made: list[RetrievalTask] = []
        for name in dict.fromkeys(self.tasks):
            task = RETRIEVAL_TASKS.get(name)
            if task is Needle:
                made.append(Needle(num_needles=self.num_needles, text=text))
            elif task is KeyValue:
                made.append(KeyValue(ids="number" if self.kv_ids == "number" else "uuid"))
            elif task is Documents:
                # A fact, as in a user's own questions; that a document has a number is beside the point.
                made.append(Documents(questions=questions, ask="fact"))
            elif task is not None:
                hides_in_text = "text" in {field.name for field in dataclasses.fields(cast("Any", task))}
                made.append(task(**({"text": text} if hides_in_text else {})))
        return made

    def to_dict(self) -> dict[str, Any]:
        """As reports write it; files by name and digest, without their folder."""
        content = dataclasses.asdict(self)
        for name in ("haystack", "data", "documents"):
            value = content[name]
            if value is not None and Path(value).is_file():
                digest = sha256_of(Path(value))
                content[name] = {"name": Path(value).name, "sha256": digest}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in content.items()}


def even_depths(count: int) -> tuple[float, ...]:
    """So many depths from the beginning to the end; a single one is the middle."""
    return (0.5,) if count == 1 else tuple(number / (count - 1) for number in range(count))


def parse_depths(text: str) -> tuple[float, ...]:
    """Read `5` (so many, evenly) or `0,50,100` (percent).

    Raises:
        CtxextError: the text is neither.
    """
    hint = "Write --depths 5 for five depths, or --depths 0,50,100 in percent."
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        if len(parts) == 1 and "," not in text:
            count = int(parts[0])
            if not 1 <= count <= 101:
                raise CtxextError(f'"{text}" is not a number of depths from 1 to 101.', hint=hint)
            return even_depths(count)
        depths = sorted({float(part.removesuffix("%")) / 100 for part in parts})
    except ValueError as error:
        raise CtxextError(f'"{text}" is not a list of depths.', hint=hint) from error
    return tuple(depths)


def lengths_of(settings: Settings, known: Sequence[int | None]) -> tuple[int, ...]:
    """The lengths to ask for: those given, or else the ones a model is known by."""
    return tuple(sorted(set(settings.lengths))) or tuple(sorted({length for length in known if length}))
