"""BABILong, https://arxiv.org/abs/2406.10149: questions of bAbI about facts that are hidden in books."""

import ast
import functools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from typing_extensions import override

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, QuestionText, make_message_prompt
from ctxext.data.records import read_records
from ctxext.errors import CtxextError
from ctxext.files.strict import read_text
from ctxext.tasks.published import PublishedTask

_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_TURNS = ("e,e", "e,n", "e,s", "n,e", "n,n", "n,w", "s,e", "s,s", "s,w", "w,n", "w,s", "w,w")
LABELS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4", "qa11", "qa12", "qa13"), _PLACES),
    **dict.fromkeys(("qa6", "qa9", "qa17", "qa18"), ("no", "yes")),
    "qa5": ("bill", "fred", "jeff", "mary", "apple", "football", "milk"),
    "qa7": ("none", "one", "three", "two"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa10": ("maybe", "no", "yes"),
    "qa14": ("bedroom", "cinema", "kitchen", "office", "park", "school"),
    "qa15": ("cat", "mouse", "sheep", "wolf"),
    "qa16": ("gray", "green", "white", "yellow"),
    "qa19": _TURNS,
    "qa20": ("bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"),
}
"""All answers of each task in lower case (`TASK_LABELS` in babilong/metrics.py)."""

_SUFFIXES = (".json", ".jsonl", ".parquet", ".arrow")
_LARGEST_PROMPTS = 1_000_000
"""Maximum number of bytes of prompts.py, which Python parses."""


class Row(NamedTuple):
    """One record of the data set."""

    context: str
    question: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Babilong(PublishedTask):
    """Answer a question about facts of bAbI in a book.

    As in scripts/run_model_on_babilong.py of https://github.com/booydar/babilong with instruction, examples and post
    prompt: 20 new tokens of greedy decoding. The contexts are those of the data set, which has a file per length.

    Attributes:
        babilong: The folder with the data set and prompts.py.
    """

    download: ClassVar[str] = (
        "hf download RMT-team/babilong --repo-type dataset --local-dir DIR && curl -o DIR/prompts.py "
        "https://raw.githubusercontent.com/booydar/babilong/main/babilong/prompts.py"
    )

    scored: str = "The first sentence names exactly the answer"
    shows: str = "answering questions about facts scattered in a book"
    options: tuple[str, ...] = ("babilong",)
    answer_room: int = 20
    has_one_form: bool = True
    has_depths: bool = False
    babilong: Path | None = None

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task with the length of its file."""
        return replace(self, length=length)

    @property
    def _task(self) -> str:
        return self.name.removeprefix("babilong-")

    def draw(self, rng: random.Random, sample: int) -> Pieces:
        """Return a question of the file in order, with the whole prompt as the opening."""
        rows = _read_rows(self.find_folder(), self._task, name_length(self.length))
        if sample >= len(rows):
            raise CtxextError(
                f'"{self.find_folder()}" contains {len(rows)} questions of {self._task} at {name_length(self.length)}.',
                hint=f"Samples times depths must not exceed that number: --samples {len(rows)} --depths 1",
            )
        row = rows[sample]
        instruction, examples, post_prompt = _read_prompts(self.find("prompts.py")[0], self._task)
        text = f"{instruction}\n\n{examples}\n\n{post_prompt}\n\n<context>\n{row.context.strip()}\n</context>"
        text = f"{text}\n\nQuestion: {row.question}".strip()
        return Pieces(text, iter(()), (), (QuestionText(row.question, row.target),))

    def pieces(self, rng: random.Random) -> Pieces:
        """Return the first question."""
        return self.draw(rng, 0)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Count the tokens of a prompt and its answer."""
        return len(encoder.encode_message(pieces.opening)) + self.answer_room

    @override
    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        (question,) = pieces.questions
        prompt = make_message_prompt(encoder, pieces.opening, self.answer_room, (question.answer,))
        return [replace(prompt, question=question.question) for _ in depths]

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return 1 if the answer is the only one in the text's first sentence, else 0."""
        return float(is_correct(text, prompt.answers[0], prompt.question, LABELS[self._task]))


def is_correct(text: str, target: str, question: str, labels: Sequence[str]) -> bool:
    """Return whether the first sentence of a text names the target and no other label (babilong/metrics.py).

    Labels in the question do not count. Targets of more than three characters are lists if they contain commas.
    """
    sentence = re.split(r"\.|<context>|<example>", text.lower(), maxsplit=1)[0]
    named = {label for label in labels if label in sentence and label not in question.lower()}
    target = target.lower()
    parts = target.split(",") if len(target) > 3 else [target]
    return named.issuperset(parts) and len(named) == len(parts)


def name_length(length: int) -> str:
    """Return the name of a length in the data set, as 4k or 1M; 0k, the facts alone, is for lengths below 1k."""
    thousands = length // 1024
    return f"{thousands // 1024}M" if thousands >= 1024 and thousands % 1024 == 0 else f"{thousands}k"


@functools.lru_cache(maxsize=2)
def _read_rows(folder: Path, task: str, length: str) -> tuple[Row, ...]:
    """Read the rows of a task at a length; its files have both names in their path, as qa1/4k-00000.parquet."""
    from ctxext.tasks.entries import FACTS_ROW, check_entry

    files = sorted(
        (path.parent, path.suffix, path)
        for path in folder.rglob("*")
        if path.suffix in _SUFFIXES
        and path.is_file()
        and {task, length} <= {*path.relative_to(folder).parts[:-1], *re.split(r"[.-]", path.name)}
    )
    if not files:
        raise CtxextError(f'"{folder}" contains no file of {task} at {length}.', hint=Babilong.download)
    # The same questions may be there in several forms; the shards of the first one are read.
    _, first = next(groupby(files, key=lambda file: file[:2]))
    rows = []
    for _, _, path in first:
        for place, record in read_records(str(path)):
            row = check_entry(record, FACTS_ROW, place, Babilong.download)
            rows.append(Row(row["input"], row["question"], row["target"]))
    return tuple(rows)


@functools.cache
def _read_prompts(file: Path, task: str) -> list[str]:
    """Read the instruction, examples and post prompt of a task from the authors' file, without running it."""
    from ctxext.tasks.entries import FACTS_PROMPT, check_entry

    try:
        assigned = {
            target.id: node.value
            for node in ast.parse(read_text(file, _LARGEST_PROMPTS)).body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        content = ast.literal_eval(assigned["DEFAULT_PROMPTS"])[task]
    except (SyntaxError, ValueError, KeyError, TypeError, IndexError, RecursionError, MemoryError) as error:
        fault = f"{type(error).__name__}: {error}"
        raise CtxextError(f'"{file}" contains no prompts of {task} ({fault}).', hint=Babilong.download) from error
    prompt = check_entry(content, FACTS_PROMPT, f'"{file}": "{task}"', Babilong.download)
    return [prompt["instruction"], prompt["examples"], prompt["post_prompt"]]


BABILONG = tuple(
    Babilong(
        name=f"babilong-{task}",
        description="The authors' questions about facts of bAbI, which are hidden in books. The length is the name of "
        "the file: prompts have about as many tokens.",
    )
    for task in (f"qa{number}" for number in range(1, 21))
)
"""The tasks qa1 to qa20."""
