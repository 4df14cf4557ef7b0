import sys
from types import ModuleType, SimpleNamespace

import pytest

from ctxext.errors import CtxextError
from ctxext.evaluate import Settings, evaluate
from ctxext.evaluate.tasks.harness import check_harness


@pytest.fixture
def stub(monkeypatch):
    """A stand-in for lm-evaluation-harness that knows one task and remembers what it was asked."""
    asked = {}

    def simple_evaluate(**options):
        asked.update(options)
        metrics = {"alias": "niah", "300,none": 0.5, "600,none": -1, "300_stderr,none": 0.1, "sample_len": 500}
        return {"results": {"niah": metrics}}

    module, tasks, models, hugging = (ModuleType(name) for name in ("lm_eval", "tasks", "models", "huggingface"))
    module.__spec__ = SimpleNamespace()
    module.simple_evaluate = simple_evaluate
    tasks.TaskManager = lambda: SimpleNamespace(all_tasks=["niah"])
    hugging.HFLM = lambda **options: options
    for name, part in (("", module), (".tasks", tasks), (".models", models), (".models.huggingface", hugging)):
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", part)
    return asked


def test_its_figures_stand_in_the_report(stub, checkpoint, tmp_path):
    settings = Settings(tasks=("passkey",), lengths=(300,), samples=1, harness=("niah",))
    report = evaluate([str(checkpoint)], settings, out=tmp_path)
    assert report["models"][0]["harness"] == {"niah": {"300": 0.5}}
    assert stub["metadata"]["max_seq_lengths"] == [300]
    assert stub["model"]["max_length"] == 300
    assert "lm-evaluation-harness" in (tmp_path / "report.html").read_text()
    stub.clear()
    assert evaluate([str(checkpoint)], settings, out=tmp_path, resume=True) == report
    assert not stub, "it was run again"


def test_a_task_that_it_does_not_know_is_refused(stub):
    with pytest.raises(CtxextError, match='no task "ruller"'):
        check_harness(["ruller"])
