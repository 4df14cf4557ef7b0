"""BloomForCausalLM with NTK-ALiBi; each method is in a file of its own."""

from .modeling_alibi import family
from .private_copy import __name__ as _private_copy
from .row_slopes import RowSlopes

modeling = family(__name__, "transformers.models.bloom.modeling_bloom", [RowSlopes])


class CtxextBloomModel(modeling.BloomModel):
    """BloomModel with NTK-ALiBi."""


class CtxextBloomForCausalLM(modeling.BloomForCausalLM):
    """BloomForCausalLM with NTK-ALiBi."""


CtxextBloomForCausalLM.register_for_auto_class("AutoModelForCausalLM")
CtxextBloomModel.register_for_auto_class("AutoModel")
