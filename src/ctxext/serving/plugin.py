"""The entry point `vllm.general_plugins`: vLLM calls it in every process, before it builds a model."""


def register() -> None:
    """Put this package's form of vLLM's transformers backend in the place of vLLM's own.

    It differs for checkpoints with relation maps only. May be called any number of times.
    """
    from vllm import ModelRegistry

    for name in ("TransformersForCausalLM", "TransformersMoEForCausalLM"):
        ModelRegistry.register_model(name, f"ctxext.serving.vllm_models:{name}")
