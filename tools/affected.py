"""List the test files that import a file of the package, directly or through others.

    python tools/affected.py src/ctxext/finetune/chats.py …

`make affected FILES="…"` runs their quick tests. Imports are read, not run: a module is imported by every file that has
an import statement of it or its dotted name in a string. `from ctxext.api import name` imports the module that
defines it.
"""

import ast
import re
import sys
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"


def find_modules() -> dict[str, Path]:
    """Return the files of the package and of the tests by import name, or by path for tests, which share names."""
    package = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path for path in _files(ROOT / "src")}
    package = {name.removesuffix(".__init__"): path for name, path in package.items()}
    tests = {path.stem: path for path in _files(TESTS)}
    return {**package, **tests, **{str(path): path for path in _files(TESTS) if path.stem.startswith("test_")}}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imported_by(path: Path, public: dict[str, str]) -> set[str]:
    """Return the names in a file that may be modules.

    Args:
        path: The file.
        public: The module of each public name of ctxext.
    """
    names, text = set[str](), path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((*path.relative_to(ROOT / "src").parts[: -node.level],)) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)} - {"ctxext"}
            if module == "ctxext.api":
                names |= {public[alias.name] for alias in node.names if alias.name in public}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"ctxext(?:\.\w+)+", node.value))
            # A method lists the files of its portable code.
            names |= {f"ctxext.portable.{stem}" for stem in re.findall(r"^(\w+)\.py$", node.value)}
    return names


def find_affected_tests(files: list[Path]) -> list[Path]:
    """Return the test files that depend on some files."""
    modules = find_modules()
    api = ROOT / "src/ctxext/api.py"
    pairs = re.findall(r"^    from (ctxext[\w.]+) import (\w+)", api.read_text(encoding="utf-8"), re.MULTILINE)
    public = {name: module for module, name in pairs}
    graph = networkx.DiGraph()
    graph.add_nodes_from(modules.values())
    for path in modules.values():
        names = imported_by(path, public) if path != api else set()
        if path.name == "registry.py" and path.parent.name == "recipes":
            names |= {name for name in modules if name.startswith("ctxext.recipes.methods.")}
        graph.add_edges_from((modules[name], path) for name in names if name in modules)
    for test in _files(TESTS):  # pytest finds fixtures by folder.
        graph.add_edges_from(
            (folder / "conftest.py", test) for folder in test.parents if (folder / "conftest.py").exists()
        )
    reached = set(files).union(*(networkx.descendants(graph, path) for path in files))
    return sorted(path for path in reached if path.is_relative_to(TESTS) and path.name.startswith("test_"))


if __name__ == "__main__":
    files = [Path(word).resolve() for word in sys.argv[1:]]
    if not files or not all(path.is_file() for path in files):
        sys.exit(f"{__doc__}\nSpecify existing files.")
    print(*(path.relative_to(ROOT) for path in find_affected_tests(files)), sep="\n")
