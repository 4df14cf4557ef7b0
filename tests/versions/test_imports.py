"""Code in checkpoints uses only names that every supported release of transformers has, or guards them.

Code in published checkpoints breaks when a release removes a name that it imports.
"""

import ast
import json
import re
from importlib import resources
from pathlib import Path

import pytest

from releases import RELEASES, require_release, run_in

PORTABLE = Path(str(resources.files("ctxext.portable")))
PACKAGES = ("transformers", "torch")
GUARDS = ("hasattr", "MODERN", "is_available")
"""Words in the test of a branch that states which releases take it."""

CHECK = """
import importlib, json, sys

def find(path):
    place, *names = path.split(".")
    value = importlib.import_module(place)
    for name in names:
        place = f"{place}.{name}"
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(place)

lacking = []
for path in json.loads(sys.argv[1]):
    try:
        find(path)
    except ImportError:
        lacking.append(path)
print(json.dumps(lacking))
"""


def names_in(source):
    """Return the dotted names that a file uses of PACKAGES without a guard."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    places, names = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            entries = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            entries = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for place, bound in entries:
            if place.partition(".")[0] in PACKAGES:
                places[bound] = place
                if not is_guarded(node, parents):
                    names.add(place)
    for node in ast.walk(tree):
        place = places.get(node.value.id, "") if is_name_with_attribute(node) else ""
        name = f"{place}.{node.attr}" if place else module_imported_by(node)
        if name.startswith("transformers") and not is_guarded(node, parents):
            names.add(name)
    return names


def module_imported_by(node):
    """Return the argument of `importlib.import_module`; empty for other nodes."""
    is_import = isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"
    return str(node.args[0].value) if is_import and isinstance(node.args[0], ast.Constant) else ""


def is_name_with_attribute(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def is_guarded(node, parents):
    """Return whether a statement or expression runs only in releases that have the name."""
    while node := parents.get(node):
        if isinstance(node, ast.Try) and any(is_import_error(handler) for handler in node.handlers):
            return True
        if isinstance(node, ast.If | ast.IfExp) and any(word in ast.unparse(node.test) for word in GUARDS):
            return True
    return False


def is_import_error(handler):
    return handler.type is not None and re.search(
        r"ImportError|ModuleNotFoundError|AttributeError", ast.unparse(handler.type)
    )


def lacking(names, release):
    """Return the names that a release lacks."""
    return json.loads(run_in(release, "-c", CHECK, json.dumps(sorted(names))))


def test_names_without_a_guard_are_found():
    found = names_in(
        "import torch\nimport transformers\nfrom transformers import AutoModel, utils as u\n"
        "from transformers.models.auto import modeling_auto\nx = u.logging\ny = transformers.Cache\n"
        "if hasattr(u, 'old'):\n    u.old()\n"
        "try:\n    from transformers import gone\nexcept ImportError:\n    gone = None\n"
        "import importlib\nmodule = importlib.import_module('transformers.conversion_mapping')\n"
    )
    assert found == {
        "torch",
        "transformers",
        "transformers.AutoModel",
        "transformers.utils",
        "transformers.models.auto.modeling_auto",
        "transformers.utils.logging",
        "transformers.Cache",
        "transformers.conversion_mapping",
    }


@pytest.mark.parametrize(
    "release", [None, *(pytest.param(release, marks=pytest.mark.thorough) for release in RELEASES)]
)
@pytest.mark.thorough
def test_every_release_has_the_names_of_portable_files(release):
    require_release(release)
    names = set().union(*(names_in(path.read_text(encoding="utf-8")) for path in PORTABLE.glob("*.py")))
    assert len(names) > 10
    assert lacking(names, release) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("release", "is_lacking"), [("4.57.6", False), (None, True)])
def test_a_name_that_a_release_lacks_is_found(release, is_lacking):
    """transformers 5 removed this one."""
    require_release(release)
    removed = "transformers.utils.is_flax_available"
    assert lacking(names_in(f"import torch\nfrom transformers.utils import {removed.split('.')[-1]}"), release) == (
        [removed] if is_lacking else []
    )
