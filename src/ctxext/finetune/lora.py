"""Which weights are trained: LoRA matrices on the linear layers, and norms and embeddings where asked for."""

import difflib
from collections.abc import Sequence
from typing import Any

from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions
from ctxext.recipes.learned import tensors_named


def with_adapter(
    model: Any, options: TrainingOptions, whole: Sequence[str] = (), task: str | None = "CAUSAL_LM"
) -> Any:
    """The model with a LoRA adapter around its linear layers; everything else is frozen.

    Args:
        model: A language model of transformers.
        options: The options.
        whole: The last parts of the names of weights that are trained themselves, as a table of positions is.
        task: What peft calls the model's task. Without it an adapter of a base with code of its own cannot be loaded
            again; it has no word for masked language models.

    Raises:
        CtxextError: the targets match nothing.
    """
    from peft import LoraConfig, get_peft_model

    kept = [*(_norms(model) if options.train_norms else []), *(_embedding(model) if options.train_embeddings else [])]
    weights = [name for name, _ in model.named_parameters()]
    kept += [name.removesuffix(".weight") for ending in whole for name in tensors_named(weights, ending)]
    is_tied = bool(getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False))
    config = LoraConfig(
        task_type=task,
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=_targets(model, options.targets),
        fan_in_fan_out=_are_transposed(model),
        use_rslora=options.rslora,
        use_dora=options.dora,
        modules_to_save=kept or None,
        ensure_weight_tying=options.train_embeddings and is_tied,
    )
    return get_peft_model(model, config)


def _linear_names(model: Any) -> list[str]:
    """Full names of the linear layers, without the one that makes the logits; GPT-2 calls its own convolutions."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head]


def _are_transposed(model: Any) -> bool:
    """Whether the layers keep their weights the other way round, as all of GPT-2's do."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(module, Conv1D) for module in model.modules())


def _targets(model: Any, wanted: Sequence[str]) -> list[str]:
    """The names that peft is given; it compares the ends of full names."""
    names = _linear_names(model)
    leaves = sorted({name.rsplit(".", 1)[-1] for name in names})
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = difflib.get_close_matches(target, leaves, n=1)
            suggestion = f'Did you mean "{near[0]}"? ' if near else ""
            raise CtxextError(
                f'--targets "{target}" matches no linear layer of this model.',
                hint=f"{suggestion}It has: {', '.join(leaves)}.",
            )
    return list(wanted) or names


def _norms(model: Any) -> list[str]:
    """Full names of the norms, found by class: their names differ by family."""
    return [name for name, module in model.named_modules() if "Norm" in type(module).__name__]


def _embedding(model: Any) -> list[str]:
    """Full name of the input embedding."""
    embedding = model.get_input_embeddings()
    return [name for name, module in model.named_modules() if module is embedding]


def count_parameters(model: Any) -> tuple[int, int]:
    """How many parameters are trained, and how many there are; peft knows how those in 4 bits are packed."""
    if hasattr(model, "get_nb_trainable_parameters"):
        trained, in_all = model.get_nb_trainable_parameters()
        return int(trained), int(in_all)
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, is_trained in counts if is_trained), sum(count for count, _ in counts)
