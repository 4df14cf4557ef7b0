"""The help of a command. Names of options are never truncated, and advanced options are hidden by default."""

import functools
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from ctxext.console import SafeConsole

_NARROW, _WIDE = 60, 110
_GAP = 2
_NAMES = 26
"""Columns for the names of options; the help of a longer name begins on the line below it."""

_TYPED = re.compile(r"(?P<option>--[\w-]+) <(?:list\[)?(?P<kind>[\w ]+)\]?>")
"""An option with the type of its value, as typer shows it."""
_VALUES = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER", "path": "PATH"}
"""Names of values by type."""
_COUNTED = {"LENGTH": "TOKENS", "LENGTHS": "TOKENS"}
"""Names of values by the last word of the option, if they differ from it."""

Row = tuple[str, str]
"""A name and its explanation."""


class Command(typer.core.TyperCommand):
    """A command with help that hides advanced options; `--help-all` shows them too."""

    @property
    def advanced_options(self) -> Collection[str]:
        """Names of the parameters that only `--help-all` shows."""
        return getattr(self.callback, "advanced_options", ())

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including the help option."""
        return read_plainly(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command, and store them for help, which runs before they are parsed."""
        ctx.meta[_WORDS] = tuple(args)
        return super().parse_args(ctx, [*_add_implied(args, getattr(self.callback, "implied_values", {}))])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        print_help(self, ctx)


_WORDS = "ctxext.words"
_NUMBER = re.compile(r"\d[\d_.,]*[kKmM]?")


def _add_implied(words: Sequence[str], implied: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of a command line, with the values of flags without one, which typer does not support."""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        yield word
        if word in implied and not _NUMBER.fullmatch(following):
            yield implied[word]


def read_plainly(parameters: list[Any]) -> list[Any]:
    """Make parameters return text and missing values unchanged.

    Typer parses each value with pydantic. Importing it takes longer than the rest of `methods` and `inspect`.
    """
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = functools.partial(_read_plainly, parameter, parameter.process_value)
    return parameters


def _read_plainly(parameter: Any, process: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    is_plain = (value is None and not parameter.required) or (kind is str and isinstance(value, str))
    if not is_plain or parameter.nargs != 1 or getattr(parameter, "multiple", False):
        return process(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _show_everything(context: typer.Context, is_set: bool) -> None:
    if is_set and not context.resilient_parsing:
        print_help(context.command, context, everything=True)
        raise typer.Exit


HelpAllOption = Annotated[
    bool,
    typer.Option(
        "--help-all",
        help="Show every option and exit.",
        is_eager=True,
        expose_value=False,
        callback=_show_everything,
    ),
]


def print_help(
    command: Any, ctx: typer.Context, *, commands: Mapping[str, str] | None = None, everything: bool = False
) -> None:
    """Print the help of a command and a summary of each subcommand; advanced options only with `everything`."""
    console = SafeConsole()
    words: Sequence[str] = ctx.meta.get(_WORDS, ())
    note = getattr(command.callback, "help_for", None)
    sections, hidden = note(words, everything) if note else ((), frozenset())
    advanced_options: Collection[str] = getattr(command, "advanced_options", ())
    if not everything:
        hidden = {*hidden, *advanced_options}
    parameters = command.get_params(ctx)
    shown = [parameter for parameter in parameters if not parameter.hidden and parameter.name not in hidden]
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    names = [_name_of(argument) if argument.required else f"[{_name_of(argument)}]" for argument in arguments]
    pieces = [ctx.command_path, "[OPTIONS]", *names]
    usage = " ".join([*pieces, *(["COMMAND …"] if commands else [])])
    console.print(Text.assemble(("Usage: ", "yellow"), (usage, "bold")))
    for line in _prose(command.help or "", width_of(console)):
        console.print(line)
    every = [*_panels(shown, ctx), *sections, *([("Commands", commands.items())] if commands else [])]
    for title, rows in every:
        for line in section(title, rows, console):
            console.print(line)
    if advanced_options and not everything:
        console.print("\nShow all options with --help-all.")
    if command.epilog:
        console.print(f"\n{command.epilog}")


def _name_of(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _prose(text: str, width: int) -> Iterator[Text]:
    """Yield the paragraphs of a docstring, wrapped; lines under "Examples:" are unchanged and can be copied."""
    is_example = False
    for paragraph in text.split("\n\n"):
        heading, _, rest = paragraph.partition("\n")
        if heading.strip() == "Examples:":
            is_example = True
            yield Text("\nExamples", style="bold")
            paragraph = rest
        if is_example:
            yield from (Text(f"  {line.strip()}", style="cyan") for line in paragraph.splitlines() if line.strip())
        else:
            yield Text("\n" + "\n".join(textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)))


def _panels(parameters: Iterable[Any], ctx: typer.Context) -> list[tuple[str, list[Row]]]:
    panels: dict[str, list[Row]] = {"Arguments": [], "Options": []}
    for parameter in parameters:
        is_argument = parameter.param_type_name == "argument"
        usual = "Arguments" if is_argument else "Options"
        rows = panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, [])
        names, explained = parameter.get_help_record(ctx)
        options = _TYPED.sub(_name_value, names).replace(" / ", "/")
        name = _name_of(parameter) if is_argument else options
        rows.append((name, explained.removesuffix("  [required]")))
    return [(title, rows) for title, rows in panels.items() if rows]


def _name_value(found: "re.Match[str]") -> str:
    """Return an option with a name for its value instead of a type: PATH, N, or the last word of the option."""
    word = found["option"].rpartition("-")[2].upper()
    return f"{found['option']} {_VALUES.get(found['kind']) or _COUNTED.get(word, word)}"


def section(title: str, rows: Iterable[Row], console: SafeConsole) -> Iterator[Text]:
    """Yield the lines of a section: its heading, then each name with its explanation."""
    width = width_of(console)
    yield Text(f"\n{title}", style="bold")
    rows = list(rows)
    longest = max(len(name) for name, _ in rows)
    indent = 6 if width < _NARROW else 2 + min(longest, _NAMES) + _GAP
    for name, explained in rows:
        lines = textwrap.wrap(" ".join(explained.split()), max(20, width - indent), break_on_hyphens=False) or [""]
        line = Text(f"  {name}", style="cyan")
        if len(name) + 2 + _GAP > indent:
            lines = ["", *lines]
        line.append(" " * max(0, indent - 2 - len(name)) + lines[0], style="not bold default")
        line.rstrip()
        yield line
        yield from (Text(" " * indent + more) for more in lines[1:])


def width_of(console: SafeConsole) -> int:
    """Return the width of help in columns, limited because long lines are hard to read."""
    return max(20, min(console.width, _WIDE))
