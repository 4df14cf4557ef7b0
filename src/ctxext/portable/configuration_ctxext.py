"""Reads config.json of this checkpoint with the family's class, after registering a rope type that the class lacks.

This file travels inside checkpoints. `auto_map` names it, so that transformers, if remote code is trusted, runs it
before it reads the configuration: the hidden rope type would raise a warning.
"""

from transformers import AutoConfig, PretrainedConfig, modeling_rope_utils

SENTINEL = "ctxext_needs_trust_remote_code"  # The rope type in config.json; its schedule is in `ctxext_code`.


def accept(*args, **kwargs):
    """Accept any value: the modeling code checks them."""


if hasattr(modeling_rope_utils, "ROPE_VALIDATION_FUNCTIONS"):  # transformers 4
    modeling_rope_utils.ROPE_VALIDATION_FUNCTIONS[SENTINEL] = accept
else:
    setattr(PretrainedConfig, f"_validate_{SENTINEL}_rope_parameters", staticmethod(accept))


class CtxextConfig:
    """The configuration as the family's class reads it."""

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Nothing to register: the configuration is the family's, and is saved as such."""

    @classmethod
    def from_pretrained(cls, name, **kwargs):
        """Read config.json as plain transformers does."""
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **kwargs)
