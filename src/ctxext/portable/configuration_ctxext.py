"""How config.json of this checkpoint is read: by the family's own class, which is told first of a rope type it lacks.

This file travels inside checkpoints. `auto_map` names it, so that transformers runs it, where code may run at all,
before it reads the configuration, whose rope type is hidden and would be warned of.
"""

from transformers import AutoConfig, PretrainedConfig, modeling_rope_utils

SENTINEL = "ctxext_needs_trust_remote_code"  # The rope type in config.json; its schedule is in `ctxext_code`.


def accept(*args, **kwargs):
    """Leave the numbers to the modeling code."""


if hasattr(modeling_rope_utils, "ROPE_VALIDATION_FUNCTIONS"):  # transformers 4
    modeling_rope_utils.ROPE_VALIDATION_FUNCTIONS[SENTINEL] = accept
else:
    setattr(PretrainedConfig, f"_validate_{SENTINEL}_rope_parameters", staticmethod(accept))


class CtxextConfig:
    """The configuration as the family's own class reads it."""

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Nothing to note: the configuration is the family's own, and is saved as such."""

    @classmethod
    def from_pretrained(cls, name, **kwargs):
        """Read config.json as plain transformers does."""
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **kwargs)
