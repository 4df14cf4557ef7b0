"""`ctxext export`: write a checkpoint in the format of another engine."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.options import SourceArgument, takes_options
from ctxext.cli.output import NOT_WRITTEN, Output, done_line, format_relative, mark_line
from ctxext.errors import CtxextError
from ctxext.files.content import report_stage
from ctxext.files.output_directory import OverwriteOptions
from ctxext.options import HubOptions


@takes_options(without=("verbose",))
def export(
    form: Annotated[str, typer.Argument(metavar="gguf", help="Output format.")],
    source: SourceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output file.")],
    *,
    outtype: Annotated[
        str, typer.Option("--outtype", help="Data type of the weights: auto (as saved), f32, f16, bf16 or q8_0.")
    ] = "auto",
    llama_cpp: Annotated[
        Path | None,
        typer.Option("--llama-cpp", metavar="FOLDER", help="Source folder of llama.cpp. Default: $LLAMA_CPP."),
    ] = None,
    options: OverwriteOptions,
    hub: HubOptions,
    output: Output,
) -> None:
    """Export a checkpoint to a GGUF file for llama.cpp, including the schedule that its converter omits.

    Examples:
    ctxext export gguf my-model-32k my-model-32k.gguf --llama-cpp ../llama.cpp
    """
    from ctxext.gguf.convert import TOLERANCE
    from ctxext.gguf.export import export_gguf

    if form != "gguf":
        raise CtxextError(f'Unknown format "{form}".', hint="ctxext export gguf SOURCE OUT.gguf")
    started = time.perf_counter()
    with output.progress("exporting", stopped=NOT_WRITTEN) as progress:
        report_stage(progress, "running llama.cpp's converter")
        done = export_gguf(source, out, options=options, llama_cpp=llama_cpp, outtype=outtype, **vars(hub))
    check = (
        mark_line("-", "yellow", "schedule written by llama.cpp's converter; this architecture is untested")
        if done.difference is None
        else mark_line("✓", "green", f"llama.cpp check passed ({format_relative(done.difference)})")
        if done.difference <= TOLERANCE
        else mark_line("✗", "red", f"llama.cpp reads the schedule differently ({format_relative(done.difference)})")
    )
    seconds = time.perf_counter() - started
    output.result(
        {"out": str(out), "methods": done.methods, "difference": done.difference, "seconds": round(seconds, 3)},
        done_line(out, f"{done.methods or 'no method applied'}   {seconds:.2f} s"),
        check,
    )
    output.next_step("llama-server", "-m", out)
