"""ALiBi by the row: bit-equal within the original length, the paper's slopes beyond, however the text arrives."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiny_encodings
from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.errors import CtxextError
from ctxext.files.isolated import run_isolated
from ctxext.recipes.code.method import PORTABLE
from ctxext.recipes.encodings.biases import alibi_slopes
from ctxext.recipes.methods.ntk_alibi import NtkAlibi
from ctxext.recipes.model_config import model_config
from ctxext.verify import encodings_process, isolated_checks
from ctxext.verify.rotation import reference_of
from portable_checkpoints import load
from small_llama import read_json
from tiny_encodings import ALIBI, LENGTH, VOCABULARY

FACTOR, HEADS = 4, 6
METHODS = (NtkAlibi,)
LENGTH_KEYS = {"bloom": "seq_length", "falcon": "max_position_embeddings", "mpt": "max_seq_len"}


def tokens(length, batch=1, seed=0):
    return torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("alibi")
    return {name: tiny_encodings.save(name, place / name) for name in ALIBI}


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    def in_process(script, task):
        content = json.loads(Path(task).read_text())
        if content["check"] != "slopes":
            return run_isolated(script, task)
        report = encodings_process.compare_slopes(content)
        return subprocess.CompletedProcess(script, 0, json.dumps(report), "")

    monkeypatch.setattr(isolated_checks, "run_isolated", in_process)


@pytest.fixture(scope="module")
def row_wise(sources, tmp_path_factory):
    """Each family by each method, row-wise."""
    place, made = tmp_path_factory.mktemp("row-wise"), {}
    for name, source in sources.items():
        for method in METHODS:
            made[name, method] = place / f"{name}-{method.name}"
            convert(str(source), made[name, method], Recipe([method(factor=FACTOR)]), check=False)
    return made


EVERY = [(name, method) for name in ALIBI for method in METHODS]
every = pytest.mark.parametrize(("name", "method"), EVERY, ids=lambda one: getattr(one, "name", one))


@pytest.mark.parametrize("rows", ["row-wise", "static"])
@every
def test_the_logits_are_the_papers(name, method, rows, sources, tmp_path):
    done = convert(str(sources[name]), tmp_path / "out", Recipe([method(factor=FACTOR, rows=rows)]))
    assert done.verification.difference < 1e-5
    assert done.verification.change > 1e-2
    assert read_json(tmp_path / "out/config.json")[LENGTH_KEYS[name.removesuffix("-rw")]] == FACTOR * LENGTH


@pytest.mark.thorough
def test_other_slopes_are_refused(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(NtkAlibi, "exponents", lambda self, heads: [0.9] * heads)
    with pytest.raises(CtxextError, match="differ"):
        convert(str(sources["bloom"]), tmp_path / "out", Recipe([NtkAlibi(factor=FACTOR)]))


@pytest.mark.parametrize(
    ("name", "form", "before", "after"),
    [
        ("mpt", "chunks", "leaves_alone(seen + length)", "leaves_alone(max(seen, length))"),
        ("falcon", "padded", "(mask.to(device).cumsum(-1) - 1)[:, columns]", "(mask.cumsum(-1) - 1)[:1, columns]"),
        ("bloom", "beams", "[:, columns]", "[:, columns].sort(0, descending=True).values"),
    ],
)
def test_a_fault_in_one_form_is_refused(name, form, before, after, sources, tmp_path, monkeypatch):
    portable = shutil.copytree(PORTABLE, tmp_path / "portable")
    content = (portable / "modeling_alibi.py").read_text()
    assert content.count(before) == 1
    (portable / "modeling_alibi.py").write_text(content.replace(before, after))
    monkeypatch.setattr("ctxext.recipes.recipe.PORTABLE", portable)
    monkeypatch.setattr(encodings_process, "explain_decoding", lambda *_: "")  # Which sees some of them too.
    with pytest.raises(CtxextError, match=rf"logits of the converted model differ from the reference by \S+: {form} "):
        convert(str(sources[name]), tmp_path / "out", Recipe([NtkAlibi(factor=FACTOR)]))


@torch.no_grad()
@every
def test_rows_within_the_original_length_stay_bit_equal(name, method, sources, row_wise):
    before, after, ids = load(sources[name]), load(row_wise[name, method]), tokens(FACTOR * LENGTH)
    assert torch.equal(before(ids[:, :LENGTH]).logits, after(ids[:, :LENGTH]).logits)
    before.config.max_seq_len = FACTOR * LENGTH  # Of MPT, which stops there.
    stock, own = before(ids).logits, after(ids).logits
    assert torch.equal(stock[:, :LENGTH], own[:, :LENGTH])
    assert (stock[:, LENGTH:] - own[:, LENGTH:]).abs().amax((0, 2)).min() > 1e-4


@torch.no_grad()
def test_eager_attention_of_falcon(sources, row_wise):
    """It adds the bias twice, in stock transformers too; what is left of it for a row is the same."""
    before, after = (
        load(one, attn_implementation="eager") for one in (sources["falcon"], row_wise["falcon", NtkAlibi])
    )
    ids = tokens(3 * LENGTH)
    stock, own = before(ids).logits, after(ids).logits
    assert torch.equal(stock[:, :LENGTH], own[:, :LENGTH])
    assert not torch.allclose(stock[:, LENGTH:], own[:, LENGTH:], atol=1e-3)
    assert (after(ids[:, :20]).logits - own[:, :20]).abs().max() < 1e-4


def bias_of(model, ids):
    """The bias that the first block is given, for each row."""
    seen = []
    block = next(module for name, module in model.named_modules() if name.endswith((".h.0", ".blocks.0")))
    hook = block.register_forward_pre_hook(
        lambda _, args, named: seen.append(named.get("alibi", named.get("position_bias"))), with_kwargs=True
    )
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("name", ALIBI)
def test_ntk_alibi_trains_like_the_unmodified_model(name, sources, row_wise):
    """Gradients by checkpointing are those without, in the forward that the rows' slopes belong to."""
    ids, gradients = tokens(2 * LENGTH), []
    for checkpointing in (False, True):
        model = load(row_wise[name, NtkAlibi]).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = model(ids, labels=ids, use_cache=False).loss
        with torch.no_grad():
            model(tokens(3 * LENGTH), use_cache=False)  # Another forward in between.
        loss.backward()
        gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*gradients, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("name", ALIBI)
