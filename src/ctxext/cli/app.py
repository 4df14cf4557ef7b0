"""The `ctxext` command: which commands there are, and how their errors are told."""

import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer

from ctxext.cli.convert import convert, with_method_options
from ctxext.cli.demo import demo
from ctxext.cli.env import env
from ctxext.cli.eval import eval_
from ctxext.cli.finetune import finetune
from ctxext.cli.inspect import inspect
from ctxext.cli.interrupts import INTERRUPTED
from ctxext.cli.merge import merge
from ctxext.cli.methods import methods
from ctxext.cli.output import print_error
from ctxext.cli.push import push
from ctxext.cli.search import search_
from ctxext.cli.verify import verify
from ctxext.converters.output_directory import full_disk_told
from ctxext.errors import CtxextError
from ctxext.tokens import redacted
from ctxext.version import __version__

app = typer.Typer(
    name="ctxext",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make a language model read more: convert a checkpoint to a longer context, and measure what that did.",
    epilog="Start with: ctxext demo",
)
app.command()(with_method_options(convert))
app.command()(inspect)
app.command("eval")(eval_)
app.command("search")(search_)
for command in (finetune, merge, verify, push, methods, demo, env):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"ctxext {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show one of our own bugs, without the token that may stand in it."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))


def main() -> None:
    """Run the command line; a problem in the user's input becomes one line, a hint and exit code 1."""
    sys.excepthook = _print_traceback
    try:
        with full_disk_told(Path("OUT")):  # What a command has not told itself, with its place in it.
            app()
    except CtxextError as error:
        print_error(error)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            # All is written and told. Torch takes seconds to leave in order, which nobody who stopped it waits for.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
