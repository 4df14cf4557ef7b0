"""LlamaForCausalLM with Ms-PoE; each method is in a file of its own."""

from .method import __name__ as _method
from .modeling_family import family
from .mspoe import MsPoE
from .private_copy import __name__ as _private_copy

modeling = family(__name__, "transformers.models.llama.modeling_llama", [MsPoE])


class CtxextLlamaModel(modeling.LlamaModel):
    """LlamaModel with Ms-PoE."""


class CtxextLlamaForCausalLM(modeling.LlamaForCausalLM):
    """LlamaForCausalLM with Ms-PoE."""


CtxextLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
CtxextLlamaModel.register_for_auto_class("AutoModel")
