"""Generated pages are current."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


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
            assert (ROOT / name).exists() or "soft_pi" in name or "quiet" in name, f"{page.name}: {name}"
        for name in re.findall(r"`(test_\w+)`", page.read_text()):
            assert f"def {name}(" in tests, f"{page.name}: {name}"
