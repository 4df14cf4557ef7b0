"""The entry point `vllm.general_plugins`: vLLM calls it in every process, before it builds a model."""


def register() -> None:
    """Replace vLLM's transformers backend, for checkpoints with relation maps.

    Other checkpoints are unaffected. Repeated calls have no further effect.
    """
    from vllm import ModelRegistry

    for name in ("TransformersForCausalLM", "TransformersMoEForCausalLM"):
        ModelRegistry.register_model(name, f"ctxext.engines.vllm_models:{name}")
