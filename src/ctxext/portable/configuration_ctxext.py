"""The configuration of this checkpoint: the family's class, with a rope type registered that the class lacks.

This file is copied into checkpoints. `auto_map` names it, so transformers runs it before reading the configuration if
remote code is trusted. Without it, the rope type of `ctxext_code` would raise a warning.
"""

from transformers import AutoConfig, PretrainedConfig, modeling_rope_utils

SENTINEL = "ctxext: load this checkpoint with trust_remote_code=True"
# The rope type in config.json, which errors of other loaders print; its schedule is in `ctxext_code`.


def accept(*args, **kwargs):
    """Accept any value, because the modeling code checks it."""


if hasattr(modeling_rope_utils, "ROPE_VALIDATION_FUNCTIONS"):  # transformers 4
    modeling_rope_utils.ROPE_VALIDATION_FUNCTIONS[SENTINEL] = accept
else:
    setattr(PretrainedConfig, f"_validate_{SENTINEL}_rope_parameters", staticmethod(accept))


class CtxextConfig:
    """Configuration that the family's class reads."""

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Do nothing: the configuration is saved as the family's."""

    @classmethod
    def from_pretrained(cls, name, **kwargs):
        """Read config.json with the family's class."""
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **kwargs)
