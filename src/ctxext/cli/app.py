"""The `ctxext` command: its subcommands and its error reports."""

import contextlib
import functools
import importlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxext.cli.help import Command, print_help, read_plainly
from ctxext.cli.interrupts import INTERRUPTED
from ctxext.cli.output import in_one_line, print_error, visible
from ctxext.errors import CtxextError
from ctxext.redaction import RedactedStream, redact, remember_arguments
from ctxext.version import __version__

TRACEBACK = "CTXEXT_TRACEBACK"
"""The environment variable for full tracebacks, for debugging."""

FAULT = "This is a fault of ctxext, not yours"
"""Beginning of the line that reports a bug. No user input may lead to it; the fuzz tests check this."""

NO_MEMORY = "There is not enough memory for this."
TOO_DEEP = "Something that was given nests too deep."

_PACKAGE = Path(__file__).parents[1]
_SHORT = 300
"""Maximum number of displayed characters of an exception's message."""


def print_fault(error: BaseException) -> None:
    """Print the exception that ended a command in one line, after the traceback if CTXEXT_TRACEBACK is set."""
    if os.environ.get(TRACEBACK):
        lines = "".join(traceback.format_exception(error)).splitlines()
        # The traceback may contain untrusted text.
        sys.stderr.write("".join(f"{visible(line)}\n" for line in lines))
    print_error(as_error(error))


def as_error(error: BaseException) -> CtxextError:
    """Convert an exception to an error with a hint."""
    where = f"{TRACEBACK}=1 shows where."
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or is_torchs:
        return CtxextError(NO_MEMORY, hint=f"Choose a smaller model, batch, length or dtype. {where}")
    if isinstance(error, RecursionError):
        return CtxextError(TOO_DEEP, hint=where)
    if isinstance(error, OSError) and error.strerror:
        file = f'"{error.filename}": ' if error.filename else ""
        return CtxextError(f"{file}{error.strerror}.", hint=f"Check the place and its permissions. {where}")
    said = ": ".join(part for part in (type(error).__name__, in_one_line(redact(str(error)), _SHORT)) if part)
    return CtxextError(
        f"{FAULT}: {said} ({_origin(error)}).",
        hint=f"Please report it with what {TRACEBACK}=1 shows and, if you may, the file that leads to it.",
    )


def _origin(error: BaseException) -> str:
    """Return the file and line of the last frame of this package in the traceback."""
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    inside = [(path.relative_to(_PACKAGE), line) for path, line in places if _PACKAGE in path.parents]
    return "{}:{}".format(*inside[-1]) if inside else "outside the package"


def install_exception_hooks() -> None:
    """Handle exceptions in threads and finalizers in the same way."""
    threading.excepthook = lambda raised: _print_beside(raised.exc_value)
    sys.unraisablehook = lambda raised: _print_beside(raised.exc_value)


def _print_beside(error: BaseException | None) -> None:
    """Print an exception that does not end the command, if CTXEXT_TRACEBACK is set."""
    if error is not None and os.environ.get(TRACEBACK):
        with contextlib.suppress(Exception):  # The streams may be closed, and hooks must not raise.
            print_fault(error)


SUMMARIES = {
    "convert": "Rewrite a checkpoint's encoding of positions and save it as a portable one. Only table and range write "
    "weights.",
    "inspect": "Show a checkpoint's position encoding, its context length, and which methods apply. Reads headers "
    "only.",
    "eval": "Measure whether models find things anywhere in their context, and what extending it cost.",
    "compare": "Show which published method suits a model, and what it costs: all applied in memory, all asked the "
    "same.",
    "search": "Try recipes on a model, without training, and write the best as an ordinary recipe file.",
    "finetune": "Train an extended model on long sequences, with LoRA by default, and write it as a portable "
    "checkpoint.",
    "merge": "Merge a LoRA adapter into its base, tensor by tensor; recipe, tokenizer and modeling code stay.",
    "verify": "Check that a converted checkpoint is what it says: files, configuration, code, frequencies, weights.",
    "push": "Put a finished checkpoint on the Hub, with its model card and the digest of every file.",
    "export": "Write a checkpoint as a GGUF file for llama.cpp, with the schedule that its own converter leaves out.",
    "methods": "List the methods, what each needs and where it comes from.",
    "demo": "Extend the checkpoint in the package five ways, ask each for needles, and show who finds them where.",
    "env": "Print versions, devices and cache folders; paste this into a bug report.",
}
"""Each command and the first line of its help, so that a list of all commands loads none of them."""

_FUNCTIONS = {"eval": "eval_", "search": "search_"}
"""Functions with another name than their command; a command is in the module of its name."""

# Passed to each command too: a command keeps the help option of the first context, which may be without the app.
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class _Commands(typer.core.TyperGroup):
    """The subcommands. Usage errors are reported in one line like all others, without secrets."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line."""
        if not settings.get("standalone_mode", True):
            return super().main(*args, **settings)
        try:
            code = super().main(*args, **{**settings, "standalone_mode": False})
        except typer.Abort:
            sys.exit(1)
        except Exception as error:
            # Typer has no public class for all of these.
            if not hasattr(error, "format_message"):
                raise
            # After an empty command line, its help was shown instead.
            if message := error.format_message():
                context = getattr(error, "ctx", None)
                print_error(CtxextError(message, hint=f"{context.command_path if context else 'ctxext'} --help"))
            sys.exit(getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)


@functools.cache
def _command(name: str) -> typer.core.TyperCommand:
    module = importlib.import_module(f"ctxext.cli.{name}")
    single = typer.Typer(add_completion=False)
    single.command(name, cls=Command, context_settings=_SETTINGS)(getattr(module, _FUNCTIONS.get(name, name)))
    command = typer.main.get_command(single)
    assert isinstance(command, typer.core.TyperCommand)
    return command


class _Loaded(Mapping[str, typer.core.TyperCommand]):
    """The commands by name; each is imported on first access."""

    def __getitem__(self, name: str) -> typer.core.TyperCommand:
        if name not in SUMMARIES:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(SUMMARIES)

    def __len__(self) -> int:
        return len(SUMMARIES)


class _LazyCommands(_Commands):
    """The subcommands of this package: help and completion of their names load none of them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": _Loaded()})

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with those that typer adds."""
        return read_plainly(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, with a summary of each command."""
        print_help(self, ctx, commands=SUMMARIES)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the names of commands and options that begin with `incomplete`."""
        item: Any = vars(typer.core)["CompletionItem"]
        names = [item(name, help=SUMMARIES[name]) for name in SUMMARIES if name.startswith(incomplete)]
        return [*names, *super(typer.core.TyperGroup, self).shell_complete(ctx, incomplete)]


app = typer.Typer(
    name="ctxext",
    cls=_LazyCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
    help="Make a language model read more: convert a checkpoint to a longer context, and measure what that did.",
    epilog="Start with: ctxext demo",
)


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
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers 5 would fetch kernels that a checkpoint names.
    remember_arguments(sys.argv)
    _make_streams_safe()
    install_exception_hooks()
    try:
        try:
            app()
        except Exception:  # Explain a full disk, for commands that do not name the path themselves.
            from ctxext.files.output_directory import explain_disk_errors

            with explain_disk_errors(Path("OUT")):
                raise
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


def _make_streams_safe() -> None:
    """Make streams accept every character and a closed stream harmless, and redact secrets in them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, RedactedStream):
            continue
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  Until the process ends.
        elif isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # It flushes its buffer first, which fails on a full disk.
                stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, RedactedStream(getattr(sys, name)))
