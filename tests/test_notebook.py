"""The notebook in examples/: what it shows is short and current, and every cell runs in an empty folder."""

import ast
import json
import os
import re
import subprocess

import pytest

from pages import ROOT, programs

NOTEBOOK = ROOT / "examples" / "getting-started.ipynb"
LONGEST = 200


def code_cells(path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def lines_of(output: dict) -> list[str]:
    """Return the lines of one output that are text."""
    text = output.get("text") or output.get("data", {}).get("text/plain") or output.get("traceback") or []
    return "".join(text).splitlines()


def test_its_outputs_are_short_and_name_no_machine():
    cells = code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for output in (output for cell in cells for output in cell["outputs"]):
        assert output["output_type"] != "error"
        assert len(lines_of(output)) <= LONGEST
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work)/", "".join(lines_of(output)))
    assert any(output.get("data", {}).get("image/png") for cell in cells for output in cell["outputs"])


def test_it_uses_the_public_api_only():
    for cell in code_cells(NOTEBOOK):
        source = re.sub(r"^(\s*)%.*$", r"\1pass", "".join(cell["source"]), flags=re.MULTILINE)
        modules = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        assert {module for module in modules if module.startswith("ctxext")} <= {"ctxext.api", "ctxext.methods"}


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    """With the Python of CTXEXT_BIN, where `make story` installs nbclient."""
    _, python = programs()
    has = subprocess.run([python, "-c", "import nbclient, ipykernel"], capture_output=True, check=False)
    if has.returncode and "CTXEXT_BIN" not in os.environ:
        pytest.skip("nbclient and ipykernel are not installed")
    out = tmp_path / "out.ipynb"
    words = [python, ROOT / "tools" / "run_notebook.py", NOTEBOOK, "--out", out]
    result = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=900, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    for new, stored in zip(code_cells(out), code_cells(NOTEBOOK), strict=True):
        assert all(len(lines_of(output)) <= LONGEST for output in new["outputs"])
        printed = [[lines_of(one) for one in cell["outputs"] if one.get("name") == "stdout"] for cell in (new, stored)]
        assert printed[0] == printed[1]
