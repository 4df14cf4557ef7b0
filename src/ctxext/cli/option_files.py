"""Option files for `ctxext finetune`: user files, built-in presets, and the file of a finished run."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from ctxext.cli.output import Output, wants_json
from ctxext.errors import CtxextError
from ctxext.files.json_schema import OPTIONS, closed_object, file_schema, schema_line, value_schema
from ctxext.files.length import names_in
from ctxext.files.strict import parse_yaml, read_text
from ctxext.finetune.options import STAGES, presets


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Use a file's values as defaults of the command's options."""
    if path is None:
        return None
    content = parse_yaml(read_text(path), str(path)) or {}
    if not isinstance(content, Mapping):
        raise CtxextError(f'"{path}" contains no options.', hint="Write one option per line, for example steps: 400.")
    _take(context, "config", content, str(path))
    return path


def _take_preset(context: typer.Context, name: str | None) -> str | None:
    """Use a preset's values as defaults of the command's options, or list the presets and exit."""
    if name is None:
        return None
    known = presets()
    if name == "list":
        content = {key: dataclasses.asdict(preset) for key, preset in known.items()}
        lines = [line for key, preset in known.items() for line in (key, *(f"  {line}" for line in preset.lines()))]
        Output(as_json=wants_json()).result(content, *(Text(line) for line in lines))
        raise typer.Exit
    if name not in known:
        raise CtxextError(f'Unknown preset "{name}".', hint=f"Choose from {', '.join(known)}; see --preset list.")
    _take(context, "preset", known[name].options, name)
    return name


def _take_back(context: typer.Context, words: list[str] | None) -> list[str] | None:
    """Ignore options of a preset or a file, in any order on the command line."""
    _take(context, "without", dict.fromkeys(names_in(words or []), ""), "--without")
    return words


def _take(context: typer.Context, kind: str, content: Mapping[str, Any], place: str) -> None:
    """Use values by option name as defaults of the command's options; a file overrides a preset."""
    names, kinds = _file_options(context.command), context.meta.setdefault("ctxext.finetune", {})
    values = kinds.setdefault(kind, {})
    for key, value in content.items():
        word = str(key).replace("_", "-")
        if word not in names:
            near = difflib.get_close_matches(word, names, n=1)
            hint = f'Did you mean "{near[0]}"?' if near else f"Options: {', '.join(names)}."
            raise CtxextError(f'Unknown option "{key}" in "{place}".', hint=hint)
        listed = value if isinstance(value, list) else [value]
        if any(isinstance(entry, Mapping) for entry in listed):
            values[names[word].name] = json.dumps(value)
        elif value is not None and names[word].multiple:
            values[names[word].name] = [str(entry) for entry in listed]
        elif value is not None:  # An option that cannot be repeated accepts a list with commas.
            values[names[word].name] = ",".join(map(str, value)) if isinstance(value, list) else value
    above = {**kinds.get("preset", {}), **kinds.get("config", {})}
    context.default_map = {name: above[name] for name in above.keys() - kinds.get("without", {}).keys()}


def _file_options(command: Any) -> dict[str, Any]:
    """Return the options that a command's file may contain, by name on the command line."""
    names = command.callback.file_options
    return {max(option.opts, key=len).lstrip("-"): option for option in command.params if option.name in names}


def _print_schema(context: typer.Context, is_set: bool) -> None:
    """Print the JSON Schema of option files and exit."""
    if is_set:
        Output().schema(options_schema(context.command))
        raise typer.Exit


def options_schema(command: Any) -> dict[str, Any]:
    """Return the schema of a command's option files. Combinations of options are checked only by ctxext."""
    owners = command.callback.file_options
    values = {
        word: value_schema(owners[option.name], option.name, nullable=True)
        for word, option in _file_options(command).items()
    }
    return file_schema("Options of finetune", **closed_object(values, []))


def used_options(context: typer.Context) -> str:
    """Return the options of a call as YAML that `--config` can read."""
    values = {word: context.params.get(str(option.name)) for word, option in _file_options(context.command).items()}
    values |= {word: json.loads(value) for word, value in values.items() if word == STAGES and value}
    plain = {word: list(value) if isinstance(value, list | tuple) else value for word, value in values.items()}
    used = {word: value for word, value in plain.items() if value is not None}
    return schema_line(OPTIONS) + yaml.safe_dump(used, sort_keys=False, allow_unicode=True)


def _read_first(flag: str, callback: Callable[..., Any], text: str) -> Any:
    """Declare an option that is read before the options with defaults that it changes."""
    return typer.Option(flag, help=text, is_eager=True, callback=callback, show_default=False)


ConfigOption = Annotated[
    Path | None,
    _read_first("--config", _load, "YAML file of options, for example steps: 400. Command-line options override it."),
]
PresetOption = Annotated[
    str | None,
    _read_first(
        "--preset", _take_preset, "Options of a published recipe; list shows all. Other options override them."
    ),
]
SchemaOption = Annotated[
    bool,
    _read_first("--schema", _print_schema, "Print the JSON Schema of --config files, for editors."),
]
WithoutOption = Annotated[
    list[str] | None,
    _read_first("--without", _take_back, "Ignore these options from --preset/--config, for example start-length."),
]
