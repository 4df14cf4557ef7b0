"""One import reaches everything, in whatever order; and what docs/python.md shows runs."""

import doctest
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest

import ctxext
from ctxext import (
    METHODS,
    MsPoE,
    Ntk,
    Recipe,
    SearchOptions,
    Settings,
    TrainingOptions,
    Yarn,
    convert,
    evaluate,
    plan_conversion,
    plan_push,
)
from ctxext.errors import CtxextError
from ctxext.finetune.run import Finetuned
from ctxext.lazy import Package
from ctxext.options import accepts_options
from ctxext.publish.push import Push
from ctxext.recipes.recipe import recipe_of
from ctxext.search.run import Found

PAGE = (Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
PACKAGES = "ctxext ctxext.recipes ctxext.converters ctxext.checkpoint ctxext.evaluate ctxext.finetune ctxext.search"
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


@pytest.mark.parametrize("package", [*PACKAGES.split(), "ctxext.compare", "ctxext.verify", "ctxext.publish"])
def test_every_name_is_what_its_module_defines(package):
    module = importlib.import_module(package)
    assert isinstance(module, Package)
    names = set(module.__all__)
    assert names <= set(dir(module))
    for name in names:
        assert getattr(module, name) is not None
    assert {*module._names} <= names
    for name, place in module._names.items():
        assert getattr(module, name) is getattr(importlib.import_module(place), name)


def test_all_methods_are_there():
    assert {method.__name__ for method in METHODS} <= set(ctxext.__all__)
    assert all(getattr(ctxext, method.__name__) is method for method in METHODS)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        *((name, "from ctxext import {0}") for name in CALLED),
        *((CALLED[0], first) for first in ("from ctxext.{0} import __all__", "import ctxext.{0}.run")),
    ],
)
def test_a_package_and_its_function_are_one_object_in_any_order(name, first, in_a_new_python):
    code = [first, "import ctxext, inspect, sys", "from ctxext import {0} as before", "import ctxext.{0}.run"]
    code += ["from ctxext import {0} as after", "from ctxext.{0} import {0} as function"]
    code += ["assert before is after is sys.modules['ctxext.{0}'] is ctxext.{0}", "assert callable(after)"]
    code += ["assert inspect.signature(after) == inspect.signature(function)"]
    code += ["assert function is sys.modules['ctxext.{0}.run'].{0}"]
    in_a_new_python("\n".join(code).format(name))


@pytest.mark.parametrize("module", ["converters.convert", "finetune.merge", "publish.push"])
def test_a_function_stays_one_where_a_module_has_its_name(module, in_a_new_python):
    code = [f"import ctxext.{module}", "from ctxext import convert, merge, push", "import types"]
    code += ["from ctxext.converters import convert as c", "from ctxext.finetune import merge as m"]
    code += ["from ctxext.publish import push as p", "assert (c, m, p) == (convert, merge, push)"]
    code += ["assert not any(isinstance(one, types.ModuleType) for one in (c, m, p))"]
    in_a_new_python("\n".join(code))


def test_importing_the_package_loads_none_of_it(in_a_new_python):
    shown = in_a_new_python("import sys, ctxext; print(*[name for name in sys.modules if name.startswith('ctxext.')])")
    assert set(shown.split()) == {"ctxext.lazy", "ctxext.version"}


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        ctxext.nothing_of_ours  # noqa: B018
    with pytest.raises(ImportError):
        exec("from ctxext import nothing_of_ours")
    with pytest.raises(TypeError, match=r"ctxext\.recipes cannot be called"):
        ctxext.recipes()


def test_what_tests_put_in_place_comes_back(monkeypatch):
    from ctxext import converters

    before = converters.convert
    with monkeypatch.context() as patch:
        patch.setattr(converters, "convert", len)
        assert converters.convert is len
    assert converters.convert is before


def test_a_recipe_is_what_stands_for_one(tmp_path):
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
    folder = Path(ctxext.open_checkpoint("demo").folder)
    plan = plan_conversion(folder, None, Yarn(factor=4), original_length="0.25k")
    assert plan.encoding.usable_length == 1024
    assert ctxext.open_checkpoint(folder, original_length="0.25k").original_length == 256
    settings = Settings(lengths="512,2k", original_length="1k")
    assert (settings.lengths, settings.original_length) == ((512, 2048), 1024)
    assert [Settings(lengths=given).lengths for given in (512, ["0.5k"], (512,))] == [(512,)] * 3
    training = TrainingOptions(length="2k", start_length="256", positions="pose", window="1k")
    assert (training.length, training.start_length, training.window) == (2048, 256, 1024)
    search = SearchOptions("2k", lengths="1k", original_length="0.5k")
    assert (search.target_length, search.lengths, search.original_length) == (2048, (1024,), 512)
    for options, name in ((Settings, "lengths"), (TrainingOptions, "group"), (SearchOptions, "target_length")):
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
    for function in (ctxext.search, ctxext.finetune, ctxext.push):
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
    shown = {
        "Finetuned('<i>': 2 steps, loss 2.500, 60 s)": Finetuned(folder=Path("<i>"), seconds=60.0, **options),
        "Found(yarn ×4)": Found(Recipe(Yarn(factor=4)), None, None, (Path("<i>.yaml"),)),
        "Found(no recipe surely improves the model)": Found(None, None, None, ()),
        "Push('https://<i>': 2 files, 12 bytes)": Push("https://<i>", "abc", True, {"a": 5, "b": 7}, ()),
    }
    for words, result in shown.items():
        assert repr(result) == words
        assert result._repr_html_().startswith("<table><tr><th>")
        assert "<i>" not in result._repr_html_()
    assert "2.500" in next(iter(shown.values()))._repr_html_()


def test_a_report_is_its_content_and_is_shown(tmp_path):
    report = evaluate("demo", Settings(tasks=("passkey",), lengths=(256,), samples=1, depths=(0.5,)))
    assert json.loads(json.dumps(report)) == report
    assert "passkey" in report._repr_html_()


@pytest.mark.parametrize("module", ["ctxext", "ctxext.recipes.recipe"])
def test_examples_in_docstrings_run(module):
    place = importlib.import_module(module)
    result = doctest.testmod(place)
    assert result.failed == 0
    assert result.attempted >= 2


def test_the_page_shows_every_function():
    assert len(SNIPPETS) == 13
    code = "".join(SNIPPETS)
    assert [name for name in (*CALLED, "convert", "plan_conversion", "plan_push") if f"{name}(" not in code] == []


def test_the_snippets_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "docs/python.md", "exec"), space)
    assert space["model"].config.max_position_embeddings == 2048
    assert inspect.signature(convert).parameters["overwrite"]
    assert (tmp_path / "demo-tuned" / "model.safetensors").is_file()
