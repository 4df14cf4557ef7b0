"""Tiny random checkpoints of families whose encoding is not rotary, as their users' would lie on a disk."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

from aligned import aligned

LENGTH, WIDTH, VOCABULARY = 12, 16, 40
_SHARED = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_BERT = {
    "hidden_size": WIDTH,
    "embedding_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
}
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "attn_pdrop": 0.0}
_OPT = {**_BERT, "ffn_dim": 24, "word_embed_proj_dim": WIDTH, "init_std": 0.3}
_SEQ2SEQ = {
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": LENGTH,
    "init_std": 0.3,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
}
_PADDED = {**_BERT, "max_position_embeddings": LENGTH + 2}
_TEXT = {**_BERT, "projection_dim": WIDTH, **_SHARED}

_DEBERTA = {
    **{key: value for key, value in _BERT.items() if key != "embedding_size"},
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
    "type_vocab_size": 0,
}

LEARNED: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", _BERT),
    "bart": ("BartForConditionalGeneration", _SEQ2SEQ),
    "bert": ("BertForMaskedLM", _BERT),
    "biogpt": ("BioGptForCausalLM", _BERT),
    "camembert": ("CamembertForMaskedLM", _PADDED),
    "clip": ("CLIPModel", {"text_config": _TEXT, "projection_dim": WIDTH}),
    "clip_text_model": ("CLIPTextModel", _BERT),
    "deberta": ("DebertaForMaskedLM", _DEBERTA),
    "deberta-v2": ("DebertaV2ForMaskedLM", {**_DEBERTA, "max_relative_positions": 8}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, **_BERT}),
    "electra": ("ElectraForMaskedLM", _BERT),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT2),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "hidden_size": WIDTH,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": LENGTH,
            "window_size": 256,
        },
    ),
    "led": (
        "LEDForConditionalGeneration",
        {
            **_SEQ2SEQ,
            "max_encoder_position_embeddings": LENGTH,
            "max_decoder_position_embeddings": 64,
            "attention_window": 4,
        },
    ),
    "longformer": ("LongformerForMaskedLM", {**_PADDED, "attention_window": 4}),
    "mbart": ("MBartForConditionalGeneration", _SEQ2SEQ),
    "opt": ("OPTForCausalLM", _OPT),
    "roberta": ("RobertaForMaskedLM", _PADDED),
    "xlm-roberta": ("XLMRobertaForMaskedLM", _PADDED),
}
"""Model types with a learned table, of positions or of distances: the class, and what makes it small."""

COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "m2m_100": ("M2M100ForConditionalGeneration", _SEQ2SEQ),
    "marian": ("MarianMTModel", _SEQ2SEQ),
    "pegasus": ("PegasusForConditionalGeneration", _SEQ2SEQ),
    "xglm": (
        "XGLMForCausalLM",
        {
            "d_model": WIDTH,
            "ffn_dim": 24,
            "num_layers": 2,
            "attention_heads": 2,
            "max_position_embeddings": LENGTH,
            "init_std": 0.3,
        },
    ),
}
"""Model types with a computed table."""

ALIBI: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 24, "n_layer": 2, "n_head": 6, "seq_length": LENGTH}),
    "falcon": (
        "FalconForCausalLM",
        {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "alibi": True,
            "multi_query": False,
            "max_position_embeddings": LENGTH,
        },
    ),
    "falcon-rw": (  # Its block has another order, and adds what it dropped out elsewhere.
        "FalconForCausalLM",
        {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "max_position_embeddings": LENGTH,
        },
    ),
    "mpt": ("MptForCausalLM", {"d_model": 24, "n_layers": 2, "n_heads": 6, "max_seq_len": LENGTH}),
}
"""Model types with ALiBi: six heads, which are no power of two."""

_T5 = {
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "n_positions": LENGTH,
    "relative_attention_max_distance": 16,
    "relative_attention_num_buckets": 16,
    "initializer_factor": 2.0,
    "decoder_start_token_id": 1,
}
BUCKETS: dict[str, tuple[str, dict[str, Any]]] = {
    "longt5": ("LongT5ForConditionalGeneration", {**_T5, "local_radius": 30, "encoder_attention_type": "local"}),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        {**_T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "t5": ("T5ForConditionalGeneration", _T5),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
}
"""Model types with buckets of distances."""

_DEBERTA_V3 = {**_DEBERTA, "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
RELATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v3": ("DebertaV2ForMaskedLM", _DEBERTA_V3),
    "xlnet": (
        "XLNetLMHeadModel",
        {"d_model": WIDTH, "n_layer": 2, "n_head": 2, "d_inner": 24, "mem_len": LENGTH, "dropout": 0.0},
    ),
}
"""DeBERTa v3, which is v2 with buckets of distances, and a model with a memory."""

NO_POSITIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": (
        "JambaForCausalLM",
        {
            **_BERT,
            "num_key_value_heads": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 2,
            "use_mamba_kernels": False,
        },
    ),
}
"""Model types without positions."""

SMALL = {
    "learned": ("gpt2", {"n_positions": 128}),
    "sinusoidal": ("xglm", {"max_position_embeddings": 128}),
    "alibi": ("bloom", {"seq_length": 128}),
    "buckets": ("t5", {"n_positions": 128}),
    "memory": ("xlnet", {"mem_len": 128}),
    "none": ("jamba", {"max_position_embeddings": 128}),
}
"""A model with each encoding that a method is for, at the length of the small Llama; causal, but for T5."""

_TABLES = ("position_embedding", "embed_positions", "wpe", "rel_embed")
_CLASSES = {"deberta-v3": "deberta-v2", "falcon-rw": "falcon"}


def save(
    model_type: str,
    folder: Path,
    *,
    name: str | None = None,
    dtype: torch.dtype = torch.float32,
    more: Any = (),
    **options: Any,
) -> Path:
    """Save a tiny model with its tokenizer's idea of its length; gives the folder."""
    torch.manual_seed(0)
    cls, sizes = {**LEARNED, **COMPUTED, **ALIBI, **BUCKETS, **RELATIVE, **NO_POSITIONS}[model_type]
    config = AutoConfig.for_model(_CLASSES.get(model_type, model_type), **{**_SHARED, **sizes, **dict(more)})
    model = getattr(transformers, name or cls)(config).to(dtype)
    for key, weight in model.named_parameters():
        if model_type in LEARNED and any(part in key for part in _TABLES):
            torch.nn.init.normal_(weight)  # Some are saved as zeros, of which every fill makes zeros.
    model.save_pretrained(folder, **options)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": LENGTH}))
    return folder


