"""One import reaches everything, in whatever order; and what docs/python.md shows runs."""

import ast
import doctest
import importlib
import inspect
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

import ctxext
import ctxext.api
import ctxext.methods
from ctxext.api import (
    METHODS,
    Recipe,
    SearchOptions,
    Settings,
    TrainingOptions,
    convert,
    evaluate,
    plan_conversion,
    plan_push,
)
from ctxext.errors import CtxextError
from ctxext.finetune.run import Finetuned
from ctxext.methods import MsPoE, Ntk, Yarn
from ctxext.options import accepts_options
from ctxext.publish.push import Push
from ctxext.recipes.recipe import recipe_of
from ctxext.search.run import SearchResult

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
CALLED = ("compare", "evaluate", "finetune", "search", "verify")


@pytest.fixture
def in_a_new_python(clean_processes):
    """Run code where nothing of ctxext is imported yet; gives what it prints."""

    def call(code: str) -> str:
        options = {"capture_output": True, "text": True, "env": clean_processes.environment}
        result = clean_processes.run([sys.executable, "-c", code], **options)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return call


def test_every_name_is_what_its_module_defines():
    assert {*ctxext.api.__all__} <= {*dir(ctxext.api)}
    for name, module in ctxext.api._MODULES.items():
        assert getattr(ctxext.api, name) is getattr(importlib.import_module(module), name)


def test_type_checkers_see_the_same_names():
    nodes = ast.walk(ast.parse(Path(ctxext.api.__file__).read_text(encoding="utf-8")))
    told = {(node.module, one.name) for node in nodes if isinstance(node, ast.ImportFrom) for one in node.names}
    assert {(module, name) for name, module in ctxext.api._MODULES.items()} == {
        pair for pair in told if pair[0].startswith("ctxext.")
    }


def test_all_methods_are_there():
    assert ctxext.methods.__all__ == sorted(method.__name__ for method in METHODS)
    assert all(getattr(ctxext.methods, method.__name__) is method for method in METHODS)
    assert {*ctxext.methods.__all__} <= {*dir(ctxext.methods)}


FIRST = ("from ctxext.api import {0}", "import ctxext.{0}.run", "from ctxext.{0} import run", "import ctxext.{0}")


@pytest.mark.parametrize(("name", "first"), [*((name, FIRST[1]) for name in CALLED), *((CALLED[0], f) for f in FIRST)])
def test_a_function_and_a_package_of_one_name(name, first, in_a_new_python):
    code = [first, "import ctxext.api, sys, types", "from ctxext.api import {0} as before"]
    code += ["import ctxext.{0}.run as run", "from ctxext.api import {0} as after"]
    code += ["assert before is after is ctxext.api.{0} is run.{0}", "assert isinstance(run.{0}, types.FunctionType)"]
    code += ["assert ctxext.{0} is sys.modules['ctxext.{0}']"]
    in_a_new_python("\n".join(code).format(name))


@pytest.mark.thorough
def test_every_file_is_imported_by_its_name(in_a_new_python):
    """`import ctxext.search.options as module` failed: `ctxext.search` was a function."""
    package = Path(ctxext.__file__).parent
    files = [path.relative_to(package).with_suffix("") for path in sorted(package.rglob("*.py"))]
    names = [".".join(("ctxext", *file.parts)).removesuffix(".__init__") for file in files if file.name != "__main__"]
    assert len(names) > 100
    code = "import sys\nmissing = set()\n"
    for name in names:
        code += f"try:\n    import {name} as module\nexcept ModuleNotFoundError as e:\n    missing.add(e.name)\n"
        code += f"else:\n    assert module is sys.modules[{name!r}], {name!r}\n"
    # Some files are for inference engines, which are not dependencies.
    assert {*in_a_new_python(code + "print(*missing)").split()} <= {"vllm"}


def test_errors_for_moved_names_contain_the_new_import():
    for name in ("convert", "Recipe"):
        with pytest.raises(AttributeError, match=f"from ctxext.api import {name}"):
            getattr(ctxext, name)


@pytest.mark.thorough
def test_names_are_found_in_a_zip(tmp_path, in_a_new_python):
    package, archive = Path(ctxext.__file__).parent, tmp_path / "ctxext.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (path for path in package.rglob("*") if path.suffix in (".py", ".txt")):
            file.write(path, path.relative_to(package.parent))
    code = ["import inspect, sys", f"sys.path.insert(0, {str(archive)!r})", "from ctxext.api import SearchOptions"]
    code += ["print(inspect.getfile(SearchOptions), 'search' in dir(sys.modules['ctxext.api']))"]
    assert in_a_new_python("\n".join(code)) == f"{archive}/ctxext/search/options.py True\n"


def test_importing_the_package_loads_none_of_it(in_a_new_python):
    shown = in_a_new_python("import sys, ctxext; print(*[name for name in sys.modules if name.startswith('ctxext.')])")
    assert set(shown.split()) == {"ctxext.version"}


def test_a_name_that_is_not_there_is_refused():
    for module in (ctxext, ctxext.api, ctxext.methods):
        with pytest.raises(AttributeError, match="nothing_of_ours"):
            module.nothing_of_ours  # noqa: B018
        with pytest.raises(ImportError):
            exec(f"from {module.__name__} import nothing_of_ours")


def test_what_tests_put_in_place_comes_back(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ctxext.api, "convert", len)
        assert ctxext.api.convert is len
    assert ctxext.api.convert is convert


