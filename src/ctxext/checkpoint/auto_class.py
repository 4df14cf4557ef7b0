"""The Auto class of transformers for a checkpoint, by the architecture in its config.json."""

from collections.abc import Mapping
from typing import Any

from ctxext.checkpoint.families import FAMILIES
from ctxext.checkpoint.families import MASKED as MASKED

CAUSAL = "AutoModelForCausalLM"
MULTIMODAL = "AutoModelForImageTextToText"

_ENDINGS: Mapping[str, tuple[str, str]] = {
    "T5WithLMHeadModel": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "XLNetLMHeadModel": ("AutoModelForPreTraining", "text-generation"),  # Without a mask, it reads both ways.
    "LMHeadModel": (CAUSAL, "text-generation"),
    "ForCausalLM": (CAUSAL, "text-generation"),
    "MTModel": ("AutoModelForSeq2SeqLM", "translation"),
    "ForMaskedLM": (MASKED, "fill-mask"),
    "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForMultipleChoice": ("AutoModelForMultipleChoice", "multiple-choice"),
    "ForPreTraining": ("AutoModelForPreTraining", "fill-mask"),
    "EncoderModel": ("AutoModelForTextEncoding", "feature-extraction"),
    "Model": ("AutoModel", "feature-extraction"),
    "ColBERT": ("AutoModel", "feature-extraction"),
}
WHOLE = "ForConditionalGeneration"
"""Ending of the class names of multimodal models and of encoder-decoder models."""


def auto_class(config: Mapping[str, Any]) -> str:
    """Return the Auto class for a checkpoint, by default that of the family; causal for unknown classes."""
    return _find_auto_class(config)[0]


def pipeline_tag(config: Mapping[str, Any]) -> str:
    """Return the Hub's pipeline tag for such a model."""
    return _find_auto_class(config)[1]


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether the language model is causal, alone or with other towers."""
    return auto_class(config) in (CAUSAL, MULTIMODAL)


def _find_auto_class(config: Mapping[str, Any]) -> tuple[str, str]:
    name = str((config.get("architectures") or ("",))[0])
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.loader == MULTIMODAL and (not name or name.endswith(WHOLE)):
        return MULTIMODAL, "image-text-to-text"
    if family is not None and family.loader == MASKED and not name:
        name = "ForMaskedLM"
    if name.endswith(WHOLE) and not config.get("is_encoder_decoder"):
        name = ""  # AutoModelForCausalLM loads other multimodal models too.
    # GPT2LMHeadModel ends with both.
    return next((auto for ending, auto in _ENDINGS.items() if name.endswith(ending)), _ENDINGS["ForCausalLM"])
