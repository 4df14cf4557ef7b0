"""The `ctxext` command: its subcommands and its error reports."""

import atexit
import contextlib
import functools
import gc
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
from ctxext.cli.hints import fit_hint
from ctxext.cli.interrupts import INTERRUPTED
from ctxext.cli.output import print_error
from ctxext.errors import CtxextError
from ctxext.redaction import RedactedStream, remember_arguments, remember_environment, shorten, visible
from ctxext.version import __version__

TRACEBACK = "CTXEXT_TRACEBACK"
"""The environment variable for full tracebacks, for debugging."""

FAULT = "This is a bug in ctxext"
"""Beginning of the line that reports a bug. No user input may lead to it; the fuzz tests check this."""

NO_MEMORY = "Out of memory."
TOO_DEEP = "The input is nested too deeply."

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
    where = f"Set {TRACEBACK}=1 to see the traceback."
    is_torchs = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or is_torchs:
        return CtxextError(NO_MEMORY, hint=f"Choose a smaller model, batch, length or dtype. {where}")
    if isinstance(error, RecursionError):
        return CtxextError(TOO_DEEP, hint=where)
    if isinstance(error, OSError) and error.strerror:
        file = f'"{error.filename}": ' if error.filename else ""
        return CtxextError(f"{file}{error.strerror}.", hint=f"Check the path and its permissions. {where}")
    summary = ": ".join(part for part in (type(error).__name__, shorten(str(error), _SHORT)) if part)
    return CtxextError(
        f"{FAULT}: {summary} ({_origin(error)}).",
        hint=f"Please report it with the traceback ({TRACEBACK}=1) and, if possible, the file that causes it.",
    )


def _origin(error: BaseException) -> str:
    """Return the file and line of the last frame of this package in the traceback."""
    places = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    inside = [(path.relative_to(_PACKAGE), line) for path, line in places if _PACKAGE in path.parents]
    return "{}:{}".format(*inside[-1]) if inside else "outside the package"


def install_exception_hooks() -> None:
    """Print exceptions in threads and finalizers only on request, because they do not end the command."""
    threading.excepthook = lambda raised: _print_if_debugging(raised.exc_value)
    sys.unraisablehook = lambda raised: _print_if_debugging(raised.exc_value)


def _print_if_debugging(error: BaseException | None) -> None:
    """Print an exception that does not end the command, if CTXEXT_TRACEBACK is set."""
    if error is not None and os.environ.get(TRACEBACK):
        with contextlib.suppress(Exception):  # The streams may be closed, and hooks must not raise.
            print_fault(error)


SUMMARIES = {
    "convert": "Extend a checkpoint's context and save the result as a portable checkpoint.",
    "inspect": "Show a checkpoint's position encoding, context length and applicable methods. Does not load weights.",
    "eval": "Measure retrieval at every depth of the context, and the quality lost at short lengths.",
    "compare": "Try every suitable method on the model in memory and compare them.",
    "search": "Search for the best recipe for a model without training, and write it to a recipe file.",
    "finetune": "Fine-tune an extended model on long sequences, by default with LoRA, and save a portable checkpoint.",
    "questions": "Write conversations with questions about your texts to a file, to look at them or to edit them.",
    "merge": "Merge a LoRA adapter into its base model, one tensor at a time.",
    "verify": "Verify the files, configuration, code, frequencies and weights of a converted checkpoint.",
    "push": "Upload a checkpoint to the Hub, with a model card and a SHA-256 digest of every file.",
    "export": "Export a checkpoint to a GGUF file for llama.cpp, including the schedule that its converter omits.",
    "methods": "List the methods with their requirements and papers.",
    "demo": "Extend the demo checkpoint with five recipes and compare their retrieval.",
    "env": "Print versions, devices and cache folders for a bug report.",
}
"""Each command and the first line of its help, so that a list of all commands loads none of them."""

_FUNCTIONS = {"eval": "eval_", "search": "search_"}
"""Functions with another name than their command; a command is in the module of its name."""

# Commands need them too: a command caches the help option of its first context, which may lack the app's settings.
_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


class _Commands(typer.core.TyperGroup):
    """The subcommands. Usage errors are reported in one line like all others, without secrets."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line; `ctxext help COMMAND` is `ctxext COMMAND --help`."""
        words = settings.pop("args", None) if not args else args[0]
        words = sys.argv[1:] if words is None else [*words]
        if words[:1] == ["help"]:
            words = [*words[1:], "--help"]
        if not settings.get("standalone_mode", True):
            return super().main(words, **settings)
        try:
            code = super().main(words, **{**settings, "standalone_mode": False})
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
    help="Extend the context window of a language model, and measure whether it works.",
    epilog="Start with: ctxext demo",
)


def _print_version(is_set: bool) -> None:
    if is_set:
        sys.stdout.write(f"ctxext {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; every error becomes one line, a hint and exit code 1."""
    gc.set_threshold(10_000)  # The usual 700 takes a fifth of the time of importing torch and transformers.
    atexit.register(gc.freeze)  # Python would collect garbage at the end, for seconds after importing them.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers 5 would fetch kernels that a checkpoint names.
    remember_arguments(sys.argv)
    remember_environment(os.environ)
    _make_streams_safe()
    install_exception_hooks()
    try:
        try:
            app()
        except Exception:  # Explain a full disk for commands that do not name the path.
            from ctxext.files.output_directory import explain_disk_errors

            with explain_disk_errors(Path("OUT")):
                raise
    except CtxextError as error:
        print_error(_fit(error))
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
    except BaseException as error:  # A panic in a Rust library does not derive from Exception.
        print_fault(error)
        sys.exit(1)


def options_of(name: str) -> set[str]:
    """Return the options of a command."""
    return {option for parameter in _command(name).params for option in (*parameter.opts, *parameter.secondary_opts)}


def _fit(error: CtxextError) -> CtxextError:
    """Return an error with the part of its hint that the running command supports."""
    name = next((word for word in sys.argv[1:] if word in SUMMARIES), None)
    return CtxextError(error.message, fit_hint(error.hint, name, options_of, SUMMARIES)) if name else error


def _make_streams_safe() -> None:
    """Make streams accept every character and a closed stream harmless, and redact secrets in them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, RedactedStream):
            continue
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  Until the process ends.
        elif isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # The buffer is flushed first, which fails on a full disk.
                stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, RedactedStream(getattr(sys, name)))
