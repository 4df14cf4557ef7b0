"""`ctxext merge`: merge trained weights into their base checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.options import SourceArgument, takes_options
from ctxext.cli.output import NOT_WRITTEN, Output, done_line
from ctxext.merge.options import MergeOptions
from ctxext.options import HubOptions


@takes_options()
def merge(
    model: SourceArgument,
    adapter: Annotated[
        Path,
        typer.Argument(metavar="ADAPTER", help="Folder of a LoRA adapter or of a fine-tuned checkpoint."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output folder.")],
    *,
    options: MergeOptions,
    hub: HubOptions,
    output: Output,
) -> None:
    """Merge a LoRA adapter into its base model, one tensor at a time.

    The recipe, the tokenizer and the modeling code are kept.

    Examples:
    ctxext merge my-model-32k my-run/adapter my-model-32k-tuned
    """
    from ctxext.merge.run import merge as run

    with output.progress("merging", stopped=NOT_WRITTEN) as progress:
        done = run(model, adapter, out, options=options, progress=progress, **vars(hub))
    output.result(
        {"out": str(out), "changed": done.num_changed, "tensors": done.num_tensors},
        done_line(out, f"{done.num_changed} of {done.num_tensors} tensors changed"),
    )
    output.next_step("ctxext", "eval", model, out, why="Not measured yet")
