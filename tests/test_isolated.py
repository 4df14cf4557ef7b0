"""Scripts run where ctxext cannot be imported."""

from ctxext.verify.isolated import last_line_of_errors, run_isolated


def test_ctxext_cannot_be_imported_and_the_rest_can(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\nimport ctxext.checkpoint\n")
    result = run_isolated(script, "one", "two")
    assert result.stdout == '["one", "two"]\n'
    assert result.returncode == 1
    assert last_line_of_errors(result) == "ImportError: ctxext must not be needed here"
