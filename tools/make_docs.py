"""Generate the pages of docs/ that are built from the classes. `--check` only checks that they are current."""

import ast
import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

from ctxext.checkpoint.geometry import KnownModel, known_models
from ctxext.cli.methods import carried_by, summary_of
from ctxext.converters.engines import TOLERANCE, measured
from ctxext.files.length import format_length
from ctxext.options import option_name
from ctxext.recipes.base import Method
from ctxext.recipes.code.layout import SHARED_FILES, STUB_FILE
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.encodings.rotary import CODE_KEY
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.param import default_of, limits_of, options_of
from ctxext.recipes.recipe import presets
from ctxext.recipes.registry import METHODS
from families_page import families_line, families_page

HOOKS = ("positions", "tables", "rotate", "merge", "attend")
DOCS = Path(__file__).parents[1] / "docs"


def methods_page() -> str:
    """Return the text of docs/methods.md."""
    lines = [
        "# Methods",
        "",
        "Generated from the classes in `src/ctxext/recipes/` by `make docs`; do not edit by hand. Where the last",
        "column of a table is empty, a search leaves the number alone or takes a range from the model and the target.",
        "",
        *_table([method for method in METHODS if not method.is_experimental]),
        "",
        "**Experimental**: usable by name like the others, but they gained nothing where they were measured, or were",
        "not measured, so help, `ctxext methods` and searches leave them out unless they are named.",
        "",
        *_table([method for method in METHODS if method.is_experimental]),
        "",
    ]
    for method in sorted(METHODS, key=lambda method: method.is_experimental):
        lines += _section(method)
    lines += ["## Presets", "", "Recipes that ship with the package: `ctxext convert SOURCE --recipe NAME`.", ""]
    for name, text in sorted(presets().items()):
        lines += [f"### {name}", "", "```yaml", text.rstrip(), "```", ""]
    return "\n".join(lines)


def _table(methods: list[type[Method]]) -> list[str]:
    return [
        "| method | what it does | carried by | paper |",
        "|---|---|---|---|",
        *(f"| [`{m.name}`](#{m.name}) | {summary_of(m)} | {carried_by(m)} | <{m.paper}> |" for m in methods),
    ]


def _section(method: type[Method]) -> list[str]:
    lines = [f"## {method.name}", "", f"**{method.title}.** {inspect.getdoc(method)}", ""]
    if method.is_experimental:
        lines += ["Experimental.", ""]
    if method.aliases:
        lines += [f"Also called: {', '.join(method.aliases)}.", ""]
    if method.caution:
        lines += [f"Mind: {method.caution}", ""]
    if issubclass(method, Relation) and method.name != "adaptive":  # Drawn by draw_maps.py.
        lines += [f"![Distance that each row sees each key at](maps/{method.name}.png)", ""]
    lines += [*(_with_code(method) if issubclass(method, CodeMethod) else _by_keys(method)), families_line(method), ""]
    lines += ["| option | default | meaning | a search tries |", "|---|---|---|---|"]
    for field in options_of(method):
        default = "required" if field.default is dataclasses.MISSING else default_of(field)
        shown, limits = "" if default is None else default, limits_of(field)
        cells = (f"`{option_name(field.name)}`", shown, limits.describe(), _searched(limits.search))
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    measured = [field for field in dataclasses.fields(method) if limits_of(field).measured]
    lines += ["", *(f"In recipe files also `{field.name}`: {limits_of(field).help}" for field in measured)]
    return [*lines, ""] if measured else lines


def _searched(values: tuple[Any, ...]) -> str:
    """Return the range or the choices that a search tries."""
    if values and all(isinstance(value, str) for value in values):
        return ", ".join(values)
    return " to ".join(f"{value:g}" for value in values)


def _by_keys(method: type[Method]) -> list[str]:
    """Return the line with a method's kind and its form in the checkpoint, for methods without code."""
    if method.encoding != "rotary":
        return [f"Kind: {method.kind}. Carried by {carried_by(method)}."]
    rope_type = getattr(method, "rope_type", "default")
    carried = "`rope_theta` alone" if rope_type == "default" else f"the rope type `{rope_type}`"
    return [f"Kind: {method.kind}. Carried by {carried}, in both dialects of config.json."]


