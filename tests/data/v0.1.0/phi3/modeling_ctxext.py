"""Phi3ForCausalLM with Ms-PoE: a position scale per attention head. The method is in modeling_mspoe.py."""

from .modeling_mspoe import family

modeling = family(__name__, "transformers.models.phi3.modeling_phi3")


class MsPoEPhi3Model(modeling.Phi3Model):
    """Phi3Model with Ms-PoE."""


class MsPoEPhi3ForCausalLM(modeling.Phi3ForCausalLM):
    """Phi3ForCausalLM with Ms-PoE."""


MsPoEPhi3Model.register_for_auto_class("AutoModel")
MsPoEPhi3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
