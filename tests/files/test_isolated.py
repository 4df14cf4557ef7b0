"""Scripts run where ctxext cannot be imported."""

import pytest

from ctxext.api import Recipe, convert
from ctxext.files import isolated
from ctxext.files.isolated import last_line_of_errors, run_isolated
from ctxext.methods import MsPoE


@pytest.fixture(params=["real", "forked"])
def each_kind(request):
    if request.param == "real":
        request.getfixturevalue("real_processes")
    return request.param


def test_ctxext_cannot_be_imported_and_the_rest_can(each_kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\nimport ctxext.checkpoint.opening\n")
    result = run_isolated(script, "one", "two")
    assert result.stdout == '["one", "two"]\n'
    assert result.returncode == 1
    assert last_line_of_errors(result) == "ImportError: ctxext must not be needed here"


@pytest.mark.thorough
def test_what_a_process_ends_with(each_kind, tmp_path):
    script = tmp_path / "script.py"
    for line, code, last in (
        ("sys.exit(3)", 3, "no message"),
        ("sys.exit('why')", 1, "why"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "no message"),
        ("print(sorted(os.listdir()), os.getcwd() == os.environ['HF_MODULES_CACHE'])", 0, "no message"),
    ):
        script.write_text(f"import os, sys\n{line}\n")
        result = run_isolated(script)
        assert (result.returncode, last_line_of_errors(result)) == (code, last)
    assert result.stdout == "[] True\n"


@pytest.mark.thorough
def test_a_checkpoint_with_code_in_real_processes(llama_source, tmp_path, real_processes):
    """Other tests fork a process that has loaded what these load themselves."""
    assert isolated.subprocess.__name__ == "subprocess"
    done = convert(str(llama_source), tmp_path / "out", Recipe([MsPoE(first_layer=0, head_order="fixed")]))
    assert done.verification.of == "logits"
    assert done.verification.difference < 1e-4


def test_it_has_no_network_and_no_kernels(each_kind, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['HF_HUB_OFFLINE'], os.environ.get('USE_HUB_KERNELS'))\n")
    assert run_isolated(script).stdout == "1 NO\n"
