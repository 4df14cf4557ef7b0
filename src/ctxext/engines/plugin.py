"""The entry point `vllm.general_plugins`: vLLM calls it in every process, before it builds a model."""


def register() -> None:
    """Replace vLLM's transformers backend by the one of this package.

    It differs for checkpoints with relation maps only. May be called any number of times.
    """
    from vllm import ModelRegistry

    for name in ("TransformersForCausalLM", "TransformersMoEForCausalLM"):
        ModelRegistry.register_model(name, f"ctxext.engines.vllm_models:{name}")
