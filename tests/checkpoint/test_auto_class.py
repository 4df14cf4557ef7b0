"""Which of transformers' Auto classes loads a model, and what the Hub calls its task, by the class it names."""

import pytest
import transformers

from ctxext.checkpoint.auto_class import auto_class, is_causal, pipeline_tag

NAMED = {
    "LlamaForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "GPT2LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "SomethingNew": ("AutoModelForCausalLM", "text-generation"),
    "Gemma3ForConditionalGeneration": ("AutoModelForCausalLM", "text-generation"),
    "BertForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "T5WithLMHeadModel": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "MarianMTModel": ("AutoModelForSeq2SeqLM", "translation"),
    "BertForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "BertForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "BertForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "BertForMultipleChoice": ("AutoModelForMultipleChoice", "multiple-choice"),
    "BertForPreTraining": ("AutoModelForPreTraining", "fill-mask"),
    "T5EncoderModel": ("AutoModelForTextEncoding", "feature-extraction"),
    "BertModel": ("AutoModel", "feature-extraction"),
    "HF_ColBERT": ("AutoModel", "feature-extraction"),
}


@pytest.mark.parametrize("architecture", NAMED)
def test_by_the_name_of_the_class(architecture):
    config = {"architectures": [architecture]}
    assert (auto_class(config), pipeline_tag(config)) == NAMED[architecture]
    assert is_causal(config) == (auto_class(config) == "AutoModelForCausalLM")
    assert hasattr(transformers, auto_class(config))


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": []}])
def test_the_auto_class_without_architectures(config):
    assert (auto_class(config), pipeline_tag(config)) == NAMED["LlamaForCausalLM"]


def test_of_several_the_first_counts():
    assert auto_class({"architectures": ["BertModel", "BertForMaskedLM"]}) == "AutoModel"


def test_an_encoder_with_a_decoder_generates():
    config = {"architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True}
    assert (auto_class(config), pipeline_tag(config)) == ("AutoModelForSeq2SeqLM", "text2text-generation")
    assert auto_class({**config, "is_encoder_decoder": False}) == "AutoModelForCausalLM"
    assert auto_class({"architectures": ["T5Model"], "is_encoder_decoder": True}) == "AutoModel"
    assert is_causal({"architectures": ["BertForMaskedLM"], "is_encoder_decoder": True}) is False
