"""Relation maps in vLLM with ctxext installed, compared with transformers, for requests of several lengths at once."""

from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.convert import convert
from ctxext.engines.vllm import Engine
from ctxext.recipes.recipe import recipe_from_dict

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.engine

FOUR = {"factor": 4}
RECIPES = {
    **{name: [{"method": name, **FOUR}] for name in ("self-extend", "bifocal", "dca", "rerope")},
    **{name: [{"method": name, **FOUR}] for name in ("sinks", "window", "adaptive")},
    "string": [{"method": "string", "target_length": 618}],
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
    folder, longest = tmp_path / name, 618 if name == "string" else 2048
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
