"""The entry point `vllm.general_plugins`: vLLM calls it in every process, before it builds a model."""

BACKEND = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
HYBRIDS = (
    "Qwen3NextForCausalLM",
    *(f"Qwen3_5{kind}For{task}" for kind in ("", "Moe") for task in ("CausalLM", "ConditionalGeneration")),
)


def register() -> None:
    """Replace vLLM's transformers backend, and its own models of hybrid families, for checkpoints with relation maps.

    Other checkpoints are unaffected. Repeated calls have no further effect.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for name in BACKEND:
        ModelRegistry.register_model(name, f"ctxext.engines.vllm_models:{name}")
    for name in HYBRIDS:  # The stub in a checkpoint puts Ctxext before the name of its class.
        ModelRegistry.register_model(f"Ctxext{name}", f"ctxext.engines.vllm_hybrids:{name}")
        if name in MODELS_CONFIG_MAP:
            MODELS_CONFIG_MAP[f"Ctxext{name}"] = MODELS_CONFIG_MAP[name]
