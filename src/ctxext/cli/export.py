"""`ctxext export`: write a checkpoint in the format of another engine."""

import time
from pathlib import Path
from typing import Annotated

import typer

from ctxext.cli.options import SourceArgument, takes_options
from ctxext.cli.output import Output, done_line, mark_line
from ctxext.errors import CtxextError
from ctxext.files.output_directory import OverwriteOptions
from ctxext.options import HubOptions


@takes_options(without=("verbose",))
def export(
    form: Annotated[str, typer.Argument(metavar="gguf", help="The format to write.")],
    source: SourceArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to make.")],
    *,
    outtype: Annotated[
        str, typer.Option("--outtype", help="Type of the weights: auto (as saved), f32, f16, bf16 or q8_0.")
    ] = "auto",
    llama_cpp: Annotated[
        Path | None,
        typer.Option("--llama-cpp", metavar="FOLDER", help="llama.cpp's sources, for its converter; or LLAMA_CPP."),
    ] = None,
    options: OverwriteOptions,
    hub: HubOptions,
    output: Output,
) -> None:
    """Write a checkpoint as a GGUF file for llama.cpp, with the schedule that its own converter leaves out.

    Examples:
    ctxext export gguf my-model-32k my-model-32k.gguf --llama-cpp ../llama.cpp
    """
    from ctxext.gguf.export import export_gguf

    if form != "gguf":
        raise CtxextError(f'There is no format "{form}".', hint="ctxext export gguf SOURCE OUT.gguf")
    started = time.perf_counter()
    output.note("llama.cpp's converter is writing the weights")
    done = export_gguf(source, out, options=options, llama_cpp=llama_cpp, outtype=outtype, **vars(hub))
    checked = (
        mark_line("-", "yellow", "the schedule is as llama.cpp's converter wrote it: this architecture was not tried")
        if done.difference is None
        else mark_line("✓", "green", f"llama.cpp rotates as the checkpoint (relative difference {done.difference:.0e})")
    )
    seconds = time.perf_counter() - started
    output.result(
        {"out": str(out), "methods": done.methods, "difference": done.difference, "seconds": round(seconds, 3)},
        done_line(out, f"{done.methods or 'no method applied'}   {seconds:.2f} s"),
        checked,
    )
    output.next_step("llama-server", "-m", out)
