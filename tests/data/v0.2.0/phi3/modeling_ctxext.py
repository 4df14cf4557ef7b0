"""Phi3ForCausalLM with Self-Extend; each method is in a file of its own."""

from .method import __name__ as _method
from .modeling_family import family
from .private_copy import __name__ as _private_copy
from .relation import SelfExtend
from .relation_maps import __name__ as _relation_maps
from .relation_parts import __name__ as _relation_parts

modeling = family(__name__, "transformers.models.phi3.modeling_phi3", [SelfExtend])


class CtxextPhi3Model(modeling.Phi3Model):
    """Phi3Model with Self-Extend."""


class CtxextPhi3ForCausalLM(modeling.Phi3ForCausalLM):
    """Phi3ForCausalLM with Self-Extend."""


CtxextPhi3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
CtxextPhi3Model.register_for_auto_class("AutoModel")
