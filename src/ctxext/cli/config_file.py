"""Options from a YAML file: those on the command line win over it, and what was used can be written as one."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ctxext.errors import CtxextError
from ctxext.reading.strict import parse_yaml, read_text

_NEVER_KEPT = ("config", "resume", "overwrite", "overwrite_anything", "dry_run", "token", "as_json", "quiet", "verbose")
"""What belongs to a single call: how it goes on, what it may replace, what it prints, and secrets."""


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Make a file's values the defaults of the command's options.

    Raises:
        CtxextError: the file cannot be read, or names an option that there is not.
    """
    if path is None:
        return None
    content = parse_yaml(read_text(path), str(path)) or {}
    if not isinstance(content, Mapping):
        raise CtxextError(f'"{path}" holds no options.', hint="Write one on each line, as steps: 400.")
    names = {_word_of(option): option for option in context.command.params if _is_kept(option)}
    defaults = {}
    for key, value in content.items():
        word = str(key).replace("_", "-")
        if word not in names:
            near = difflib.get_close_matches(word, names, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"It may have: {', '.join(names)}."
            raise CtxextError(f'"{path}" has an option "{key}" that there is not.', hint=hint)
        if value is not None:
            defaults[names[word].name] = _as_typed(names[word], value)
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _as_typed(option: Any, value: Any) -> Any:
    """A value as the command line would have it: an option that is given once takes a list with commas."""
    if option.multiple:
        return [str(entry) for entry in (value if isinstance(value, list) else [value])]
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _is_kept(option: Any) -> bool:
    return option.param_type_name == "option" and option.name not in (*_NEVER_KEPT, "help")


def _word_of(option: Any) -> str:
    """The option's own word, without dashes before it."""
    return str(max(option.opts, key=len)).lstrip("-")


def used_options(context: typer.Context) -> str:
    """All options of a call as a file that `--config` reads again."""
    values = {
        _word_of(option): context.params[option.name]
        for option in context.command.params
        if _is_kept(option) and context.params.get(option.name) is not None
    }
    plain = {word: list(value) if isinstance(value, (list, tuple)) else value for word, value in values.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A YAML file of options, as steps: 400; the command line wins over it.",
        is_eager=True,
        callback=_load,
        show_default=False,
    ),
]
