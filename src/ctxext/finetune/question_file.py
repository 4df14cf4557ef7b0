"""A file of conversations with questions about texts, as JSON lines."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ctxext.checkpoint.loading import explain_loading_errors, rename
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.data.encoding import open_tokenizer
from ctxext.data.records import check_place
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.files.length import read_words
from ctxext.files.output_directory import (
    OverwriteOptions,
    beside,
    check_name,
    check_out_file,
    explain_disk_errors,
    lock_output,
)
from ctxext.files.packages import require
from ctxext.finetune.chats import MESSAGES
from ctxext.finetune.documents import DEMO, Documents, TrainingData
from ctxext.finetune.questions.conversations import Conversation, QuestionCounts
from ctxext.options import check_options, count_option, option, seed_option, with_documented_options
from ctxext.recipes.code.staging import stage_checkpoint

_SUFFIX = ".jsonl"


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """Options of a file of questions."""

    length: int = option(2048, help="Maximum tokens per conversation.", kind="length", shown="2k", min=1)
    count: int = count_option(300, help="Number of conversations.")
    seed: int = seed_option()

    def __post_init__(self) -> None:
        read_words(self)
        check_options(self)


@dataclass(frozen=True)
class QuestionFile:
    """A written file.

    Attributes:
        path: The file.
        counts: Counts of its conversations, and of the texts that were read for them.
        has_template: Whether the model has a chat template, which a training with the file needs.
    """

    path: Path
    counts: QuestionCounts
    has_template: bool


def write_questions(
    model: str,
    data: str,
    out: Path,
    options: QuestionOptions,
    *,
    overwrite: OverwriteOptions,
    progress: Progress | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> QuestionFile:
    """Write conversations with questions about texts as JSON lines with `messages`.

    Args:
        model: A folder, a Hub id or `demo`; its tokenizer counts the tokens.
        data: A file or folder of texts, or the id of a data set.
        out: The file to create.
        options: Length, number and seed.
        overwrite: What may be replaced.
        progress: Called with the name of the stage, the number of conversations and the number of all.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token.

    Raises:
        CtxextError: The model, the data or the file is invalid; nothing is written.
    """
    require("datasets", "Making questions")
    check_file(out, overwrite)
    training_data = TrainingData((data,), questions=0.5)
    if training_data.is_demo:
        raise CtxextError(f'"{DEMO}" contains no texts.', hint="Use a file or folder of texts.")
    check_place(data)
    if progress is not None:
        progress("loading the tokenizer", 0, 1)
    checkpoint = open_checkpoint(model, revision=revision, token=token, weights=False)
    with stage_checkpoint(checkpoint) as stage, explain_loading_errors("The tokenizer cannot be loaded"):
        tokenizer = rename(open_tokenizer(stage.folder), checkpoint)
    documents = Documents(training_data, options.seed, True, tokenizer, {options.length: options.count})
    target = out.resolve()
    with explain_disk_errors(out):
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock_output(target), beside(target) as place:
            with (place / "new").open("w", encoding="utf-8", newline="\n") as file:
                counts = _write(file, documents, options.count, progress)
            check_file(out, overwrite)
            (place / "new").replace(target)
    return QuestionFile(out, counts, bool(getattr(tokenizer, "chat_template", None)))


def _write(file: TextIO, documents: Documents, count: int, progress: Progress | None) -> QuestionCounts:
    conversations = itertools.islice(documents.iterate_conversations(), count)
    for number, conversation in enumerate(conversations, start=1):
        file.write(json.dumps(_as_record(conversation), ensure_ascii=False) + "\n")
        if progress is not None:
            progress("writing conversations", number, count)
    assert documents.questions is not None, "the stream was opened"
    return documents.questions


def _as_record(conversation: Conversation) -> dict[str, Any]:
    return {MESSAGES: conversation.messages}


def check_file(out: Path, overwrite: OverwriteOptions) -> None:
    """Raise if a file cannot be written or must not be replaced."""
    check_name(out)
    if out.suffix != _SUFFIX:
        raise CtxextError(f'OUT "{out}" is not named NAME{_SUFFIX}.', hint=f"Name it {out}{_SUFFIX}.")
    check_out_file(out, overwrite, _contains_conversations, "contains something else than conversations")


def _contains_conversations(path: Path) -> bool:
    """Return whether the first line of a file is a conversation."""
    try:
        with path.open(encoding="utf-8") as file:
            return isinstance(json.loads(file.readline(1 << 26)).get(MESSAGES), list)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
