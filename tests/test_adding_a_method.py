"""docs/adding-a-method.md, followed word by word in a copy of the checkout: the code below comes from the page itself.

A config method, one that states a divisor per pair, a code method, and a relation map that differs by layer. Files that
are touched by hand are counted, then the pages are made and the quick tests of the rooms concerned run in the copy.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ctxext.recipes.registry import BY_NAME

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding-a-method.md"
REFERENCES = "src/ctxext/verify/references"
TABLE = "REFERENCES = {\n"
NAMES = ("soft-pi", "bent", "quiet", "layered")
ALSO = re.compile(r"tests/recipes/|test_docs\.py|test_verification_far\.py")
"""Tests that concern methods and do not name METHODS."""
MENTIONS = re.compile(r"\bMETHODS\b|from (relation_cases|test_padding_matrix) import")
"""METHODS, or a table of cases that is made of them."""
STEP = re.compile(r"\d\. .*?`(src/[\w/]+\.py)`")
"""A numbered step of the page, with the file that it is about."""


def quick_tests(root: Path) -> list[str]:
    """Every file of tests that mentions METHODS, and a few more; not this one, which makes the checkout."""
    files = [path for path in sorted((root / "tests").rglob("test_*.py")) if path.name != Path(__file__).name]
    return [str(path) for path in files if ALSO.search(str(path)) or MENTIONS.search(path.read_text("utf-8"))]


def code_of(page: str) -> dict[str, str]:
    """The code that the page asks for by file: each block belongs to the path that was named last in a numbered step.

    References are added to a file that exists, and may be several.
    """
    files, path, block = {}, None, None
    for line in page.splitlines():
        if block is not None:
            if line.strip() == "```":
                text = textwrap.dedent("\n".join(block)) + "\n"
                files[path], block = f"{files[path]}\n\n{text}" if path in files else text, None
            else:
                block.append(line)
        elif named := STEP.match(line):
            path = named[1]
        elif line.strip() == "```python":
            assert path not in files or path.startswith(REFERENCES), f"{path} has two blocks of code"
            block = []
    return files


def lines_of(page: str) -> dict[str, list[str]]:
    """The lines that the page asks for in the tables of references, by file."""
    lines, path = {}, None
    for line in page.splitlines():
        if named := STEP.match(line):
            path = named[1]
        elif found := re.search(r'`("[\w-]+": Reference\(.+\),)`', line):
            lines.setdefault(path, []).append(found[1])
    return lines


def follow(root: Path) -> set[str]:
    """Do what the page says in a checkout; gives the files that were touched."""
    page = PAGE.read_text(encoding="utf-8")
    files = code_of(page)
    for path, text in files.items():
        if path.startswith(REFERENCES):
            before, table, lines = (root / path).read_text(encoding="utf-8").partition(TABLE)
            added = "".join(f"    {line}\n" for line in lines_of(page)[path])
            (root / path).write_text(f"{before}{text}\n\n{table}{added}{lines}", encoding="utf-8")
            continue
        assert not (root / path).exists(), path
        (root / path).write_text(text, encoding="utf-8")
    return {*files}


def copy_of_the_checkout(root: Path) -> Path:
    for name in ("src", "tests", "tools", "docs", "examples", "benchmarks", ".ci"):
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "shared-data")
        shutil.copytree(ROOT / name, root / name, ignore=ignored, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file() and not path.is_symlink() and path.name != ".git":
            shutil.copy2(path, root / path.name)
    return root


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    root = copy_of_the_checkout(tmp_path_factory.mktemp("checkout"))
    follow(root)
    return root


@pytest.fixture(scope="module")
def documented(checkout):
    """The checkout with its pages made."""
    ran(checkout, "tools/make_docs.py")
    return checkout


def ran(root: Path, *words: object, path: tuple[Path, ...] = ()) -> str:
    """What a Python process says in which the copy's package is the one that is imported."""
    places = os.pathsep.join(map(str, (root / "src", *path)))
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    return said


def test_the_page_lists_these_files_and_a_name(tmp_path):
    """The recipe, the portable code of what needs some, and the reference."""
    (tmp_path / "src").mkdir()
    shutil.copytree(ROOT / "src" / "ctxext", tmp_path / "src" / "ctxext", ignore=shutil.ignore_patterns("__pycache__"))
    before = {path: path.read_bytes() for path in (tmp_path / "src").rglob("*") if path.is_file()}
    touched = follow(tmp_path)
    now = {path for path in (tmp_path / "src").rglob("*") if path.is_file()}
    changed = {str(path.relative_to(tmp_path)) for path in now if before.get(path) != path.read_bytes()}
    wanted = {f"{REFERENCES}/{name}.py" for name in ("frequencies", "attention")}
    wanted |= {f"src/ctxext/recipes/methods/{name.replace('-', '_')}.py" for name in NAMES}
    assert changed == touched == wanted | {"src/ctxext/portable/quiet.py", "src/ctxext/portable/layered.py"}


@pytest.mark.thorough
def test_generated_pages_list_missing_measurements(documented):
    page, methods = ((documented / "docs" / name).read_text() for name in ("families.md", "methods.md"))
    assert re.search(r"Not swept: `bent`, `layered`, `quiet`, `soft-pi` under transformers 5\S+; .* 4\S+\.\n", page)
    assert methods.count("| not swept | not swept |") == 3, "the two code methods share a row"
    assert "- `--scale` (0.5, search 0.1–1): Factor on the scores." in methods
    assert (documented / "docs" / "maps" / "layered.png").is_file()
    ran(documented, "tools/make_docs.py", "--check")


