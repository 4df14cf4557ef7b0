"""A shell is offered the values of options, by its own protocol, without torch."""

import os
import subprocess
import sys

import pytest

from ctxext.cli.options import complete_methods, complete_recipe, complete_tasks

CODE = "import sys; sys.argv = ['ctxext']\nfrom ctxext.cli.app import main\ntry:\n    main()\nfinally:\n    "
CODE += "print('torch' in sys.modules or 'transformers' in sys.modules)"


@pytest.mark.parametrize(
    ("words", "offered", "other"),
    [
        ("ctxext convert demo --method y", "yarn", "ntk"),
        ("ctxext convert demo --recipe msp", "mspoe-paper", "abf-32k"),
        ("ctxext eval demo --task short,need", "short,needle", "passkey"),
        ("ctxext search demo --methods pi,ya", "pi,yarn", "ntk"),
        ("ctxext mer", "merge", "convert"),
    ],
)
def test_a_shell_is_offered_values(words, offered, other):
    asked = {"_CTXEXT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    result = subprocess.run([sys.executable, "-c", CODE], env=os.environ | asked, capture_output=True, text=True)
    lines = result.stdout.split()
    assert offered in lines, result.stderr
    assert other not in lines
    assert lines[-1] == "False"


def test_lists_offer_what_they_do_not_have():
    assert complete_tasks("needle,pass") == ["needle,passkey", "needle,passages"]
    assert complete_methods("yarn,ya") == []


def test_recipes_are_presets_and_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best.yaml").touch()
    (tmp_path / "best.txt").touch()
    assert complete_recipe("be") == ["best.yaml"]
    assert "yarn-llama-2-64k" in complete_recipe("")
    assert complete_recipe("nowhere/x") == []
