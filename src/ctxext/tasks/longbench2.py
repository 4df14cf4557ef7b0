"""LongBench v2, https://arxiv.org/abs/2412.15204: multiple-choice questions about long documents."""

import functools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from typing_extensions import override

from ctxext.data.encoding import Encoder
from ctxext.data.prompt import Pieces, Prompt, make_message_prompt
from ctxext.data.records import read_records
from ctxext.errors import CtxextError
from ctxext.tasks.published import PublishedTask

if TYPE_CHECKING:
    from ctxext.models.answers import Scored
    from ctxext.models.model import LoadedModel, Written

_QUESTION = """What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

"""
_FORM = 'Format your response as follows: "The correct answer is (insert answer here)".'
_STEPS = "Let\u2019s think step by step:"
_READ = "Please read the following text and answer the {} below.\n\n"
_TEXT = "<text>\n$DOC$\n</text>\n\n"

DIRECT = f"{_READ.format('question')}{_TEXT}{_QUESTION}{_FORM}"
"""The prompt (prompts/0shot.txt)."""
REASONING = f"{_READ.format('questions')}{_TEXT}{_QUESTION}{_STEPS}"
"""The first prompt with chain of thought (prompts/0shot_cot.txt)."""
CONCLUSION = (
    f"{_READ.format('questions')}The text is too long and omitted here.\n\n{_QUESTION}{_STEPS} $COT$\n\n"
    f"Based on the above, what is the single, most likely answer choice? {_FORM}"
)
"""The second prompt with chain of thought, after the model's reasoning (prompts/0shot_cot_ans.txt)."""

_MARKS = ("$DOC$", "$Q$", "$C_A$", "$C_B$", "$C_C$", "$C_D$")
_ANSWERS = (
    re.compile(r"The correct answer is \(([A-D])\)"),
    re.compile(r"The correct answer is ([A-D])"),
)
_ANSWER_ROOM, _REASONING_ROOM = 128, 1024
_CUT = "cut"
"""The group of the questions with a cut prompt."""
_MARGIN = 32
"""More tokens than the two halves of a cut prompt gain as one text."""


class Question(NamedTuple):
    """One question of the data set.

    Attributes:
        values: The text, the question and the four choices, without spaces around them.
        answer: The letter of the correct choice.
        groups: The difficulty and the length class.
        text: The number of the first question with the same text.
    """

    values: tuple[str, ...]
    answer: str
    groups: tuple[str, ...]
    text: int


@dataclass(frozen=True, kw_only=True)
class ChoicePieces(Pieces):
    """A question of the data set, instead of the pieces of a text."""

    row: Question