def test_steps_lists_files_and_presets_become_recipes(tmp_path):
    yarn = Yarn(factor=4)
    assert Recipe(yarn) == Recipe([yarn]) == recipe_of(yarn) == recipe_of([yarn]) == recipe_of(Recipe(yarn))
    (tmp_path / "x.yaml").write_text("steps: [{method: yarn, factor: 4}]")
    assert recipe_of(tmp_path / "x.yaml").steps == recipe_of(str(tmp_path / "x.yaml")).steps == (yarn,)
    assert recipe_of("mspoe-paper").steps == (MsPoE(schedule="linear", head_order="prompt"),)
    for wrong in (["yarn"], [Yarn], 7, []):
        with pytest.raises((CtxextError, TypeError)):
            recipe_of(wrong)


def test_lengths_are_words_or_numbers():
    assert Ntk(target_length="2k") == Ntk(target_length=2048)
    with pytest.raises(CtxextError, match="is not a length"):
        Ntk(target_length="far")
    folder = Path(ctxext.api.open_checkpoint("demo").folder)
    plan = plan_conversion(folder, None, Yarn(factor=4), original_length="0.25k")
    assert plan.encoding.usable_length == 1024
    assert ctxext.api.open_checkpoint(folder, original_length="0.25k").original_length == 256
    settings = Settings(lengths="512,2k", original_length="1k")
    assert (settings.lengths, settings.original_length) == ((512, 2048), 1024)
    assert [Settings(lengths=given).lengths for given in (512, ["0.5k"], (512,))] == [(512,)] * 3
    training = TrainingOptions(length="2k", start_length="256", positions="pose", window="1k")
    assert (training.length, training.start_length, training.window) == (2048, 256, 1024)
    search = SearchOptions("2k", lengths="1k", original_length="0.5k")
    assert (search.target_length, search.lengths, search.original_length) == (2048, (1024,), 512)
    for options, name in ((Settings, "lengths"), (TrainingOptions, "window"), (SearchOptions, "target_length")):
        with pytest.raises(CtxextError, match=r'"far" is not a length'):
            options(**{name: "far"})


def test_options_are_an_object_or_keywords_or_both():
    @accepts_options(SearchOptions)
    def target(source, options, *, out=None):
        return options.target_length, options.trials, out

    assert target("demo", SearchOptions(1024), trials=3, out="x") == (1024, 3, "x")
    assert target("demo", target_length="1k") == target("demo", options=SearchOptions("1k")) == (1024, None, None)
    with pytest.raises(TypeError):
        target("demo", SearchOptions(1024), "x")
    for function in (ctxext.api.search, ctxext.api.finetune, ctxext.api.push):
        assert inspect.signature(function).parameters["options"].default is None


def test_what_a_push_would_send_is_planned(tmp_path):
    convert("demo", tmp_path / "x", Yarn(factor=4), check=False)
    before = sorted(tmp_path.rglob("*"))
    upload = plan_push(tmp_path / "x", "me/x", base="someone/demo")
    assert repr(upload).startswith("UploadPlan('x': ")
    assert f"{len(upload.sizes)} files" in repr(upload)
    assert "base_model: someone/demo" in upload.card
    assert sorted(tmp_path.rglob("*")) == before


def test_a_conversion_is_shown(tmp_path):
    done = convert("demo", tmp_path / "<b>x", [Yarn(factor=4)], check=False)
    assert repr(done).startswith("Conversion('<b>x': yarn ×4, 512 → 2048 tokens")
    page = done._repr_html_()
    assert "&lt;b&gt;x" in page
    assert "<b>" not in page


def test_other_results_are_shown():
    options = {"options": None, "data": None, "losses": ((1, 3.0), (2, 2.5)), "num_trained": 4, "num_parameters": 9}
    options |= {"device": "cpu", "dtype": "fp32"}
    shown = {
        "Finetuned('<i>': 2 steps, loss 2.500, 60 s)": Finetuned(folder=Path("<i>"), seconds=60.0, **options),
        "SearchResult(yarn ×4)": SearchResult(Recipe(Yarn(factor=4)), None, None, (Path("<i>.yaml"),)),
        "SearchResult(no recipe significantly improves the model)": SearchResult(None, None, None, ()),
        "Push('https://<i>': 2 files, 12 bytes)": Push("https://<i>", "abc", True, {"a": 5, "b": 7}, ()),
    }
    for words, result in shown.items():
        assert repr(result) == words
        assert result._repr_html_().startswith("<table><tr><th>")
        assert "<i>" not in result._repr_html_()
    assert "2.500" in next(iter(shown.values()))._repr_html_()


@pytest.mark.thorough
def test_a_report_is_its_content_and_is_shown(tmp_path):
    asked = {"tasks": ("passkey",), "samples": 1, "depths": (0.5,)}
    report = evaluate("demo", Settings(**asked), lengths="256")
    assert report["settings"] == evaluate("demo", **asked, lengths=(256,))["settings"]
    with pytest.raises(TypeError, match="lenghts"):
        evaluate("demo", lenghts="256")
    assert json.loads(json.dumps(report)) == report
    assert "passkey" in report._repr_html_()


@pytest.mark.parametrize("module", ["ctxext", "ctxext.recipes.recipe"])
def test_examples_in_docstrings_run(module):
    place = importlib.import_module(module)
    result = doctest.testmod(place)
    assert result.failed == 0
    assert result.attempted >= 2


def test_the_page_shows_every_function():
    assert len(SNIPPETS) == 14
    code = "".join(SNIPPETS)
    assert [name for name in (*CALLED, "convert", "plan_conversion", "plan_push") if f"{name}(" not in code] == []


@pytest.mark.thorough
def test_the_snippets_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/python.md", "exec"), space)
    assert space["model"].config.max_position_embeddings == 2048
    assert inspect.signature(convert).parameters["overwrite"]
    assert (tmp_path / "demo-tuned" / "model.safetensors").is_file()
