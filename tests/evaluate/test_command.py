import json
import shutil
import sys

import pytest
import torch

from ctxext.errors import CtxextError
from hand_made import tiny_llama


@pytest.mark.thorough
def test_the_tables_contain_the_results(run, checkpoint, tmp_path):
    out = tmp_path / "out"
    words = ["--task", "passkey,kv", "-t", "short", "--kv-ids", "number", "--lengths", "300,512", "--samples", "2"]
    result = run("eval", checkpoint, *words, "--depths", "0,50,100", "--out", out)
    assert result.exit_code == 0, result.stderr
    for part in ("passkey", "kv", "300 tokens", "512 tokens", "0   50  100", "short", "perplexity"):
        assert part in result.stdout
    assert "passkey: no correct answers at any length." in result.stdout
    assert str(out / "report.html") in result.stderr
    report = json.loads((out / "report.json").read_text())
    assert [cell["depth"] for cell in report["models"][0]["cells"][:3]] == [0.0, 0.5, 1.0]
    page = (out / "report.html").read_text()
    assert page.count('<table class="map"') == 4
    assert "http://" not in page
    assert "https://" not in page


def test_json_is_the_report_and_nothing_else(run, checkpoint, tmp_path):
    words = ["--task", "passkey", "--lengths", "300", "--samples", "1", "--depths", "2", "--json", "-q"]
    result = run("eval", checkpoint, *words, "--out", tmp_path / "out")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "report.json").read_text())
    assert result.stderr == ""


def test_reports_do_not_overwrite_each_other(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--task", "passkey", "--lengths", "300", "--samples", "1", "--depths", "1", "-q"]
    for _ in range(2):
        run("eval", checkpoint, *words)
    assert (tmp_path / "report" / "report.html").exists()
    assert (tmp_path / "report-2" / "report.html").exists()


def test_converted_models_beside_their_source(run, checkpoint, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "tiny")
    assert run("convert", source, tmp_path / "stretched", "--method", "yarn", "--factor", "2").exit_code == 0
    words = ["--task", "passkey,perplexity,short", "--samples", "2", "--depths", "2", "--out", tmp_path / "out"]
    result = run("eval", tmp_path / "stretched", *words)
    assert result.exit_code == 0, result.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    stretched, beside = report["models"]
    assert stretched["lengths"] == [512, 1024], "by default the original context length and the window"
    assert stretched["summary"] == "yarn ×2"
    assert beside["name"] == "tiny", "its source is read for comparison without being named"
    assert beside["cells"] == []
    assert stretched["short"]["against"]["model"] == "tiny"
    assert "original context length: stretched" in result.stdout
    assert "against the source: stretched" in result.stdout


def no_tokenizer(folder, _):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def not_a_number(folder, _):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[7, 7] = float("nan")
    model.save_pretrained(folder)


def no_weights(folder, _):
    (folder / "model.safetensors").unlink()


PASSKEY = ["--task", "passkey", "--lengths", "300"]
BAD = {
    "beyond the window": (["--lengths", "300,600"], None, "supports 512 tokens, but a prompt length is 600"),
    "too short": (["--task", "kv", "--lengths", "64"], None, 'The task "kv" needs at least'),
    "empty haystack": (["--haystack", "empty.txt"], None, 'The haystack "empty.txt" is empty'),
    "no haystack": (["--haystack", "missing.txt"], None, "cannot be read"),
    "no tokenizer": (PASSKEY, no_tokenizer, "has no tokenizer"),
    "not a number": (PASSKEY, not_a_number, "NaN or infinite logits"),
    "no weights": (PASSKEY, no_weights, "cannot be loaded"),
    "broken documents": (
        ["--task", "documents", "--documents", "broken.jsonl"],
        None,
        'Line 2 of "broken.jsonl" lacks "answers"',
    ),
    "broken data": (["--task", "perplexity", "--data", "data.jsonl"], None, 'Line 2 of "data.jsonl" is not valid JSON'),
    "no text in data": (["--task", "short", "--data", "broken.jsonl"], None, "Line 1"),
    "too little data": (["--task", "short", "--data", "little.txt"], None, "contains no document of 512 tokens"),
    "not a parquet file": (["--task", "short", "--data", "data.parquet"], None, "is not a parquet file"),
    "no such depth": (["--depths", "a,b"], None, "not a list of depths"),
    "depth beyond": (["--depths", "0,150"], None, "not between 0 and 100 %"),
    "no such length": (["--lengths", "4q"], None, '"4q" is not a length'),
    "no such device": (["--device", "abacus"], None, '"abacus" is not a device'),
    "nothing to resume": (["--resume"], None, "Missing option --out"),
    "no harness": (["--harness", "ruler"], None, "not installed"),
    "several": (None, None, "is listed twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(run, checkpoint, tmp_path, monkeypatch, case):
    words, spoil, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    shutil.copytree(checkpoint, tmp_path / "model")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "little.txt").write_text("A few words only.")
    (tmp_path / "data.parquet").write_text("no parquet")
    record = {"question": "Who?", "answers": ["me"], "ctxs": [{"title": "a", "text": "it was me"}]}
    (tmp_path / "broken.jsonl").write_text(json.dumps(record) + '\n{"question": "Who?"}\n')
    (tmp_path / "data.jsonl").write_text('{"text": "some words"}\n{"text": \n')
    if spoil is not None:
        spoil(tmp_path / "model", checkpoint)
    models = ["model"] if words is not None else ["model", "model"]
    result = run("eval", *models, *(words or []))
    assert isinstance(result.exception, CtxextError), result.output
    assert expected in result.exception.message
    assert "\n" not in result.exception.message
    assert result.exit_code == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (["--lengths", "300"], "ctxext eval {} --task passkey --samples 1 --depths 1 --lengths 512"),
        ([], "ctxext compare {} --target-length 1k"),
        (["--lengths", "1500", "--allow-beyond"], "ctxext compare {} --target-length 1500"),
    ],
    ids=["inside", "at the end", "beyond"],
)
@pytest.mark.thorough
def test_the_next_command_continues_this_evaluation(words, step, run, checkpoint, tmp_path):
    words = ["--task", "passkey", "--samples", "1", "--depths", "1", *words, "--out", tmp_path / "out"]
    result = run("eval", checkpoint, *words)
    assert step.format(checkpoint) in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("is_tuned", "step"),
    [(False, "ctxext finetune {folder} OUT"), (True, "ctxext push {folder} USER/stretched --report {out}")],
    ids=["extended", "trained"],
)
@pytest.mark.thorough
def test_the_next_step_names_the_folder(is_tuned, step, run, checkpoint, tmp_path):
    """One that was trained is not proposed for training again, and a name is no path."""
    folder, out = tmp_path / "deep" / "stretched", tmp_path / "out"
    run("convert", checkpoint, folder, "--method", "yarn", "--factor", "2")
    if is_tuned:
        config = json.loads((folder / "config.json").read_text())
        config["ctxext"]["finetune"] = {"version": "0"}
        (folder / "config.json").write_text(json.dumps(config))
    words = ["--task", "passkey,short", "--samples", "1", "--depths", "1", "--lengths", "300", "--out", out]
    result = run("eval", folder, *words)
    assert step.format(folder=folder, out=out) in " ".join(result.stderr.split())
