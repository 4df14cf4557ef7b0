"""Hooks of mkdocs: the first page is the README, and the API page is generated from docstrings.

The links of pages work in the repository. On the site, a link out of docs/ points to the repository's address, if it is
known (`repository_links.py`), and becomes plain text otherwise.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
from repository_links import LINK, link_to, repository  # noqa: E402


def on_files(files: Files, config: Any) -> Files:
    """Add the README and the page of docstrings."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=move_links(readme, ROOT, ROOT / "docs")))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links to files outside docs/."""
    if page.file.src_uri in ("index.md", "api.md"):
        return markdown
    place = (ROOT / "docs" / page.file.src_uri).parent
    return move_links(markdown, place, place)


def move_links(text: str, place: Path, to: Path) -> str:
    """Rewrite the links of a page so that they work in another folder.

    Args:
        text: Markdown.
        place: The folder that the links are relative to.
        to: The new folder that the links are relative to.
    """
    address = repository()

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        name, _, anchor = target.partition("#")
        path = Path(os.path.normpath(place / name)) if name else place
        if name and not path.is_relative_to(ROOT / "docs"):
            return link_to(mark, label, path.relative_to(ROOT).as_posix(), address, "main")
        if path.is_dir():
            path /= "README.md"
        relative = os.path.relpath(path, to) if name else ""
        return f"{mark}[{label}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(link, text)


def api_page() -> str:
    """Return the API page: the public names of `ctxext.api` and `ctxext.methods`."""
    text = (ROOT / "src/ctxext/api.py").read_text(encoding="utf-8")
    top = _entries(re.findall(r"^    from (ctxext\.[\w.]+) import (\w+) as \w+$", text, re.MULTILINE))
    methods = _entries(_find_methods())
    head = "# Python API\n\nWhat `from ctxext.api import` reaches; [python.md](python.md) shows it in use.\n"
    return "\n".join([head, *top, "What `from ctxext.methods import` reaches:\n", *methods])


def _find_methods() -> list[tuple[str, str]]:
    """Return the module and class of each method: the classes that state a `name`."""
    return [
        (f"ctxext.recipes.methods.{path.stem}", text.partition("(")[0])
        for path in (ROOT / "src/ctxext/recipes/methods").glob("*.py")
        for text in re.split(r"^class ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        if "\n    name = " in text
    ]


def _entries(names: list[tuple[str, str]]) -> list[str]:
    """Return mkdocstrings entries for modules and their names, sorted by name."""
    ordered = sorted(names, key=lambda pair: pair[1])
    return [f"::: {module}.{name}\n    options: {{heading_level: 2}}\n" for module, name in ordered]
