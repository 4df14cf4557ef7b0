"""What mkdocs is told beside mkdocs.yml: the first page is the README, and one page is made from docstrings.

Pages keep the links that work where the repository is read. Here a link out of docs/ leads to the repository's address
where CTXEXT_REPOSITORY names it, and is plain text otherwise.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the README and the page of docstrings."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=moved(readme, ROOT, ROOT / "docs")))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links of pages that lead out of docs/."""
    if page.file.src_uri in ("index.md", "api.md"):
        return markdown
    place = (ROOT / "docs" / page.file.src_uri).parent
    return moved(markdown, place, place)


def moved(text: str, place: Path, to: Path) -> str:
    """A page with its links as they are right in another folder.

    Args:
        text: Markdown.
        place: The folder that its links are relative to.
        to: The folder that they shall be relative to.
    """
    address = os.environ.get("CTXEXT_REPOSITORY", "").rstrip("/")

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        name, _, anchor = target.partition("#")
        path = Path(os.path.normpath(place / name)) if name else place
        if name and not path.is_relative_to(ROOT / "docs"):
            where = path.relative_to(ROOT).as_posix()
            return f"{mark}[{label}]({address}/blob/main/{where})" if address else label
        if path.is_dir():
            path /= "README.md"
        relative = os.path.relpath(path, to) if name else ""
        return f"{mark}[{label}]({relative}{'#' + anchor if anchor else ''})"

    return _LINK.sub(link, text)


def api_page() -> str:
    """Return the API page: the public names of `ctxext` and `ctxext.methods`."""
    top = _entries("__init__.py", r"^    from (ctxext\.[\w.]+) import (\w+) as \w+$")
    methods = _entries("recipes/registry.py", r"^from (ctxext\.recipes\.methods\.\w+) import (\w+)$")
    head = "# Python API\n\nWhat `from ctxext import` reaches; [python.md](python.md) shows it in use.\n"
    return "\n".join([head, *top, "What `from ctxext.methods import` reaches:\n", *methods])


def _entries(file: str, imports: str) -> list[str]:
    """Return mkdocstrings entries for the names that a file of the package imports, sorted."""
    text = (ROOT / "src" / "ctxext" / file).read_text(encoding="utf-8")
    names = sorted((name, module) for module, name in re.findall(imports, text, re.MULTILINE))
    return [f"::: {module}.{name}\n    options: {{heading_level: 2}}\n" for name, module in names]
