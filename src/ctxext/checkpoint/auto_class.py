"""Which of transformers' Auto classes loads a checkpoint, by the class that its config.json names."""

from collections.abc import Mapping
from typing import Any

CAUSAL, MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"

_ENDINGS: Mapping[str, tuple[str, str]] = {
    "T5WithLMHeadModel": ("AutoModelForSeq2SeqLM", "text2text-generation"),
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
}
_EITHER = "ForConditionalGeneration"


def auto_class(config: Mapping[str, Any]) -> str:
    """The Auto class; that of causal language models where config.json names no class or one unheard of."""
    return _found(config)[0]


def pipeline_tag(config: Mapping[str, Any]) -> str:
    """What the Hub calls the task of such a model."""
    return _found(config)[1]


def is_causal(config: Mapping[str, Any]) -> bool:
    """Whether it is loaded as a causal language model."""
    return auto_class(config) == CAUSAL


def _found(config: Mapping[str, Any]) -> tuple[str, str]:
    named = config.get("architectures") or ("",)
    name = str(named[0])
    if name.endswith(_EITHER) and not config.get("is_encoder_decoder"):
        name = ""  # A multimodal model, whose language model is a causal one.
    # GPT2LMHeadModel ends with both.
    return next((auto for ending, auto in _ENDINGS.items() if name.endswith(ending)), _ENDINGS["ForCausalLM"])
