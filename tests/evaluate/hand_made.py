"""A tiny model with a tokenizer, and models made by hand whose answers are known beforehand."""

import functools
import random
from itertools import islice

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from ctxext.data import prose
from ctxext.tasks import kv, needle

WINDOW = 512


@functools.cache
def trained_tokenizer() -> str:
    """A tokenizer of 640 tokens, as JSON."""
    text = [
        needle.PASSKEY_OPENING,
        needle.FILLER,
        needle.OPENING,
        kv.OPENING,
        *islice(prose.sentences(random.Random(0)), 300),
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer.to_str()


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer.from_str(trained_tokenizer())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def tiny_config(**changes) -> LlamaConfig:
    sizes = {
        "vocab_size": 640,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": WINDOW,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaConfig(**{**sizes, **changes})


def tiny_llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.3)
    return model


class Outer(PretrainedConfig):
    """A configuration around that of a language model, as multimodal models have it."""

    model_type = "outer"

    def __init__(self, text_config=None, **options):
        self.text_config = text_config
        super().__init__(**options)


def nested(config: LlamaConfig) -> Outer:
    return Outer(text_config=config)


class SeesLength(LlamaForCausalLM):
    """Its logits hang a little on how many tokens it is given at once, as no part of it alone can show."""

    def forward(self, input_ids=None, **options):
        output = super().forward(input_ids=input_ids, **options)
        noise = torch.randn(self.config.vocab_size, generator=torch.Generator().manual_seed(1))
        output.logits = output.logits + 0.05 * input_ids.shape[1] * noise
        return output


def one_that_sees_length() -> SeesLength:
    model = tiny_llama()
    other = SeesLength(model.config).eval()
    other.load_state_dict(model.state_dict())
    return other
