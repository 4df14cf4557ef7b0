"""The base checkpoint of a fine-tuning: its requirements, and the configuration of the result."""

import shlex
from dataclasses import dataclass

from ctxext.checkpoint.auto_class import CAUSAL, MASKED, auto_class
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions
from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.code.own_code import needs_code, runs_only_own_code
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.model_config import ModelConfig, model_config
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.recipes.registry import method_named


@dataclass(frozen=True)
class Base:
    """A checkpoint to train, and its configuration."""

    checkpoint: Checkpoint
    model: ModelConfig

    @property
    def learned_tensors(self) -> tuple[str, ...]:
        """Name endings of the weights that are trained directly: position tables, and weights of methods."""
        methods = [method_named(step["method"]) for step in self.model.code.get("steps", ())]
        by_methods = [name for method in methods if issubclass(method, CodeMethod) for name in method.learned_tensors]
        return (*self.model.encoding.learned_tensors, *by_methods)

    @property
    def is_masked(self) -> bool:
        """Whether it predicts masked tokens, as encoders do; otherwise the next one."""
        return auto_class(self.checkpoint.config) == MASKED


def open_base(
    source: str,
    length: int | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    original_length: int | None = None,
) -> Base:
    """Open the checkpoint and check that it can be trained at a length in tokens, by default its context length.

    The other arguments are those of `open_checkpoint`.
    """
    checkpoint = open_checkpoint(source, revision=revision, token=token, original_length=original_length)
    base, config = Base(checkpoint, model_config(checkpoint.config, original_length)), checkpoint.config
    encoding = base.model.encoding
    if auto_class(config) not in (CAUSAL, MASKED):
        raise CtxextError(
            f'"{source}" is a {(config.get("architectures") or ["model"])[0]}; only causal and masked language '
            "models can be trained.",
            hint="Save it as its ...ForCausalLM or ...ForMaskedLM class, if it has one.",
        )
    if length is not None and length > encoding.context_length:
        factor = -(-length // encoding.trained_length)
        raise CtxextError(
            f'--length {length} is above the context length of "{source}": {encoding.context_length} tokens.',
            hint=f"Convert its source with --factor {factor} first.",
        )
    record = provenance(config).get("recipe")
    steps = recipe_from_dict(record, "config.json").steps if record else ()
    untrainable = [step for step in steps if isinstance(step, CodeMethod) and not step.is_trainable]
    if untrainable or depends_on_prompt(base.model.config):
        raise CtxextError(
            f'"{source}" has a method that depends on the prompt, so it cannot be trained.',
            hint="Convert its source with --head-order calibrated.",
        )
    if needs_code(config) and not runs_only_own_code(checkpoint):
        raise CtxextError(
            f'"{source}" needs Python code that this version of ctxext did not write and does not run.',
            hint=f"Find it with: ctxext verify {shlex.quote(source)}. Or convert its source again with this version.",
        )
    checkpoint.check_weights()
    return base


def check_fits(base: Base, options: TrainingOptions) -> None:
    """Raise if an option does not apply to the model."""
    restart, run_on = options.pack == "restart", "Join documents with --pack run-on."
    remedy = "Use --short-share to train on short sequences."
    if options.keep_short and base.model.family.positions != "rotary":
        raise CtxextError("--keep-short needs a model with rotary position embeddings.", hint=remedy)
    if restart and base.model.encoding.learned_tensors:
        raise CtxextError("--pack restart would train only the first rows of the position table.", hint=run_on)
    for is_chosen, choice, more, hint in (
        (restart, "--pack restart", ": packed documents would attend to each other otherwise", run_on),
        (options.keep_short, "--keep-short", "", remedy),
    ):
        if is_chosen and base.is_masked:
            raise CtxextError(f"{choice} needs a causal model{more}.", hint=hint)


def open_model(
    model: str, options: TrainingOptions, revision: str | None, token: str | None
) -> tuple[Base, TrainingOptions]:
    """Open the base and resolve the options; raise if an option does not apply."""
    base = open_base(model, options.length, revision=revision, token=token, original_length=options.original_length)
    check_fits(base, options)
    encoding = base.model.encoding
    return base, options.resolve(window=encoding.context_length, trained_length=encoding.trained_length)