@dataclass(frozen=True, kw_only=True)
class LongBench2(PublishedTask):
    """Choose one of four answers to a question about a long document.

    As in pred.py of https://github.com/THUDM/LongBench: a prompt of more than `length` tokens loses its middle, before
    the chat template is applied.

    Attributes:
        longbench_v2: The file of the data set, or its folder.
        chain_of_thought: Whether the model first writes its reasoning, and answers a second prompt without the text.
        seed: The seed of the order of the questions.
    """

    download: ClassVar[str] = "hf download THUDM/LongBench-v2 --repo-type dataset --local-dir DIR"
    accepts_file: ClassVar[bool] = True

    name: str = "longbench-v2"
    description: str = (
        "The authors' multiple-choice questions about long documents; guessing scores 25 %. The length is the largest "
        "number of tokens of a prompt without chat template and answer: longer prompts lose their middle."
    )
    scored: str = "The answer states the correct letter"
    shows: str = "answering questions about long documents"
    options: tuple[str, ...] = ("longbench_v2", "chain_of_thought")
    answer_room: int = _ANSWER_ROOM
    has_one_form: bool = True
    has_depths: bool = False
    groups: tuple[str, ...] = ("easy", "hard", "short", "medium", "long", _CUT)
    longbench_v2: Path | None = None
    chain_of_thought: bool = False
    seed: int = 0

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """Return the task with the user's options, and with room for reasoning."""
        task = super().with_options(options)
        return replace(task, answer_room=_REASONING_ROOM) if task.chain_of_thought else task

    def fit_to_length(self, encoder: Encoder, length: int) -> Self:
        """Return the task with the largest number of tokens of a prompt."""
        return replace(self, length=length)

    def _select_row(self, sample: int) -> Question:
        """Return a question in a seeded order."""
        rows = _read_questions(tuple(self.find("*.parquet", "data.json")))
        if sample >= len(rows):
            raise CtxextError(
                f'"{self.find_folder()}" contains {len(rows)} questions.',
                hint=f"Samples times depths must not exceed that number: --samples {len(rows)} --depths 1",
            )
        return rows[random.Random(self.seed).sample(range(len(rows)), len(rows))[sample]]

    def number_text(self, sample: int) -> int:
        """Return the number of the first question with the same text."""
        return self._select_row(sample).text

    def draw(self, rng: random.Random, sample: int) -> Pieces:
        """Return a question, without its prompt, which may have millions of characters."""
        return ChoicePieces("", iter(()), (), (), row=self._select_row(sample))

    def pieces(self, rng: random.Random) -> Pieces:
        """Return the first question."""
        return self.draw(rng, 0)

    def size(self, pieces: Pieces, encoder: Encoder) -> int:
        """Return an upper limit of the number of tokens of a prompt and its answer."""
        return self.length + len(encoder.encode_message("A")) + self.answer_room + _MARGIN

    @override
    def prompts(
        self, pieces: Pieces, encoder: Encoder, length: int, depths: Sequence[float], rng: random.Random
    ) -> list[Prompt]:
        assert isinstance(pieces, ChoicePieces)
        row = pieces.row
        text, is_cut = self._cut(encoder, fill(REASONING if self.chain_of_thought else DIRECT, row.values))
        prompt = make_message_prompt(encoder, text, self.answer_room, (row.answer,))
        conclusion = fill(CONCLUSION, row.values) if self.chain_of_thought else ""
        prompt = replace(prompt, groups=(*row.groups, *([_CUT] if is_cut else [])), question=conclusion)
        return [prompt for _ in depths]

    def _cut(self, encoder: Encoder, text: str) -> tuple[str, bool]:
        """Return a prompt without the tokens that are too many, and whether there were any."""
        ids = [*encoder.encode_document(text), *encoder.get_end_tokens()]
        if len(ids) <= self.length:
            return text, False
        return encoder.tokenizer.decode(cut_middle(ids, self.length), skip_special_tokens=True), True

    def score(
        self, loaded: "LoadedModel", questions: Sequence[Sequence[Prompt]], depths: Sequence[int], *, generate: bool
    ) -> "Iterator[Scored]":
        """Score generated answers; with chain of thought, those to the second prompts."""
        if self.chain_of_thought:
            encoder = loaded.encoder.use_form(self.form)
            ((_, written),) = loaded.write(questions, depths, self.form)
            questions = [
                [self._conclude(encoder, prompt, new)] for (prompt,), new in zip(questions, written, strict=True)
            ]
        return super().score(loaded, questions, depths, generate=generate)

    def _conclude(self, encoder: Encoder, prompt: Prompt, reasoning: "Written") -> Prompt:
        """Return the second prompt, with the generated reasoning."""
        text, _ = self._cut(encoder, prompt.question.replace("$COT$", reasoning.read(encoder).strip()))
        return make_message_prompt(encoder, text, max(_ANSWER_ROOM, self.form.room), prompt.answers)

    def grade(self, text: str, prompt: Prompt) -> float:
        """Return 1 if the text states the correct letter, else 0."""
        return float(extract_answer(text) == prompt.answers[0])


def fill(template: str, values: Sequence[str]) -> str:
    """Insert the values of a question into a template, one after another.

    As in the authors' code, a later mark inside an inserted value, such as the formula "$Q$" in a paper, is replaced
    too.
    """
    for mark, value in zip(_MARKS, values, strict=True):
        template = template.replace(mark, value)
    return template


def cut_middle(ids: list[int], length: int) -> list[int]:
    """Return the first and the last half of `length` tokens; the last half has one more if `length` is odd."""
    return ids[: length // 2] + ids[length // 2 - length :]


def extract_answer(text: str) -> str | None:
    """Return the letter that an answer states, without asterisks; None if there is none."""
    text = text.replace("*", "")
    return next((match[1] for pattern in _ANSWERS if (match := pattern.search(text))), None)


@functools.lru_cache(maxsize=1)
def _read_questions(files: tuple[Path, ...]) -> tuple[Question, ...]:
    """Read the questions of the data set; their texts take some hundred megabytes."""
    from ctxext.tasks.entries import CHOICE_QUESTION, check_entry

    rows, texts = list[Question](), dict[str, int]()
    for file in files:
        for place, record in read_records(str(file)):
            entry = check_entry(record, CHOICE_QUESTION, place, LongBench2.download)
            choices = (entry["choice_A"], entry["choice_B"], entry["choice_C"], entry["choice_D"])
            values = tuple(map(str.strip, (entry["context"], entry["question"], *choices)))
            text = texts.setdefault(values[0], len(rows))
            rows.append(Question(values, entry["answer"], (entry["difficulty"], entry["length"]), text))
    if not rows:
        raise CtxextError(f'"{files[0]}" contains no questions.', hint=LongBench2.download)
    return tuple(rows)