def _with_code(method: type[CodeMethod]) -> list[str]:
    """Return the lines with the files and the hooks of a method with code."""
    files = ", ".join(f"`{file.name}`" for file in method.code)
    shared = ", ".join(f"`{name}`" for name in (*SHARED_FILES[method.encoding], STUB_FILE))
    hooks = ", ".join(f"`{hook}`" for hook in _hooks(method))
    return [
        f"Kind: {method.kind}.{f' Hooks: {hooks}.' if hooks else ''} Carried by {files} beside {shared};",
        f"its numbers stand in `{CODE_KEY}` of config.json. Loading needs `trust_remote_code=True`.",
    ]


def _hooks(method: type[CodeMethod]) -> list[str]:
    """Return the hooks that a method's portable class overrides, itself or through a base class in its file."""
    tree = ast.parse(method.code[0].read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    # A class created when its file runs is not in the tree: use all classes of the file instead.
    names, found = [method.code_class] if method.code_class in classes else [*classes], set()
    for name in names:
        if name in classes:
            found |= {node.name for node in classes[name].body if isinstance(node, ast.FunctionDef)}
            names += [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return [hook for hook in HOOKS if hook in found]


def lengths_page() -> str:
    """Return the text of docs/lengths.md."""
    rows = [
        f"| {', '.join(known.names)} | {known.facts['max_position_embeddings']} | {known.original_length} | "
        f"{known.source} |"
        for known in known_models()
    ]
    return "\n".join([*_LENGTHS.splitlines(), *rows, ""])


def models_page() -> str:
    """Return the content of docs/models.md."""
    rows = [
        f"| {', '.join(f'`{name}`' for name in known.names)} | {known.original_length} | {_target(known)} | "
        f"`{_convert_command(known)}` |"
        for known in known_models()
    ]
    return "\n".join([*_MODELS.splitlines(), *rows, ""])


def _target(known: KnownModel) -> str:
    """Return four times the original length, doubled until it is no shorter than the declared one.

    A model with a schedule already uses its declared length: twice that.
    """
    declared = known.facts["max_position_embeddings"]
    if _has_schedule(known):
        return format_length(2 * declared)
    length = 4 * known.original_length
    while length < declared:
        length *= 2
    return format_length(length)


def _convert_command(known: KnownModel) -> str:
    """Return the command for the first model of an entry. self-extend keeps the schedule that a model has."""
    name, target = known.names[0].partition("/")[2].lower(), _target(known)
    method = "self-extend" if _has_schedule(known) else "yarn"
    return f"ctxext convert {known.names[0]} {name}-{target.lower()} --method {method} --target-length {target}"


def _has_schedule(known: KnownModel) -> bool:
    return bool(known.facts["rope_type"] != "default")


_MODELS = """# Published models

Generated by `make docs` from `src/ctxext/checkpoint/known_models.json`. Do not edit by hand.

ctxext knows the original context length of these models, because their config.json declares a different one
([lengths.md](lengths.md) has the sources). No `--original-length` is needed. All other models that `ctxext inspect`
accepts work the same way.

- `yarn`: the target is four times the original context length, or more if the model declares more. It needs no code.
- `self-extend`: for models that come with a schedule. It keeps the schedule, starts from the declared length and
  doubles it. Loading needs `trust_remote_code=True`. Another schedule would need `--replace-scaling`, which may
  cost quality.
- Replace the id for the other models of a row.
- These commands are not measured on these models. Before choosing: `ctxext compare MODEL --target-length LENGTH`.

| model | original context length | target length | command |
|---|---|---|---|"""

_LENGTHS = """# Lengths

Generated by `make docs`; the table is `src/ctxext/checkpoint/known_models.json`. Do not edit by hand.

Every factor counts from the **original context length**: what a model was trained on before any schedule. Five places
may say it, and the first that does is used; `ctxext inspect` shows which.

1. `--original-length 32k`, of `convert`, `inspect`, `eval`, `compare`, `search` and `finetune`
2. what ctxext noted when it converted the model
3. `original_max_position_embeddings` in config.json
4. the table of published models below, by the facts of config.json and never by name
5. `max_position_embeddings`, or Cohere's `model_max_length`

What config.json *declares* beyond that, without a schedule, stays there as long as nothing stretches the model.

## Models that came with a schedule

Llama 3.1, gpt-oss, Gemma 3, Phi-3-128k, DeepSeek and others read their long context by a schedule of their own.

- Methods with code stand on it: `mspoe`, `self-extend`, `adaptive` and the others take what the model reads for the
  length that they start from, and at their neutral numbers nothing changes, bit for bit.
- Another schedule cannot: `yarn` on Llama 3.1 is refused. `--replace-scaling` takes the model's own schedule away,
  and with it what the weights learned; it says which, and from how many tokens to how many. A schedule of the same
  type keeps the numbers that the step does not name: `mscale`, `mscale_all_dim`, `truncate`, `beta_fast`,
  `beta_slow`, `attention_factor`, `short_factor`.
  An `attention_factor` that follows from the old factor (Olmo 3's 1.2079 is 0.1 · ln 8 + 1) is worked out anew.
- A result that reads less than its source is refused. `--allow-shorter` is for those who mean it.
- A `linear` schedule does not say from which length it stretches: where the table does not know it either,
  `--original-length` must. Vicuna 16k says it otherwise: its `max_sequence_length` is the factor times its
  `max_position_embeddings`, which then is where it starts from.
- YaRN as model cards give it (Qwen3, GLM-4) names factor and original length and leaves `max_position_embeddings` as it
  was: such a model reads the factor times the original length.
- Hunyuan's `dynamic` with an `alpha` is a base, `rope_theta` · alpha^(d / (d - 2)) at every length.
  A conversion writes that base out.
- A key inside a schedule that is not known in its family (`attn_factor` in Qwen3) stops every change of that schedule.

A recipe file may give a step both `factor` and `target_length`, as Llama 3.1 has a factor of 8 over 8192 tokens and
reads 131072.

## Published models whose config.json says something else

| model | declared | trained on | source |
|---|---|---|---|"""

_CELLS = ("<!-- cells: by make docs -->\n", "<!-- end of cells -->")
_ENGINES = ("vLLM", "vLLM's transformers backend", "llama.cpp", "llama.cpp with metadata", "MLX")


def serving_page() -> str:
    """Return the text of docs/serving.md with its generated table of cells."""
    text, data = (DOCS / "serving.md").read_text(encoding="utf-8"), measured()
    before, _, rest = text.partition(_CELLS[0])
    _, _, after = rest.partition(_CELLS[1])
    versions = ", ".join(f"{name} {number}" for name, number in sorted(data["versions"].items()))
    lines = [
        f"Versions: {versions}.",
        "",
        f"| checkpoint | {' | '.join(_ENGINES)} |",
        "|---" * (len(_ENGINES) + 1) + "|",
    ]
    for variant, cells in data["cells"].items():
        lines.append(f"| {variant} | {' | '.join(_cell(cells.get(engine)) for engine in _ENGINES)} |")
    return before + _CELLS[0] + "\n".join(["", *lines, "", ""]) + _CELLS[1] + after


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not known"
    if "refused" in cell:
        return f"✗ {cell['refused']}"
    numbers = cell["differences"]
    is_right = max(numbers) <= TOLERANCE
    shown = f"{max(numbers):.1e}" if is_right else ", ".join(f"{number:.2g}" for number in numbers)
    return f"{'✓' if is_right else '✗'} {shown} · {cell['greedy']}"


PAGES = {
    "methods.md": methods_page,
    "families.md": families_page,
    "lengths.md": lengths_page,
    "models.md": models_page,
    "serving.md": serving_page,
}


def main() -> None:
    """Write the pages, or with --check fail if any is out of date."""
    stale = []
    for name, render in PAGES.items():
        path, text = DOCS / name, render()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" not in sys.argv:
        from draw_maps import draw_all  # Only drawing needs matplotlib.

        draw_all(METHODS)
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
