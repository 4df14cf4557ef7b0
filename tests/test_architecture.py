"""The house rules that a reader relies on: import direction, and what the command line's start costs."""

import ast
import functools
import pkgutil
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "src" / "ctxext"
sys.path.append(str(TESTS.parent / "tools"))
from affected import find_affected_tests  # noqa: E402

FILES = sorted(PACKAGE.rglob("*.py"))
# A package may import itself and those before it. The portable code imports none of them.
LAYERS = (
    *("version", "notebook", "redaction", "errors", "options", "files", "console", "data"),
    *("checkpoint", "recipes", "methods", "verify", "converters", "gguf", "server", "engines"),
    *("models", "served", "tasks", "report", "evaluate"),
    *("compare", "search", "demo", "merge", "finetune", "publish", "api", "cli"),
)
MOST_PARAMETERS = 8
SIGNATURES_OF_OTHERS = {"engines/row_wise.py: forward"}
"""Functions that replace one of another library, and take what it takes."""

HEAVY = ("torch", "transformers", "peft", "matplotlib", "datasets", "numpy", "optuna", "sqlalchemy", "httpcore")


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def runs_without_ctxext(path: Path) -> bool:
    """Whether a file runs in processes that cannot import ctxext, so that it imports its neighbours relatively."""
    is_script = path.parent.name == "verify" and path.stem.endswith("_process")
    return layer_of(path) == "portable" or path.parent.name == "references" or is_script


def rank_of(module: str) -> int:
    """Return the index of the package of a module in `LAYERS`."""
    return LAYERS.index((module.split(".")[1:] or ["version"])[0])


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> list[str]:
    """Every module a file imports, inside functions too."""
    modules = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or runs_without_ctxext(path), f"{path}: relative import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def test_imports_only_point_left():
    for path in FILES:
        layer = layer_of(path)
        if layer in ("__init__", "__main__"):
            continue
        inside = name_of(path)
        for module in imports(path):
            if not module.startswith("ctxext"):
                continue
            assert layer != "portable", f"{path}: portable code must not import ctxext"
            assert not module.startswith("ctxext.portable"), f"{path}: portable code travels as bytes"
            assert rank_of(module) <= rank_of(inside), f"{inside} must not import {module}"


def test_no_files_import_each_other():
    """Imports inside functions and for types count too."""
    names = {name_of(path) for path in FILES}
    graph = networkx.DiGraph()
    for path in FILES:
        for module in imports(path):
            target = module if module in names else module.rpartition(".")[0]
            if target in names:
                graph.add_edge(name_of(path), target)
    groups = [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]
    assert not groups


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a function has, self, *args and **kwargs among them."""
    names = function.args
    every = (*names.posonlyargs, *names.args, *names.kwonlyargs, names.vararg, names.kwarg)
    return sum(name is not None for name in every)


def test_functions_take_few_parameters():
    """What travels together is one object; a command takes its options one by one."""
    many = {
        f"{path.relative_to(PACKAGE).as_posix()}: {node.name}"
        for path in FILES
        if layer_of(path) != "cli"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > MOST_PARAMETERS
    }
    assert many == SIGNATURES_OF_OTHERS


def test_every_method_file_is_listed():
    from ctxext.recipes.base import Method
    from ctxext.recipes.registry import METHODS

    def leaves(cls):
        return {cls} | {leaf for child in cls.__subclasses__() for leaf in leaves(child)}

    named = {cls for cls in leaves(Method) if hasattr(cls, "name")}
    assert named == set(METHODS)


UNNEEDED = (*HEAVY, "pydantic", "yaml", "huggingface_hub", "safetensors", "psutil", "rich.progress", "rich.markdown")
UNNEEDED += (
    "ctxext.search.run",
    "ctxext.compare.run",
    "ctxext.evaluate.run",
    "ctxext.finetune.run",
    "ctxext.publish.push",
    "ctxext.cli.search",
)
"""What most commands need not."""
STARTS = {
    ("convert", "--help"): HEAVY,
    ("verify", "--help"): HEAVY,
    ("eval", "--help"): HEAVY,
    ("--help",): (*UNNEEDED, "rich.table", "ctxext.files.schemas", "ctxext.recipes", "ctxext.checkpoint"),
    ("methods",): (*UNNEEDED, "ctxext.converters.engine_support", "ctxext.recipes.recipe"),
    ("inspect", "demo"): (*UNNEEDED, "ctxext.converters.convert", "ctxext.verify.run"),
}
"""What a command leaves unloaded."""


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_a_command_loads_what_it_needs(words):
    script = f"import sys; sys.argv = ['ctxext', *{words!r}]\nfrom ctxext.cli.app import main\n"
    script += "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
    script += f"sys.exit(','.join(sorted({set(STARTS[words])!r} & sys.modules.keys())) or 0)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("folder", ["tools", "benchmarks"])
def test_what_scripts_import_is_there(folder):
    """Inside functions too, which nothing else runs in the tests."""
    wanted = {name for path in (PACKAGE.parents[1] / folder).glob("*.py") for name in imports(path)}
    for name in (name for name in wanted if name.startswith("ctxext.")):
        pkgutil.resolve_name(name)


@pytest.mark.parametrize(
    ("file", "among", "not_among"),
    [
        ("publish/push.py", "publish/test_push.py", "portable/test_relation.py"),
        ("finetune/chats.py", "finetune/test_chats.py", "gguf/test_convert.py"),
        ("portable/mspoe.py", "portable/test_modeling_family_padding.py", "files/test_output_directory_locks.py"),
        ("recipes/methods/mrrope.py", "recipes/test_divided.py", "files/test_output_directory_locks.py"),
    ],
)
def test_the_tests_of_a_file_are_those_that_import_it(file, among, not_among):
    found = {path.relative_to(TESTS).as_posix() for path in find_affected_tests([PACKAGE / file])}
    assert among in found
    assert not_among not in found


MAY_FETCH = {"accelerate", "bitsandbytes", "datasets", "kernels", "lm_eval", "optuna", "peft", "sentence_transformers"}
"""Packages that fetch, or import one that fetches: bitsandbytes takes a native kernel from the Hub."""


def unguarded_imports(node: ast.AST, names: set[str], *, is_guarded: bool = False) -> list[str]:
    """The imports of such packages outside of `with forbid_network()` and of what is only for types."""
    if isinstance(node, ast.With):
        is_guarded = is_guarded or any(ast.unparse(item.context_expr) == "forbid_network()" for item in node.items)
    if isinstance(node, ast.If):
        is_guarded = is_guarded or ast.unparse(node.test) == "TYPE_CHECKING"
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        modules += [ast.unparse(node.args[0]).strip("'\"")]
    found = [module for module in modules if not is_guarded and module.split(".")[0] in names]
    children = ast.iter_child_nodes(node)
    return found + [module for child in children for module in unguarded_imports(child, names, is_guarded=is_guarded)]


def test_packages_that_may_download_are_imported_offline():
    """Issue: `finetune` and `merge` fetched a native kernel, as peft imports bitsandbytes."""
    found = {}
    for path in FILES:
        # The trainer of transformers imports peft too.
        names = MAY_FETCH | ({"transformers"} if layer_of(path) == "finetune" else set())
        found[path.relative_to(PACKAGE).as_posix()] = unguarded_imports(ast.parse(path.read_text()), names)
    assert {path: modules for path, modules in found.items() if modules} == {"files/offline.py": ["kernels"]}
