"""The tiny models are worth testing with: they build, run, and see their rotary embedding."""

import pytest
import torch

import tiny_models

# Families without a frequency buffer that their attention reads, so scaling one changes nothing.
NO_BUFFER = {
    "codegen": "computes sinusoids in its attention",
    "gptj": "computes sinusoids in its attention",
    "phimoe": "computes its frequencies anew in every forward pass",
    "roformer": "keeps a table of sinusoids",
}


@pytest.mark.parametrize("model_type", tiny_models.FAMILIES)
def test_logits_see_the_rotary_embedding(model_type):
    model = tiny_models.build(model_type)
    tokens = torch.randint(3, 100, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model(input_ids=tokens, use_cache=False).logits
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name.endswith("inv_freq"):
                    buffer *= 0.25
        after = model(input_ids=tokens, use_cache=False).logits

    assert not before.isnan().any()
    assert before.std() > 0.1
    change = (before - after).abs().max()
    assert change == 0 if model_type in NO_BUFFER else change > 0.1


def test_the_same_seed_gives_the_same_weights():
    one, other = (tiny_models.build("llama", seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model_type", ["llama", "gemma3", "llama4"])
def test_a_saved_checkpoint_loads_with_the_same_logits(model_type, tmp_path):
    if model_type not in tiny_models.FAMILIES:
        pytest.skip(f"this transformers has no {model_type}")
    from transformers import AutoModelForCausalLM

    tiny_models.save(model_type, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, tiny_models.build(model_type)(tokens).logits)
