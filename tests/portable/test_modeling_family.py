"""The checkpoint as a whole: how it loads, saves, and shares a process with others."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import tiny_models
from ctxext.portable.private_copy import true_values
from loaded_models import logits
from portable_checkpoints import convert, llama, load, tokens

ORDERS = ["prompt", "fixed"]
PLAIN = {"head_order": "fixed", "first_layer": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("checkpoint") / "source", num_attention_heads=8, num_key_value_heads=4)


@pytest.fixture(scope="module")
def folders(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoint")
    return {order: convert(source, root / order, first_layer=1, head_order=order) for order in ORDERS}


IDS = tokens(30)


def test_values_are_hidden_again_after_a_failure():
    """Whoever catches the error still has the configuration, which stock classes and `save_pretrained` read."""
    config = SimpleNamespace(window=1, inner={"theta": 2.0})

    def build():
        with true_values(config, {"hidden": {"window": 3, "inner.theta": 4.0}}):
            assert (config.window, config.inner) == (3, {"theta": 4.0})
            raise MemoryError

    with pytest.raises(MemoryError):
        build()
    assert (config.window, config.inner) == (1, {"theta": 2.0})


@pytest.mark.parametrize("loader", [AutoModelForCausalLM, AutoModel, LlamaForCausalLM])
@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}])
def test_without_its_code_it_does_not_load(folders, loader, options):
    with pytest.raises((KeyError, ValueError), match="trust_remote_code"):
        loader.from_pretrained(folders["fixed"], **options)


@torch.no_grad()
def test_auto_model(folders):
    base = AutoModel.from_pretrained(folders["prompt"], trust_remote_code=True, dtype=torch.float32).eval()
    model = load(folders["prompt"])
    assert type(base).__name__ == "CtxextLlamaModel"
    assert torch.equal(model.lm_head(base(IDS).last_hidden_state), logits(model, IDS))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.thorough
def test_merge_lora_and_save(folders, order, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(load(folders[order]), config).eval()
    adapted = logits(model, IDS)
    assert not torch.allclose(adapted, logits(load(folders[order]), IDS))
    model.save_pretrained(tmp_path / "adapter")
    with_adapter = peft.PeftModel.from_pretrained(load(folders[order]), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(with_adapter, IDS), adapted)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / f"merged_{order}")
    torch.testing.assert_close(logits(load(tmp_path / f"merged_{order}"), IDS), adapted, rtol=1e-4, atol=1e-4)


def test_neighbours_in_one_process(source, folders, tmp_path):
    stock = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    before = logits(stock, IDS)
    first = load(folders["prompt"])
    alone = logits(first, IDS)
    second = load(convert(source, tmp_path / "other", first_layer=0, head_order="fixed", ratio_max=3.0))
    assert not torch.equal(logits(second, IDS), alone)
    assert torch.equal(logits(first, IDS), alone)
    assert torch.equal(logits(stock, IDS), before)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), IDS), before)
    assert type(load(source)) is LlamaForCausalLM
    assert type(first).__mro__[1] is not type(second).__mro__[1]
    # Loading one does not make the other loadable without its code.
    with pytest.raises((KeyError, ValueError), match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(folders["fixed"])


def test_pipeline(folders):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{n}" for n in range(3, 64))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", padding_side="left")
    model = load(folders["prompt"])
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["w5 w9 w11 w20 w7 w5 w8", "w7 w8 w9"]
    options = {"max_new_tokens": 5, "do_sample": False}
    together = generate(prompts, batch_size=2, **options)
    assert [outputs[0]["generated_text"] for outputs in together] == [
        generate(prompt, **options)[0]["generated_text"] for prompt in prompts
    ]


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_5", "mllama"])
@torch.no_grad()
def test_a_model_for_images_and_text_loads_with_the_method(model_type, tmp_path):
    if model_type not in tiny_models.FAMILIES:
        pytest.skip(f"this transformers has no {model_type}")
    torch.manual_seed(0)
    config = tiny_models.tiny_config(model_type)
    model = AutoModelForImageTextToText._model_mapping[type(config)]._from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim >= 2:
            weight.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "source")
    ids = torch.arange(3, 40)[None]
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    for ratio in (1.0, 4.0):
        out = convert(tmp_path / "source", tmp_path / model_type, **PLAIN, ratio_min=ratio, ratio_max=ratio)
        whole = load(out, auto=AutoModelForImageTextToText)
        assert type(whole).__name__ == f"Ctxext{type(stock).__name__}"
        assert torch.equal(whole(input_ids=ids).logits, stock(input_ids=ids).logits) == (ratio == 1.0)
        assert torch.equal(load(out)(input_ids=ids).logits, whole(input_ids=ids).logits)
    with pytest.raises((KeyError, ValueError), match="trust_remote_code"):
        AutoModelForImageTextToText.from_pretrained(out)


@pytest.mark.skipif("hrm_text" not in CONFIG_MAPPING, reason="this transformers has no such family")
@torch.no_grad()
def test_the_last_depth_alone_takes_part(tmp_path):
    """A method takes each depth for a layer. Keys of all depths before the last are the source's, bit for bit."""
    source = tiny_models.save("hrm_text", tmp_path / "source")
    stock = load(source)
    count = stock.config.num_hidden_layers
    assert count > stock.config.num_layers_per_stack
    changed = load(convert(source, tmp_path / "out", **{**PLAIN, "first_layer": count - 1, "ratio_max": 4.0}))
    own, theirs = (model(tokens(40), use_cache=True).past_key_values for model in (stock, changed))
    same = [torch.equal(own.layers[i].keys, theirs.layers[i].keys) for i in range(count)]
    assert same == [True] * (count - 1) + [False]