@pytest.mark.thorough
def test_linters_like_the_code_of_the_page(checkout):
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.exists():
        pytest.skip("ruff is not installed")
    files = [checkout / path for path in code_of(PAGE.read_text(encoding="utf-8"))]
    for words in (["check"], ["format", "--check"]):
        done = subprocess.run([ruff, *words, *files], cwd=checkout, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


OF_THE_NEW = f"""
import re

NEW = re.compile("{"|".join(NAMES)}")
OLD = re.compile(r"\\b({"|".join([*BY_NAME, "calibrated", "stock"])})\\b")


def pytest_collection_modifyitems(config, items):
    cases = [item.callspec.id if hasattr(item, "callspec") else "" for item in items]
    old = [item for item, case in zip(items, cases) if OLD.search(case) and not NEW.search(case)]
    config.hook.pytest_deselected(items=old)
    items[:] = [item for item in items if item not in old]
"""
"""Leave out the cases of methods that were there before: `make test` runs those."""


@pytest.mark.thorough
def test_every_quick_test_that_mentions_methods(documented, tmp_path):
    (tmp_path / "of_the_new.py").write_text(OF_THE_NEW)
    marked = "not slow and not engine and not browser and not thorough"
    quick = ("-q", "-p", "no:cacheprovider", "-p", "of_the_new", "-m", marked)
    said = ran(documented, "-m", "pytest", *quick, *quick_tests(documented), path=(tmp_path,))
    assert re.search(r"\d+ passed", said)


CHECKED = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
import ctxext
from ctxext.api import Recipe, convert
from ctxext.methods import MsPoE
from ctxext.recipes.recipe import step_from_dict

assert str(Path(ctxext.__file__)).startswith(sys.argv[3]), ctxext.__file__
source, place, length = sys.argv[1], Path(sys.argv[2]), 128
heads = {"method": "mspoe", "head_order": "fixed", "first_layer": 0}
recipes = {
    "layered": [{"method": "layered", "factor": 4, "temperature": "logn"}],
    "even": [{"method": "rerope", "factor": 4, "window": 16, "temperature": "logn"}],
    "alone": [{"method": "quiet", "scale": 0.25}],
    "first": [{"method": "quiet", "scale": 0.25}, heads],
    "last": [heads, {"method": "quiet", "scale": 0.25}],
    "bent": [{"method": "bent", "factor": 4}],
    "soft": [{"method": "soft-pi", "factor": 4}],
}
ids, logits = torch.arange(3, 303)[None] % 30 + 3, {}
for name, steps in recipes.items():
    # Verified in a clean process, or for the last two against the reference, by converting itself.
    done = convert(source, place / name, Recipe([step_from_dict(step, "here") for step in steps]))
    assert not done.verification.skipped, done.verification
    trust = {"trust_remote_code": True, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(place / name, **trust).eval()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, parts = None, []
        for start, stop in [(0, 100), (100, 230), *((at, at + 1) for at in range(230, 300))]:
            out = model(ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    logits[name] = whole
    difference = ((torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()).item()
    print(name, "verified", done.verification.difference, "chunks and decoding", difference, file=sys.stderr)
    assert difference < 1e-4, (name, difference)
assert torch.equal(logits["layered"][:, :length], logits["even"][:, :length]), "inside L nothing changes"
assert not torch.allclose(logits["layered"], logits["even"], atol=1e-3), "each layer has its own window"
torch.testing.assert_close(logits["first"], logits["last"])
assert not torch.allclose(logits["first"], logits["alone"])
settings = json.loads((place / "layered" / "config.json").read_text())["ctxext_code"]["steps"][0]
assert settings["windows"] == [16, 64], settings
saved = AutoModelForCausalLM.from_pretrained(place / "layered", **trust)
saved.save_pretrained(place / "saved")
with torch.no_grad():
    again = AutoModelForCausalLM.from_pretrained(place / "saved", **trust).eval()(ids, use_cache=False).logits
assert torch.equal(again, logits["layered"])
"""


@pytest.mark.thorough
def test_they_convert_and_verify_and_decode_as_they_read(checkout, llama_source, tmp_path):
    (tmp_path / "checked.py").write_text(CHECKED)
    ran(checkout, tmp_path / "checked.py", llama_source, tmp_path, checkout)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (('["layers"].index(layer)]', "['layers'].index(0)]"), "differ from the reference by"),
        (('settings["windows"][settings["layers"].index(layer)]', "settings['layer']"), "layered fails: KeyError"),
    ],
)
def test_a_reference_that_takes_one_layer_for_all_is_noticed(checkout, llama_source, tmp_path, change, wrong):
    """Of a layer's own map, and of a fault inside a reference: told as such."""
    file = checkout / REFERENCES / "attention.py"
    right = file.read_text()
    assert change[0] in right
    try:
        file.write_text(right.replace(*change))
        words = ["convert", llama_source, tmp_path / "out", "-m", "layered", "--factor", "4"]
        with pytest.raises(AssertionError, match=wrong) as caught:
            ran(checkout, "-m", "ctxext", *words)
    finally:
        file.write_text(right)
    assert "does not load" not in str(caught.value)
