"""The `ctxext` command: its subcommands, and how errors are reported."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.cli.convert import convert
from ctxext.cli.demo import demo
from ctxext.cli.env import env
from ctxext.cli.eval import eval_
from ctxext.cli.faults import print_fault, tell_everywhere
from ctxext.cli.finetune import finetune
from ctxext.cli.inspect import inspect
from ctxext.cli.interrupts import INTERRUPTED
from ctxext.cli.merge import merge
from ctxext.cli.method_options import method_parameters
from ctxext.cli.methods import methods
from ctxext.cli.options import parameters_of, with_parameters
from ctxext.cli.output import print_error
from ctxext.cli.push import push
from ctxext.cli.search import search_
from ctxext.cli.verify import verify
from ctxext.converters.options import Calibration, ConvertOptions
from ctxext.errors import CtxextError
from ctxext.evaluate.settings import Settings
from ctxext.finetune.options import TrainingOptions
from ctxext.search.options import SearchOptions
from ctxext.system.output_directory import OverwriteOptions, explain_disk_errors
from ctxext.system.tokens import RedactedStream, remember_arguments
from ctxext.version import __version__


class _Commands(typer.core.TyperGroup):
    """The subcommands. Usage errors are reported in one line like all others, without secrets."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line."""
        given = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*given, **extra)
        try:
            code = super().main(*given, **extra)
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            # Typer has no public class for all of these.
            if not hasattr(error, "format_message"):
                raise
            _tell_wrong_use(error)
            sys.exit(getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)


def _tell_wrong_use(error: Any) -> None:
    """Report a usage error; after an empty command line, its help was shown instead."""
    context = getattr(error, "ctx", None)
    if message := error.format_message():
        hint = f"{context.command_path} --help" if context is not None else "ctxext --help"
        print_error(CtxextError(message, hint=hint))


app = typer.Typer(
    name="ctxext",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Make a language model read more: convert a checkpoint to a longer context, and measure what that did.",
    epilog="Start with: ctxext demo",
)
_CONVERT = (*parameters_of(ConvertOptions), *method_parameters(), *parameters_of(Calibration))
app.command()(with_parameters(convert, _CONVERT, after="dry_run"))
app.command()(inspect)
app.command("eval")(with_parameters(eval_, parameters_of(Settings), after="models"))
app.command("search")(with_parameters(search_, parameters_of(SearchOptions), after="out"))
app.command()(with_parameters(finetune, parameters_of(TrainingOptions), after="eval_data"))
app.command()(with_parameters(merge, parameters_of(OverwriteOptions), after="out"))
for command in (verify, push, methods, demo, env):
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


def main() -> None:
    """Run the command line; every error becomes one line, a hint and exit code 1."""
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers 5 would fetch some for what a checkpoint says.
    remember_arguments(sys.argv)
    _make_streams_take_everything()
    tell_everywhere()
    try:
        with explain_disk_errors(Path("OUT")):  # For commands that do not report it with the path themselves.
            app()
    except CtxextError as error:
        print_error(error)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            # Everything is written. Torch takes seconds to shut down: too long after Ctrl-C.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A library in Rust that panics raises no Exception.
        print_fault(error)
        sys.exit(1)


def _make_streams_take_everything() -> None:
    """Make streams accept every character and a closed stream harmless, and redact secrets in them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, RedactedStream):
            continue
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  Until the process ends.
        elif isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # It writes out what it holds first, which a full disk refuses.
                stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, RedactedStream(getattr(sys, name)))
