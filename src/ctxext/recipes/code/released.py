"""The modeling code of earlier releases, which their checkpoints go on carrying: digests, and each release's stub.

`released.json` holds, for each release, the SHA-256 of its portable files, which of them a method needs, and which Auto
classes its stub names; `tools/record_release.py` adds a release to it. Files of two releases never count as one set.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from ctxext.recipes.code.layout import STUB_STYLE, Classes, render_stub

_FILE = "released.json"


def releases() -> Mapping[str, Mapping[str, Any]]:
    """Every recorded release, by its version."""
    content: dict[str, dict[str, Any]] = json.loads((resources.files("ctxext.recipes.code") / _FILE).read_text("utf-8"))
    return content


def released_files() -> frozenset[str]:
    """The names of all files of code that some release wrote."""
    return frozenset(name for release in releases().values() for name in release["digests"])


def code_of_releases(encoding: str, methods: Sequence[str], classes: Classes, stub: str) -> Iterator[dict[str, str]]:
    """For each release the files and digests of a checkpoint that it wrote with these methods, the stub included.

    Args:
        encoding: Of the methods, "rotary" or "alibi".
        methods: The names of the methods with code, in the recipe's order.
        classes: The family's.
        stub: The name of the stub file.
    """
    for release in releases().values():
        if not all(method in release["methods"] for method in methods):
            continue
        shared, entries = release["shared"][encoding], [release["methods"][name] for name in methods]
        files = {*shared, *(file for entry in entries for file in entry["files"])}
        parts = [(entry["title"], entry["files"][0].removesuffix(".py"), entry["class"]) for entry in entries]
        known = {auto: name for auto, name in classes.by_auto_class.items() if auto in release["auto_classes"]}
        modules = [file.removesuffix(".py") for file in files]
        text = _STUBS[release["stub"]](
            Classes(classes.modeling, known, classes.heads), parts, modules, shared[-1].removesuffix(".py")
        )
        digests = {file: release["digests"][file] for file in files}
        yield {**digests, stub: hashlib.sha256(text.encode()).hexdigest()}


def _stub_0_2_0(classes: Classes, methods: Sequence[tuple[str, str, str]], files: Iterable[str], home: str) -> str:
    """The text of the stub as 0.2.0 wrote it."""
    titles = " and ".join(dict.fromkeys(title for title, _, _ in methods))
    named = {home: "family"}
    for _, module, name in methods:
        named[module] = f"{named[module]}, {name}" if module in named else name
    taken = {module: named.get(module, f"__name__ as _{module}") for module in sorted({*files, *named})}
    imports = "".join(f"from .{module} import {names}\n" for module, names in taken.items())
    listed = ", ".join(dict.fromkeys(name for _, _, name in methods))
    defined = "".join(
        f'\n\nclass Ctxext{name}(modeling.{name}):\n    """{name} with {titles}."""\n'
        for name in dict.fromkeys(classes.by_auto_class.values())
    )
    first = {name: auto for auto, name in reversed(list(classes.by_auto_class.items()))}
    registered = "".join(f'Ctxext{name}.register_for_auto_class("{auto}")\n' for name, auto in first.items())
    return f'''"""{classes.by_auto_class["AutoModelForCausalLM"]} with {titles}; each method is in a file of its own."""

{imports}
modeling = family(__name__, "{classes.modeling}", [{listed}])
{defined}

{registered}'''


_STUBS: Mapping[str, Callable[..., str]] = {"0.2.0": _stub_0_2_0, STUB_STYLE: render_stub}
"""How the stub is rendered, by style; a released style is kept here when `render_stub` changes."""
