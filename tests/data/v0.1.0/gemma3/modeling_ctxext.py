"""Gemma3ForCausalLM with Ms-PoE: a position scale per attention head. The method is in modeling_mspoe.py."""

from .modeling_mspoe import family

modeling = family(__name__, "transformers.models.gemma3.modeling_gemma3")


class MsPoEGemma3TextModel(modeling.Gemma3TextModel):
    """Gemma3TextModel with Ms-PoE."""


class MsPoEGemma3ForCausalLM(modeling.Gemma3ForCausalLM):
    """Gemma3ForCausalLM with Ms-PoE."""


MsPoEGemma3TextModel.register_for_auto_class("AutoModel")
MsPoEGemma3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