def save_tokenizer(folder: Path) -> Path:
    """Give a model a tokenizer of numbered words, with a token for what is masked; gives the folder."""
    named = {"cls_token": "<s>", "bos_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "eos_token": "</s>"}
    words = {"<unk>": 0, "<pad>": 1, "<s>": 2, "</s>": 3, "<mask>": 4} | {f"w{n}": n for n in range(5, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="<mask>", model_max_length=LENGTH, **named)
    fast.save_pretrained(folder)
    return folder


def source_for(encoding: str, rotary: Path, folder: Path) -> Path:
    """A small model with an encoding; of rotary ones there is one already."""
    if encoding == "rotary":
        return rotary
    model_type, more = SMALL[encoding]
    return folder if folder.exists() else save(model_type, folder, more=more)


def load(folder: Path) -> Any:
    """The model as its class loads it, in eval mode."""
    config = json.loads((folder / "config.json").read_text())
    return aligned(getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval())


def logits(model: Any, length: int, seed: int = 0) -> torch.Tensor:
    """What a model says to random tokens; the token to be padded with is not among them."""
    ids = torch.randint(4, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        if type(model).__name__ == "CLIPModel":
            output = model.get_text_features(ids)
            return output if isinstance(output, torch.Tensor) else output.pooler_output
        output = model(ids, decoder_input_ids=ids) if model.config.is_encoder_decoder else model(ids)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
