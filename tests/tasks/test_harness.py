import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ctxext.api import Settings, evaluate
from ctxext.errors import CtxextError
from ctxext.models.model import wrap_model
from ctxext.tasks import harness
from ctxext.tasks.harness import check_harness, run_harness
from hand_made import tiny_llama


@pytest.fixture
def stub(monkeypatch):
    """A stand-in for lm-evaluation-harness that knows one task and remembers what it was asked."""
    asked = {}

    def simple_evaluate(**options):
        asked.update(options)
        asked.setdefault("runs", []).append((options["tasks"], options["metadata"]["max_seq_lengths"]))
        if options["tasks"] != ["niah"]:
            (length,) = options["metadata"]["max_seq_lengths"]
            score = 4096 / length
            return {"results": {task: {f"{length},none": score, "65536,none": -1} for task in options["tasks"]}}
        metrics = {"alias": "niah", "300,none": 0.5, "600,none": -1, "300_stderr,none": 0.1, "sample_len": 500}
        return {"results": {"niah": metrics}}

    module, tasks, models, hugging = (ModuleType(name) for name in ("lm_eval", "tasks", "models", "huggingface"))
    module.__spec__ = SimpleNamespace()
    module.simple_evaluate = simple_evaluate
    tasks.TaskManager = lambda: SimpleNamespace(all_tasks=["niah", *harness.RULER])
    hugging.HFLM = lambda **options: options
    for name, part in (("", module), (".tasks", tasks), (".models", models), (".models.huggingface", hugging)):
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", part)
    return asked


@pytest.mark.thorough
def test_the_report_has_the_figures_of_the_harness(stub, checkpoint, tmp_path):
    settings = Settings(tasks=("passkey",), lengths=(300,), samples=1, harness=("niah",))
    report = evaluate([str(checkpoint)], settings, out=tmp_path)
    assert report["models"][0]["harness"] == {"niah": {"300": 0.5}}
    assert stub["metadata"]["max_seq_lengths"] == [300]
    assert stub["model"]["max_length"] == 300
    assert stub["limit"] == 1
    assert "lm-evaluation-harness" in (tmp_path / "report.html").read_text()
    stub.clear()
    assert evaluate([str(checkpoint)], settings, out=tmp_path, resume=True) == report
    assert not stub, "it was run again"
    log = tmp_path / "cells.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if "harness" not in json.loads(line)))
    assert evaluate([str(checkpoint)], settings, out=tmp_path, resume=True)["models"] == report["models"]
    assert stub["runs"] == [(["niah"], [300])], "a run that was killed before it runs it when resumed"


def test_a_task_that_it_does_not_know_is_refused(stub):
    with pytest.raises(CtxextError, match='no task "ruller"'):
        check_harness(["ruller"])


def test_ruler_is_run_length_by_length(stub, tokenizer):
    loaded, some = wrap_model("tiny", tiny_llama(), tokenizer), ["niah_single_1", "ruler_vt"]
    metrics = run_harness(loaded, some, [4096, 16384], samples=7)
    assert metrics == {task: {"4096": 1.0, "16384": 0.25} for task in some}
    assert [lengths for _, lengths in stub["runs"]] == [[4096], [16384]]
    assert stub["limit"] == 7


def test_a_length_without_figures_is_refused(stub):
    check_harness(["ruler_vt"], [4096, 131072])
    with pytest.raises(CtxextError, match="does not support 512"):
        check_harness(["ruler_vt"], [512])
    check_harness(["niah"], [512])


def test_its_tasks_load_a_tokenizer_that_names_no_code(stub, checkpoint, tmp_path, monkeypatch):
    """RULER in the harness loads the tokenizer again, with trust."""
    folder, seen = tmp_path / "strangers", []
    shutil.copytree(checkpoint, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": ["theirs.Words"] * 2}}))
    (folder / "theirs.py").write_text("raise SystemExit")
    known = sys.modules["lm_eval"].simple_evaluate

    def simple_evaluate(**options):
        place = Path(options["metadata"]["tokenizer"])
        seen.append({file.name: file.read_text() for file in place.iterdir()})
        return known(**options)

    monkeypatch.setattr(sys.modules["lm_eval"], "simple_evaluate", simple_evaluate)
    evaluate(
        [str(folder)], Settings(tasks=("passkey",), lengths=(300,), samples=1, harness=("niah",)), out=tmp_path / "o"
    )
    (files,) = seen
    assert "tokenizer.json" in files
    assert "theirs" not in str(files)
