"""Every kind of LoRA adapter that peft can make, on tied and untied models: merged, or refused with a reason."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from ctxext.api import merge
from ctxext.errors import CtxextError
from tiny_base import load, logits, make_base

EMBEDDING, HEAD = "embed_tokens", "lm_head"
MERGED = {
    "plain": {},
    "embedding whole": {"modules_to_save": [EMBEDDING]},
    "head whole": {"modules_to_save": [HEAD]},
    "both whole": {"modules_to_save": [EMBEDDING, HEAD]},
    "both whole and tied": {"modules_to_save": [EMBEDDING, HEAD], "ensure_weight_tying": True},
    "embedding whole and tied": {"modules_to_save": [EMBEDDING], "ensure_weight_tying": True},
    "norms": {"modules_to_save": ["input_layernorm", "norm"]},
    "embedding": {"target_modules": [EMBEDDING, "q_proj"]},
    "head": {"target_modules": [HEAD, "q_proj"]},
    "both": {"target_modules": [EMBEDDING, HEAD, "q_proj"]},
    "embedding tied": {"target_modules": [EMBEDDING, "q_proj"], "ensure_weight_tying": True},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora of the embedding": {"use_dora": True, "target_modules": [EMBEDDING, "q_proj"]},
    "ranks": {"rank_pattern": {"q_proj": 2}},
    "alphas": {"alpha_pattern": {"layers.1.self_attn.q_proj": 16}},
    "ranks and alphas": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 16}, "use_rslora": True},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}
REFUSED = {
    "biases": ({"bias": "all"}, "it trains biases"),
    "biases of layers": ({"bias": "lora_only"}, "it trains biases"),
    "biases of matrices": ({"lora_bias": True}, "its matrices have biases"),
    "rows": ({"trainable_token_indices": [3, 4]}, "single rows of the embeddings"),
    "layers": ({"layer_replication": [[0, 2], [0, 2]]}, "it repeats layers"),
    "pissa": ({"init_lora_weights": "pissa"}, '"pissa" weights change the base'),
    "olora": ({"init_lora_weights": "olora"}, '"olora" weights change the base'),
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request, tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("kinds"), tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def before(model):
    """The logits of the model without an adapter."""
    return logits(load(model))


def save_adapter(base, folder, options):
    """An adapter with random values, as peft saves it."""
    torch.manual_seed(0)
    given = {"target_modules": ["q_proj", "down_proj"], **options}
    adapted = get_peft_model(load(base), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **given))
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.05 * torch.randn_like(weight))
    adapted.save_pretrained(folder)
    return folder


def expected(base, folder):
    return logits(PeftModel.from_pretrained(load(base), folder).eval())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MERGED)
def test_merged_equals_the_adapter(model, before, tmp_path, kind):
    adapter = save_adapter(model, tmp_path / "adapter", MERGED[kind])
    merge(str(model), adapter, tmp_path / "out")
    wanted = expected(model, adapter)
    assert (logits(load(tmp_path / "out")) - wanted).abs().max() < 1e-4
    assert (wanted - before).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged_is_refused_with_its_reason(model, tmp_path, kind):
    options, reason = REFUSED[kind]
    adapter = save_adapter(model, tmp_path / "adapter", options)
    with pytest.raises(CtxextError, match=reason) as caught:
        merge(str(model), adapter, tmp_path / "out")
    assert "merge_and_unload" in caught.value.hint
    assert not (tmp_path / "out").exists()
