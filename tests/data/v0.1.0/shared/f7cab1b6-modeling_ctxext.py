"""LlamaForCausalLM with Ms-PoE: a position scale per attention head. The method is in modeling_mspoe.py."""

from .modeling_mspoe import family

modeling = family(__name__, "transformers.models.llama.modeling_llama")


class MsPoELlamaModel(modeling.LlamaModel):
    """LlamaModel with Ms-PoE."""


class MsPoELlamaForCausalLM(modeling.LlamaForCausalLM):
    """LlamaForCausalLM with Ms-PoE."""


MsPoELlamaModel.register_for_auto_class("AutoModel")
MsPoELlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
