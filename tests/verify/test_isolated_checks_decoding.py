"""The check after converting decodes from a cache: what it must not let through, and how it finds the cache."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_outputs import CausalLMOutput

import tiny_encodings
import tiny_models
from ctxext.api import Recipe, convert
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE
from ctxext.recipes.registry import method_named
from ctxext.verify import decoding_process, isolated_process
from ctxext.verify.isolated_checks import _settings_at, compare_logits

NAMES = ("self-extend", "bifocal", "dca", "rerope", "sinks", "window", "adaptive")


def recipe(name):
    if name == "mspoe":
        return Recipe([MsPoE(ratio_max=3.0, first_layer=0, head_order="prompt")])
    return Recipe([method_named(name)(factor=4.0)])


def compared(source, out, name, *, finds_cache):
    """Compare a converted checkpoint whose code finds its cache or, as of 0.3.0 under transformers 5.24, does not."""
    convert(str(source), out, recipe(name), check=False)
    if not finds_cache:
        with (out / "private_copy.py").open("a") as file:
            file.write("\n\ndef cache_in(*_, **__):\n    return None\n")
    plan = make_plan(open_checkpoint(str(source)), recipe(name))
    return compare_logits(out, plan.source, plan.recipe, plan.model, plan.stock, foreign=not finds_cache)


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=[] if name == "self-extend" else pytest.mark.thorough)
            for name in (*NAMES, "mspoe")
        ),
        "ntk-alibi",
    ],
)
@pytest.mark.thorough
def test_code_that_finds_no_cache_is_refused(name, llama_source, tmp_path):
    source = tiny_encodings.save("bloom", tmp_path / "bloom") if name == "ntk-alibi" else llama_source
    assert compared(source, tmp_path / "right", name, finds_cache=True).difference < 1e-5
    with pytest.raises(CtxextError, match="decodes incorrectly from its cache: left-padded rows with"):
        compared(source, tmp_path / "wrong", name, finds_cache=False)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.thorough
def test_one_text_of_no_numbers_is_the_largest_difference(llama_source, monkeypatch, at):
    model = AutoModelForCausalLM.from_pretrained(llama_source)
    original = decoding_process.decode

    def broken(*args, **options):
        rows = original(*args, **options)
        rows[at][-1, 0] = torch.nan
        return rows

    assert max(decoding_process.decoding_difference(model).values()) < 1e-5
    monkeypatch.setattr(decoding_process, "decode", broken)
    assert all(math.isnan(number) for number in decoding_process.decoding_difference(model).values())


@pytest.mark.parametrize(
    "family", [name for name in ("gemma4", "gemma4_unified", "qwen3_5") if name in tiny_models.FAMILIES]
)
@pytest.mark.thorough
def test_whole_models_that_number_the_columns_decode_padded_rows(family, tmp_path):
    """Gemma 4 gives its language model the numbers of columns where its caller gives no positions."""
    source = tiny_models.save(family, tmp_path / "source")
    assert compared(source, tmp_path / "out", "self-extend", finds_cache=True).difference < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_short_length_has_all_settings_of_the_method(name, llama_source):
    plan = make_plan(open_checkpoint(str(llama_source)), recipe(name))
    (settings,) = plan.model.code["steps"]
    (step,) = plan.recipe.steps
    short = _settings_at(step, plan.model.code["steps"])
    assert short.keys() == settings.keys()
    assert short["original_length"] == decoding_process.LENGTH < settings["original_length"]
    assert all(short[key] <= decoding_process.LENGTH for key in ("window", "chunk_size", "local") if key in short)


def test_the_cache_is_found_by_its_method_and_the_argument_by_its_type():
    def renamed(self, input_ids, kv: DynamicCache | None = None, use_cache: bool = True): ...

    def unannotated(self, input_ids, past_key_values=None): ...

    def without(self, input_ids, **options): ...

    for forward, name in ((renamed, "kv"), (unannotated, "past_key_values")):
        assert decoding_process.cache_argument(type("Model", (), {"forward": forward})()) == name
    with pytest.raises(LookupError, match=r"Model\.forward has no argument for a cache"):
        decoding_process.cache_argument(type("Model", (), {"forward": without})())
    cache = DynamicCache()
    assert decoding_process.cache_of({"logits": 1, "kv": cache}) is cache
    with pytest.raises(LookupError, match="none of logits has get_seq_length"):
        decoding_process.cache_of({"logits": 1})


def test_a_missing_cache_is_named_and_right_models_pass(llama_source):
    model, broken = (AutoModelForCausalLM.from_pretrained(llama_source).eval() for _ in range(2))
    assert max(decoding_process.decoding_difference(model).values()) < 1e-5
    broken.forward = lambda input_ids, **_: CausalLMOutput(logits=torch.zeros(1, input_ids.shape[1], 3))
    decoding = decoding_process.compare_decoding(broken, [])
    assert "LookupError" in decoding["error"]
    assert "has no cache" in decoding_process.explain_decoding(decoding, model)
    assert decoding_process.explain_decoding({"with position_ids": 1e-6}, None) == ""


def test_what_the_unmodified_model_does_too_is_no_fault(monkeypatch):
    decoding = {"with position_ids": 1e-7, "without position_ids": 3e-2}
    monkeypatch.setattr(decoding_process, "compare_decoding", lambda *_: decoding)
    assert decoding_process.explain_decoding(decoding, None) == ""
    monkeypatch.setattr(decoding_process, "compare_decoding", lambda *_: dict.fromkeys(decoding, 1e-7))
    assert "without position_ids differ from one call by 3.0e-02" in decoding_process.explain_decoding(decoding, None)
    assert "by nan" in decoding_process.explain_decoding({"with position_ids": float("nan")}, None)


def test_no_observed_attention_is_a_failure():
    with pytest.raises(ValueError, match="no attention was observed"):
        isolated_process.largest_difference([], [])
