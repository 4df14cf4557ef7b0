"""`ctxext questions`: write questions about texts to a file."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.options import SourceArgument, takes_options
from ctxext.cli.output import NOT_WRITTEN, Output, done_line
from ctxext.files.output_directory import OverwriteOptions
from ctxext.finetune.question_file import QuestionOptions
from ctxext.options import HubOptions


@takes_options()
def questions(
    model: SourceArgument,
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="A file or folder of text, JSON, CSV or parquet, or the id of a data set."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output file, NAME.jsonl.")],
    *,
    options: QuestionOptions,
    overwriting: OverwriteOptions,
    hub: HubOptions,
    output: Output,
) -> None:
    """Write conversations with questions about your texts to a file, to look at them or to edit them.

    They are those of finetune --questions: hidden facts, facts among look-alikes and continuations, with the model's
    tokenizer and chat template.

    Examples:
    ctxext questions my-model-32k books.jsonl questions.jsonl --length 8k --count 100
    """
    from ctxext.finetune.question_file import write_questions

    started = time.perf_counter()
    with output.progress("writing questions", stopped=NOT_WRITTEN) as progress:
        done = write_questions(model, data, out, options, overwrite=overwriting, progress=progress, **vars(hub))
    counts, seconds = done.counts, time.perf_counter() - started
    written = f"{counts.num_questions:,} questions in {counts.num_conversations:,} conversations"
    output.result(
        {"out": str(out), **vars(counts), "seconds": round(seconds, 3)},
        done_line(out, f"{written}, {counts.num_tokens:,} tokens   {seconds:.1f} s"),
    )
    if counts.num_unknown:
        output.note(f"no questions about {counts.num_unknown:,} texts in other languages")
    if counts.num_conversations < options.count:
        output.note(f"fewer than {options.count:,}: the data was read to its end")
    if done.has_template:
        sources = "--data", f"{out}:0.85", "--data", f"{data}:0.15"
    else:
        output.note("the model has no chat template, so it cannot be trained on messages in a file")
        sources = "--data", data, "--questions", "0.85"
    output.next_step("ctxext", "finetune", model, "OUT", *sources)
