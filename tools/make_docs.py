"""Generate the pages of docs/ that are read from the classes. `--check` only says whether they are current."""

import dataclasses
import inspect
import sys
from pathlib import Path

from ctxext.cli.method_options import option_name
from ctxext.cli.methods import carried_by, summary_of
from ctxext.recipes.base import Method
from ctxext.recipes.methods import METHODS
from ctxext.recipes.param import limits_of, options_of
from ctxext.recipes.recipe import presets

DOCS = Path(__file__).parents[1] / "docs"


def methods_page() -> str:
    """docs/methods.md."""
    lines = [
        "# Methods",
        "",
        "Generated from the classes in `src/ctxext/recipes/` by `make docs`; do not edit by hand.",
        "",
        "| method | what it does | carried by | paper |",
        "|---|---|---|---|",
        *(f"| [`{m.name}`](#{m.name}) | {summary_of(m)} | {carried_by(m)} | <{m.paper}> |" for m in METHODS),
        "",
    ]
    for method in METHODS:
        lines += _section(method)
    lines += ["## Presets", "", "Recipes that ship with the package: `ctxext convert SOURCE --recipe NAME`.", ""]
    for name, text in sorted(presets().items()):
        lines += [f"### {name}", "", "```yaml", text.rstrip(), "```", ""]
    return "\n".join(lines)


def _section(method: type[Method]) -> list[str]:
    lines = [f"## {method.name}", "", f"**{method.title}.** {inspect.getdoc(method)}", ""]
    if method.aliases:
        lines += [f"Also called: {', '.join(method.aliases)}.", ""]
    if method.caution:
        lines += [f"Mind: {method.caution}", ""]
    lines += ["| option | default | meaning |", "|---|---|---|"]
    for field in options_of(method):
        default = "required" if field.default is dataclasses.MISSING else field.default
        shown = "" if default is None else default
        lines.append(f"| `{option_name(field.name)}` | {shown} | {limits_of(field).describe()} |")
    return [*lines, ""]


PAGES = {"methods.md": methods_page}


def main() -> None:
    """Write the pages, or say which are out of date."""
    stale = []
    for name, render in PAGES.items():
        path, text = DOCS / name, render()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run make docs")


if __name__ == "__main__":
    main()