def test_half_precision_keeps_short_inputs(name, sources, row_wise):
    ids = tokens(LENGTH)
    before, after = (load(folder, dtype=torch.bfloat16) for folder in (sources[name], row_wise[name, NtkAlibi]))
    assert torch.equal(before(ids).logits, after(ids).logits)
    assert after(tokens(3 * LENGTH)).logits.isfinite().all()


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 16, 20, 32, 71, 112])
def test_any_number_of_heads(heads):
    """The order of slopes is that of the three families, the gentlest is divided by s, the steepest by nothing."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    slopes, settings = alibi_slopes(heads), {"factor": 5.0, "original_length": 8}
    theirs = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    assert torch.allclose(torch.tensor(slopes), theirs, rtol=1e-6)
    for method in METHODS:
        own = [m * 5.0**-e for m, e in zip(slopes, method(factor=5).exponents(heads), strict=True)]
        wanted = reference_of(method).slopes(settings, heads, 0)
        assert own == pytest.approx(wanted, rel=1e-6)
    if heads > 1:
        order = sorted(range(heads), key=lambda head: -slopes[head])
        new = reference_of(NtkAlibi).slopes(settings, heads, 0)
        assert new[order[0]] == slopes[order[0]]
        assert new[order[-1]] == pytest.approx(slopes[order[-1]] / 5)
        assert sorted(new, reverse=True) == [new[head] for head in order]


@pytest.mark.parametrize("name", ALIBI)
def test_verify_and_inspect(name, sources, row_wise):
    folder = row_wise[name, NtkAlibi]
    findings = {one.check: one for one in verify(str(folder), against=str(sources[name]), load=False)}
    assert {one.status for one in findings.values()} <= {"passed", "not checked"}, findings
    seen = inspect_checkpoint(open_checkpoint(str(folder)))
    assert (seen.model.encoding.trained_length, seen.model.encoding.context_length) == (LENGTH, FACTOR * LENGTH)
    assert {row.engine: row.status for row in seen.serving} == {
        "transformers": "exact", "vLLM": "not", "SGLang": "not", "llama.cpp": "not", "MLX": "not",
    }  # fmt: skip
    plain = inspect_checkpoint(open_checkpoint(str(sources[name])))
    assert [method for method, reason in plain.methods.items() if not reason] == ["ntk-alibi"]
    assert ("does not support longer inputs" in plain.model.encoding.describe()) == (name == "mpt")


@pytest.mark.thorough
def test_verify_loads_it_in_a_clean_process(row_wise, tmp_path):
    findings = {one.check: one for one in verify(str(row_wise["mpt", NtkAlibi]))}
    assert findings["logits"].status == findings["loading"].status == "passed", findings


def test_a_changed_number_is_found(row_wise, tmp_path):
    shutil.copytree(row_wise["bloom", NtkAlibi], tmp_path / "out")
    config = read_json(tmp_path / "out/config.json")
    config["ctxext_code"]["steps"][0]["original_length"] += 1
    (tmp_path / "out/config.json").write_text(json.dumps(config))
    findings = {one.check: one.status for one in verify(str(tmp_path / "out"), load=False)}
    assert findings["configuration"] == "failed"


def test_it_is_replaced_and_not_stacked(row_wise, tmp_path):
    with pytest.raises(CtxextError, match="already extended"):
        convert(str(row_wise["mpt", NtkAlibi]), tmp_path / "no", Recipe([NtkAlibi(factor=2)]), check=False)
    done = Recipe([NtkAlibi(factor=8)])
    convert(str(row_wise["mpt", NtkAlibi]), tmp_path / "out", done, replace_scaling=True, check=False)
    (step,) = read_json(tmp_path / "out/config.json")["ctxext_code"]["steps"]
    assert (step["method"], step["original_length"]) == ("ntk-alibi", LENGTH)
    assert load(tmp_path / "out")(tokens(8 * LENGTH)).logits.isfinite().all()


@pytest.mark.thorough
def test_code_named_by_the_source_is_not_loaded(tmp_path):
    """MPT and Falcon-RW were published with code of their own, whose configuration is no class of transformers."""
    source = tiny_encodings.save("mpt", tmp_path / "source")
    config = {**read_json(source / "config.json"), "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}}
    (source / "config.json").write_text(json.dumps(config))
    convert(str(source), tmp_path / "out", Recipe([NtkAlibi(factor=2)]))
    places = read_json(tmp_path / "out/config.json")["auto_map"]
    assert {"AutoModel", "AutoModelForCausalLM"} <= set(places)
    assert {place.partition(".")[0] for place in places.values()} == {"modeling_ctxext"}


def test_a_bias_that_transformers_ignores_is_reported(tmp_path):
    source = tiny_encodings.save("mpt", tmp_path / "source", more={"attn_config": {"alibi_bias_max": 16}})
    done = convert(str(source), tmp_path / "out", Recipe([NtkAlibi(factor=2)]), check=False)
    assert any("alibi_bias_max" in caution for caution in done.plan.cautions)


def test_bloom_has_2048_trained_tokens_by_default():
    assert model_config({"model_type": "bloom"}).encoding.trained_length == 2048
    assert model_config({"model_type": "bloom"}, 4096).encoding.trained_length == 4096


def test_a_device_map_moves_the_bias(row_wise):
    from accelerate.utils import send_to_device

    bias = bias_of(load(row_wise["bloom", NtkAlibi]), tokens(2 * LENGTH))
    assert bias.bias.numel() + bias.shares.numel() < 2.1 * HEADS * 2 * LENGTH, "nothing grows with the square"
    assert torch.equal(send_to_device(bias, "cpu").expand_queries(), bias.expand_queries())
    assert send_to_device(bias, "meta").shares.device.type == "meta"
    assert sys.modules[type(bias).__module__].__file__.endswith("modeling_alibi.py")
