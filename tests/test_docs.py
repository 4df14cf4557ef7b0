"""Generated pages are current."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ("soft_pi", "bent", "quiet", "layered")


def test_generated_pages_are_current():
    result = subprocess.run(
        [sys.executable, ROOT / "tools" / "make_docs.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


def test_what_the_pages_name_is_there():
    """Files and tests, by path and by name."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for page in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`((?:tests|tools|src)/[\w./-]+)`", page.read_text()):
            to_be_written = page.name == "adding-a-method.md" and Path(name).stem in EXAMPLES
            assert (ROOT / name).exists() or to_be_written, f"{page.name}: {name}"
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, f"{page.name}: {name}"


def test_a_method_that_no_sweep_tried_is_shown_as_that(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    page = importlib.import_module("families_page")
    row = {"pi": "right", "ntk": "why not", "mspoe": "right"}
    assert [page._cell(row, names) for names in (["new"], ["pi", "new"], ["mspoe"])] == ["not swept", "all", "yes"]
    monkeypatch.setattr(page, "ROTARY", [*row, "new"])
    assert page._unswept([("5.0", {"llama": row}), ("4.0", {})]) == ["Not swept: `new` under transformers 5.0.", ""]
    assert page._unswept([("5.0", {"llama": {**row, "new": "right"}})]) == []
