"""What is loaded to be evaluated: tokenizers that fail, whose code runs, and the type that a CPU computes in."""

import dataclasses
import json
import os
import shutil

import pytest
import torch

from ctxext.api import convert
from ctxext.checkpoint import loading
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.app import main
from ctxext.data.encoding import open_tokenizer
from ctxext.errors import CtxextError
from ctxext.finetune.base import open_base
from ctxext.models.checkpoint_info import info_of, open_infos
from ctxext.models.model import Loading, load_model, runs_foreign_code
from ctxext.recipes.recipe import recipe_from_dict
from hand_made import tiny_llama
from releases import IS_OLDER


def changed(folder, edit):
    """The demo's tokenizer with an edited tokenizer.json."""
    shutil.copytree(open_checkpoint("demo").folder, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    edit(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def unknown_token(content):
    content["post_processor"]["single"][0] = {"SpecialToken": {"id": "<nowhere>", "type_id": 0}}


def test_the_same_from_a_command(tmp_path, capfd, monkeypatch):
    folder = changed(tmp_path / "model", unknown_token)
    monkeypatch.setattr("sys.argv", ["ctxext", "eval", str(folder), "--task", "needle", "--lengths", "256", "-q"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith("error: The tokenizer fails: no entry found for key")
    assert said.count("\n") == 2


def test_standard_error_is_restored_after_a_failure(tmp_path, capfd):
    open_tokenizer(open_checkpoint("demo").folder)
    with pytest.raises(CtxextError):
        open_tokenizer(changed(tmp_path / "model", unknown_token))
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"


TRUSTED = {"trust_remote_code": True}


@pytest.fixture
def from_hub(tmp_path):
    """A checkpoint as if downloaded, with code of somebody's or without."""

    def make(**config):
        content = {"model_type": "llama", "max_position_embeddings": 64, "rope_theta": 1e4, **config}
        (tmp_path / "config.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer.json").write_text("{}")
        local = open_checkpoint(str(tmp_path))
        return info_of("mine", dataclasses.replace(local, name="me/mine", revision="a" * 40))

    return make


def test_code_from_the_hub_runs_only_at_a_pinned_revision(from_hub):
    """Issue: remote code is never executed unless it is allowed, with a pinned revision."""
    foreign = from_hub(auto_map={"AutoModelForCausalLM": "evil.Model"})
    assert not runs_foreign_code(foreign, Loading())
    for revision in (None, "main"):
        with pytest.raises(CtxextError, match="pinned revision") as caught:
            runs_foreign_code(foreign, Loading(**TRUSTED, revision=revision))
        assert "--revision " + "a" * 40 in caught.value.hint
    assert runs_foreign_code(foreign, Loading(**TRUSTED, revision="a" * 40))


def test_a_folder_and_a_model_without_code_need_no_revision(from_hub):
    foreign = from_hub(auto_map={"AutoModelForCausalLM": "evil.Model"})
    local = dataclasses.replace(foreign, checkpoint=dataclasses.replace(foreign.checkpoint, revision=None))
    assert runs_foreign_code(local, Loading(**TRUSTED))
    assert not runs_foreign_code(from_hub(), Loading(**TRUSTED))


@pytest.fixture(scope="module")
def of_another_version(tmp_path_factory):
    """A converted checkpoint whose code is a line longer than this version's."""
    folder = tmp_path_factory.mktemp("converted") / "bifocal"
    convert("demo", folder, recipe_from_dict({"steps": [{"method": "bifocal", "factor": 4}]}, "test"), check=False)
    with (folder / "modeling_family.py").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    return folder


def test_code_of_another_version_is_reported_before_loading(of_another_version):
    info = info_of("mine", open_checkpoint(str(of_another_version)))
    with pytest.raises(CtxextError, match="this version of ctxext did not write") as caught:
        runs_foreign_code(info, Loading())
    assert "--trust-remote-code" in caught.value.hint
    assert runs_foreign_code(info, Loading(**TRUSTED))


def test_code_of_another_version_is_not_trained(of_another_version):
    with pytest.raises(CtxextError, match="this version of ctxext did not write and does not run") as caught:
        open_base(str(of_another_version), 512)
    assert "convert its source again" in caught.value.hint


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("saved", "flags", "computed"),
    [
        ("bfloat16", "fpu avx512_bf16 sse", "bfloat16"),
        ("bfloat16", "fpu amx_bf16", "bfloat16"),
        ("bfloat16", "fpu avx2", "float32"),
        ("float16", "fpu amx_bf16", "float32"),
        ("float32", "fpu amx_bf16", "float32"),
    ],
)
def test_auto_on_a_cpu(monkeypatch, tmp_path, saved, flags, computed):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(loading, "_CPU_FLAGS", tmp_path / "cpuinfo")
    model = tiny_llama().to(getattr(torch, saved))
    assert loading.settle_dtype(model, "auto", CPU).dtype == getattr(torch, computed)
    model = tiny_llama().to(getattr(torch, saved))
    assert loading.settle_dtype(model, "fp16", CPU).dtype == getattr(torch, saved), "what was asked for stays"


def test_auto_rounds_no_inverse_frequencies(monkeypatch, tmp_path):
    """They stay in float32, in which transformers builds them, whatever format the weights have."""
    (tmp_path / "cpuinfo").write_text("flags : avx512_bf16\n")
    monkeypatch.setattr(loading, "_CPU_FLAGS", tmp_path / "cpuinfo")
    (info,) = open_infos(["demo"])
    as_saved, asked = (load_model(info, Loading(dtype=dtype, device="cpu")).model for dtype in ("auto", "bf16"))
    assert as_saved.dtype == asked.dtype == torch.bfloat16
    for name, buffer in asked.named_buffers():
        assert buffer.dtype == torch.float32, name
        assert torch.equal(buffer, as_saved.get_buffer(name)), name


def test_a_system_without_cpu_flags_uses_float32(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "_CPU_FLAGS", tmp_path / "nothing")
    assert loading.fast_cpu_dtype() == torch.float32


@pytest.mark.parametrize(
    "kind", ["RagTokenizer", "NoSuchTokenizer", "AutoTokenizer", "PreTrainedModel", "", "a.b", "x--y"]
)
def test_a_class_of_tokenizers_that_is_none_is_one_line(kind, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = changed(tmp_path / "model", lambda content: None)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": kind}))
    result = run("eval", folder, "--task", "passkey", "--lengths", "256", "--samples", "1", "--depths", "1", "-q")
    if kind == "RagTokenizer":
        reason = '"RagTokenizer" is not the tokenizer of one model'
        assert reason in result.exception.message or (IS_OLDER and "cannot be instantiated" in result.exception.message)
    else:
        assert result.exit_code == 0 or isinstance(result.exception, CtxextError), result.exception
