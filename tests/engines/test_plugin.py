"""Relation maps in vLLM with ctxext installed, compared with transformers, for requests of several lengths at once.

Qwen3.5 is a hybrid of linear and full attention with several position axes; its linear attention runs in float32.
"""

from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import float32_linear_attention
import multimodal_models
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.convert import convert
from ctxext.recipes.recipe import recipe_from_dict

pytest.importorskip("vllm", reason="vLLM is not installed")
from offline_vllm import Engine

pytestmark = pytest.mark.engine

FOUR = {"factor": 4}
RECIPES = {
    **{name: [{"method": name, **FOUR}] for name in ("self-extend", "bifocal", "dca", "rerope")},
    **{name: [{"method": name, **FOUR}] for name in ("sinks", "window", "adaptive")},
    "heads": [
        {"method": "mspoe", "schedule": "ntk", "head_order": "fixed", "first_layer": 0},
        {"method": "self-extend", **FOUR},
    ],
}
SMALL = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
CHUNKED = {**SMALL, "enable_chunked_prefill": True, "max_num_batched_tokens": 512}
NEW = 16


def prompts(longest):
    """Four prompts with a common prefix, one of them within the window of 512 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 3000, (longest,), generator=generator).tolist()
    lengths = (300, *(length for length in (601, 1300, 1900) if length < longest))
    return [ids[: min(length, 500)] + ids[::-1][: max(length - 500, 0)] for length in lengths]


@pytest.mark.parametrize("name", RECIPES)
def test_written_and_scored_as_in_transformers(name, tmp_path):
    folder, longest = tmp_path / name, 2048
    convert("demo", folder, recipe_from_dict({"steps": RECIPES[name]}, name), check=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()
    asked = [ids[: longest - NEW] for ids in prompts(longest)]
    with closing(Engine(folder, length=longest, dtype="float32", trust=True, arguments=CHUNKED)) as engine:
        scores = engine.log_probabilities(asked)
        written = [engine.write(asked, [NEW] * len(asked)) for _ in range(2)]  # The second time from cached prefixes.
    worst = 0.0
    for number, (ids, scored) in enumerate(zip(asked, scores, strict=True)):
        with torch.no_grad():
            wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            greedy = model.generate(torch.tensor([ids]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        wanted = wanted[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(scored) - wanted).abs().max()))
        assert written[0][number] == written[1][number] == greedy[0, len(ids) :].tolist()
    assert worst < 1e-3


def test_inside_the_window_it_is_the_engine_itself(tmp_path):
    convert("demo", tmp_path / "map", recipe_from_dict({"steps": RECIPES["self-extend"]}, "map"), check=False)
    scores = []
    for folder in (open_checkpoint("demo").folder, tmp_path / "map"):
        own = {**SMALL, "model_impl": "transformers"}
        with closing(Engine(folder, length=512, dtype="float32", trust=True, arguments=own)) as engine:
            scores.append(engine.log_probabilities([ids[:480] for ids in prompts(2048)]))
    assert scores[0] == scores[1]


def test_prompt_order_is_refused_beside_them_too(tmp_path):
    steps = [{**RECIPES["heads"][0], "head_order": "prompt"}, RECIPES["self-extend"][0]]
    convert("demo", tmp_path / "prompt", recipe_from_dict({"steps": steps}, "prompt"), check=False)
    engine = Engine(tmp_path / "prompt", length=2048, dtype="float32", trust=True, arguments=SMALL)
    with closing(engine), pytest.raises(ValueError, match="needs whole sequences"):
        engine.write([prompts(2048)[1]], [2])


LENGTHS = (40, 100, 250)


@pytest.fixture(scope="module")
def qwen3_5(tmp_path_factory):
    """Save a random Qwen3.5 of two layers, with a context length of 64 and an image tower."""
    pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 needs torchvision")
    float32_linear_attention.install()
    return multimodal_models.save("qwen3_5", tmp_path_factory.mktemp("qwen3_5"))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "heads"])
def test_a_hybrid_with_several_position_axes_is_served_as_in_transformers(name, qwen3_5, tmp_path):
    convert(str(qwen3_5), tmp_path / name, recipe_from_dict({"steps": RECIPES[name]}, name), check=False)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.float32, trust_remote_code=True)
    longest, generator = 256, torch.Generator().manual_seed(0)
    asked = [torch.randint(9, 128, (min(length, longest - NEW),), generator=generator).tolist() for length in LENGTHS]
    chunked = {**CHUNKED, "max_num_batched_tokens": 64, "max_model_len": longest}
    with closing(Engine(tmp_path / name, length=longest, dtype="float32", trust=True, arguments=chunked)) as engine:
        scores, written = engine.log_probabilities(asked), engine.write(asked, [NEW] * len(asked))
    for ids, scored, answer in zip(asked, scores, written, strict=True):
        with torch.no_grad():
            wanted = model.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
            greedy = model.generate(torch.tensor([ids]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        wanted = wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert (torch.tensor(scored) - wanted).abs().max() < 1e-4
        assert answer == greedy[0, len(ids) :].tolist()


def test_ms_poe_is_refused_in_a_hybrid(qwen3_5, tmp_path):
    step = {"method": "mspoe", "head_order": "fixed", "first_layer": 0}
    convert(str(qwen3_5), tmp_path / "mspoe", recipe_from_dict({"steps": [step]}, "mspoe"), check=False)
    with pytest.raises(ValueError, match="supports relation maps only, not mspoe"):
        Engine(tmp_path / "mspoe", length=64, dtype="float32", trust=True, arguments=SMALL)


@pytest.mark.parametrize("modality", ["image", "video"])
def test_models_with_relation_maps_refuse_all_but_text(modality):
    """Tokens of an image have different positions on each axis, which maps do not know."""
    pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 needs torchvision")
    from ctxext.engines import vllm_hybrids

    own, stock = (
        module.Qwen3_5ForConditionalGeneration._processor_factory for module in (vllm_hybrids, vllm_hybrids.qwen3_5)
    )
    assert (own.processor, own.dummy_inputs) == (stock.processor, stock.dummy_inputs)
    info = own.info(None)
    assert info.supported_mm_limits[modality] == 0
    info.validate_num_items(modality, 0)
    with pytest.raises(ValueError, match=f"support text only: remove the {modality}"):
        info.validate_num_items(modality, 1)
    assert stock.info is not own.info
