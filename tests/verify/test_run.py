"""`ctxext verify`: errors that it finds, and correct checkpoints that pass."""

import dataclasses
import hashlib
import json

import pytest

import tiny_models
from ctxext.api import METHODS, Recipe, convert
from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, Yarn
from ctxext.models.checkpoint_info import open_infos
from ctxext.models.model import Loading, load_model
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.model_config import model_config
from ctxext.verify import conversion, isolated_checks
from ctxext.verify import run as verify_run
from ctxext.verify.conversion import Conversion
from ctxext.verify.file_checks import check_configuration
from ctxext.verify.isolated_checks import LoadReport
from ctxext.verify.run import check_loading, verify
from ctxext.version import __version__
from small_llama import change_json, read_json

QUICK_FAMILIES = ("llama", "gemma3_text", "phi3", "gpt_neox", "granite")


def results_of(folder, **options) -> dict[str, tuple[str, str]]:
    """Return status and detail by check."""
    return {finding.check: (finding.status, finding.detail) for finding in verify(str(folder), **options)}


def rewrite(folder, name, change) -> None:
    """Change a JSON file and its recorded digest."""
    content = read_json(folder / name)
    change(content)
    (folder / name).write_text(json.dumps(content))
    manifest = read_json(folder / "ctxext.json")
    manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "ctxext.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["yarn", pytest.param("mspoe", marks=pytest.mark.slow)])
def test_a_fresh_conversion_passes_every_check(originals, llama_source, name):
    results = results_of(originals[name], against=str(llama_source))
    expected = ["record", "files", "weights", "configuration", "lengths", "code", "loading", "frequencies"]
    assert list(results) == [*expected, *(["logits"] if name == "mspoe" else []), "against"]
    assert {status for status, _ in results.values()} == {"passed"}, results
    assert "all 21 tensors" in results["against"][1]


@pytest.mark.parametrize("load", [False, True])
def test_a_checkpoint_that_ctxext_did_not_make_is_not_loaded(llama_source, monkeypatch, load):
    """Loading takes minutes for a large model, and there is no reference for it."""
    monkeypatch.setattr(conversion, "load_isolated", None)
    results = results_of(llama_source, load=load)
    assert (results["record"][0], results["files"][0]) == ("failed", "not checked")
    assert results.get("loading") == (("not checked", "ctxext did not write this checkpoint") if load else None)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("configuration", lambda config: config["rope_scaling"].update(factor=8.0)),
        ("configuration", lambda config: config.update(rope_theta=5e5)),
        ("configuration", lambda config: config["rope_parameters"].update(beta_fast=16.0)),
        ("configuration", lambda config: config.update(original_max_position_embeddings=64)),
        ("configuration", lambda config: config.pop("rope_scaling")),
        ("lengths", lambda config: config.update(max_position_embeddings=1024)),
    ],
)
def test_configuration_that_contradicts_its_recipe_is_found_even_if_recorded(extended, check, change):
    rewrite(extended, "config.json", change)
    results = results_of(extended, load=False)
    assert results["files"][0] == "passed"
    assert results[check][0] == "failed", results


@pytest.mark.parametrize("length", [128, 511, 513, 4096])
def test_a_tokenizer_of_another_length_is_found_even_if_recorded(extended, length):
    """A shorter length truncates texts, and a longer one exceeds the model's context."""
    assert results_of(extended, load=False)["lengths"] == ("passed", "all files specify 512 tokens")
    rewrite(extended, "tokenizer_config.json", lambda config: config.update(model_max_length=length))
    results = results_of(extended, load=False)
    assert results["files"][0] == "passed"
    assert results["lengths"] == ("failed", f'"config.json" specifies 512 tokens, "tokenizer_config.json" {length}')


def test_code_of_another_version_is_found_even_if_recorded_and_not_run(converted):
    folder = converted("mspoe")
    code = folder / "mspoe.py"
    code.write_text(code.read_text() + f"\nopen({str(folder / 'ran')!r}, 'w')\n")
    manifest = read_json(folder / "ctxext.json")
    manifest["files"][code.name] = hashlib.sha256(code.read_bytes()).hexdigest()
    (folder / "ctxext.json").write_text(json.dumps(manifest))
    results = results_of(folder)
    assert results["files"][0] == "passed"
    problem = f'differs from this version\'s code: "mspoe.py" (created by ctxext {__version__})'
    assert results["code"] == ("failed", problem)
    assert {results[name][0] for name in ("loading", "frequencies", "logits")} == {"not checked"}
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda config: config["auto_map"].update(AutoModelForCausalLM="evil.Model")),
        ("config.json", lambda config: config["auto_map"].update(AutoConfig="evil.Config")),
        ("config.json", lambda config: config["auto_map"].update(AutoModel="evil/evil--modeling_ctxext.Model")),
        ("tokenizer_config.json", lambda config: config.update(auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})),
    ],
)
def test_code_from_elsewhere_is_not_run(converted, file, change):
    folder = converted("mspoe")
    rewrite(folder, file, change)
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    assert results_of(folder)["loading"][0] == "not checked"
    assert not runs_only_own_code(open_checkpoint(str(folder)))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "may_load", "with_leave"),
    [
        ("yarn", {}, True, True),
        ("yarn", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, True, True),
        ("yarn", {"model_type": "nobody_knows_it"}, False, True),
        ("yarn", {"model_type": "nobody_knows_it", "ctxext": {}}, False, True),
        ("mspoe", {}, True, True),
        ("mspoe", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, False, True),
    ],
)
def test_what_may_be_loaded_with_and_without_leave(converted, kind, changes, may_load, with_leave):
    """Unknown types and some methods need code: that of ctxext, or code that the user allowed."""
    folder = converted(kind)
    rewrite(folder, "config.json", lambda config: config.update(changes))
    checkpoint = open_checkpoint(str(folder))
    assert Conversion(checkpoint).may_load == may_load
    assert Conversion(checkpoint, trust_remote_code=True).may_load == with_leave


def test_converting_runs_no_code_of_the_source(llama, tmp_path):
    change_json(llama / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForMaskedLM": "evil.Model"})
    (llama / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for name, recipe in {
        "yarn": Recipe([Yarn(factor=4)]),
        "mspoe": Recipe([MsPoE(first_layer=0, head_order="fixed")]),
    }.items():
        done = convert(str(llama), tmp_path / name, recipe)
        assert name == "yarn" or "not run" in done.verification.skipped
    assert not (tmp_path / "ran").exists()


def test_foreign_code_from_the_hub_needs_a_pinned_revision(llama_source, monkeypatch):
    local = open_checkpoint(str(llama_source))
    from_hub = dataclasses.replace(local, name="evil/model", revision="a" * 40)
    module = verify_run
    monkeypatch.setattr(module, "open_checkpoint", lambda *_args, **_options: from_hub)
    for revision in (None, "main", "v1"):
        with pytest.raises(CtxextError, match="pinned revision"):
            verify("evil/model", trust_remote_code=True, revision=revision)
    assert verify("evil/model", trust_remote_code=True, revision="a" * 40, load=False)


@pytest.mark.parametrize(
    ("config", "report", "status"),
    [
        (None, {"name": "LlamaForCausalLM"}, "passed"),
        (None, {"missing": ["model.norm.weight"]}, "failed"),
        (None, {"error": "ImportError: cannot import name 'x' from 'transformers'"}, "failed"),
        ({"quant_method": "gptq"}, {"error": "ValueError: the size of qweight is wrong"}, "failed"),
        ({"quant_method": "gptq"}, {"error": "ImportError: a GPTQ model requires gptqmodel"}, "not checked"),
        ({"quant_method": "x"}, {"error": "importlib.metadata.PackageNotFoundError: No package x"}, "not checked"),
    ],
)
def test_a_model_that_lacks_weights_or_does_not_load_is_found(config, report, status, converted, monkeypatch):
    """A missing package is not an error of the checkpoint."""
    monkeypatch.setattr(conversion, "load_isolated", lambda *_args, **_options: LoadReport(**report))
    one = Conversion(open_checkpoint(str(converted("yarn"))))
    one.checkpoint.config["quantization_config"] = config
    finding = check_loading(one)
    (told,) = report.get("missing") or report.values()
    assert (finding.status, told.rpartition(": ")[2] in finding.detail) == (status, True)
    assert finding.detail.startswith("cannot be checked here: ") == (status == "not checked")


@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_weights_that_only_an_accelerator_quantizes_are_not_loaded_on_a_cpu(key, extended, monkeypatch):
    """bitsandbytes fails in the first forward, with an assertion."""
    change_json(extended / "config.json", quantization_config={"quant_method": "bitsandbytes", key: True})
    monkeypatch.setattr(conversion, "load_isolated", None)
    one = Conversion(open_checkpoint(str(extended)))
    finding = check_loading(one)
    assert (finding.status, key in finding.detail) == ("not checked", True)
    with pytest.raises(CtxextError, match=f'cannot be loaded on a CPU: config.json has "{key}"'):
        load_model(open_infos([str(extended)])[0], Loading(device="cpu"))
    compared = isolated_checks.compare_logits(extended, one.checkpoint, one.recipe, one.expected_model, one.plain_model)
    assert key in compared.skipped


def families() -> list:
    marks = {name: [] if name in QUICK_FAMILIES else [pytest.mark.slow] for name in tiny_models.FAMILIES}
    return [pytest.param(name, marks=marks[name]) for name in tiny_models.FAMILIES]


@pytest.mark.parametrize("model_type", families())
def test_the_recipe_gives_the_configuration_again(model_type, tmp_path):
    """For every family and method, the configuration that verify computes equals that of convert."""
    source = open_checkpoint(str(tiny_models.save(model_type, tmp_path / "source")))
    family = family_of(source.config)
    if family.reason:
        return
    rotary = model_config(source.config).rotary
    for method in METHODS:
        if method.refusal(source.config, family):
            continue
        try:
            plan = make_plan(source, Recipe([method.example_step(rotary)]))
        except CtxextError:
            continue
        made = Checkpoint("made", source.folder, plan.model.config)
        assert check_configuration(Conversion(made)).status == "passed", method.name
