"""The base checkpoint of a fine-tuning: its requirements, and the configuration of the result."""

import dataclasses
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ctxext.checkpoint.auto_class import CAUSAL, MASKED, auto_class
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.convert import check_frequencies
from ctxext.converters.lengths import length_files
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions
from ctxext.recipes.base import Scaling
from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.code.own_code import needs_code, runs_only_own_code
from ctxext.recipes.encodings.rotary import ModelConfig, model_config, provenance
from ctxext.recipes.recipe import Recipe, recipe_from_dict
from ctxext.recipes.registry import method_named
from ctxext.verify.run import failures, verify


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


@dataclass(frozen=True)
class OutputConfig:
    """Configuration of the written checkpoint.

    Attributes:
        checkpoint: The base with the new configuration and the record of the base's origin.
        texts: Content of the small files that contain the new context length, by name.
        summary: Text with both recipes.
    """

    checkpoint: Checkpoint
    texts: Mapping[str, str]
    summary: str


def make_output_config(base: Base, factor: float | None) -> OutputConfig:
    """Change the factor of the schedule, and verify its frequencies with the installed transformers."""
    checkpoint = base.checkpoint
    if factor is None:
        return OutputConfig(checkpoint, {}, "")
    record = provenance(checkpoint.config)
    steps = recipe_from_dict(record["recipe"], "config.json").steps if record.get("recipe") else ()
    step = steps[0] if len(steps) == 1 else None
    # Lists of numbers are valid only for the factor that they were searched or computed for.
    if (
        not isinstance(step, Scaling)
        or step.kind != "schedule"
        or any(isinstance(value, list | tuple) for value in vars(step).values())
    ):
        raise CtxextError(
            f'--serve-factor needs a schedule written by ctxext; "{checkpoint.name}" has none.',
            hint="Convert its source first, for example with --method yarn --factor 2.",
        )
    if step.factor is None or factor < step.factor:
        raise CtxextError(f"--serve-factor {factor:g} is below the factor of the training: {step.summary()}.")
    output_step = dataclasses.replace(step, factor=float(factor), target_length=None)
    plan = make_plan(checkpoint, Recipe([output_step]), replace_scaling=True)
    check_frequencies(plan)
    config = {**plan.model.config, "ctxext": {**record, "recipe": plan.recipe.to_dict()}}
    texts = length_files(checkpoint.folder, base.model.encoding, plan.encoding)
    summary = f"{step.summary()}, and written with {plan.recipe.summary()}"
    return OutputConfig(dataclasses.replace(checkpoint, config=config), texts, summary)


def verify_output(folder: Path) -> None:
    """Verify the written checkpoint against its recipe, in a clean process; raise if a check fails."""
    if failed := failures(verify(folder)):
        raise CtxextError(
            f"The checkpoint written with --serve-factor fails a check: {failed[0].check}: {failed[0].detail}.",
            hint="OUT was not written. Write it with the factor of the training: --resume without --serve-factor.",
        )


def open_model(
    model: str, options: TrainingOptions, revision: str | None, token: str | None
) -> tuple[Base, OutputConfig, TrainingOptions]:
    """Open the base, make its output configuration and resolve the options; raise if an option does not apply."""
    base = open_base(model, options.length, revision=revision, token=token, original_length=options.original_length)
    check_fits(base, options)
    output, encoding = make_output_config(base, options.serve_factor), base.model.encoding
    return base, output, options.resolve(window=encoding.context_length, trained_length=encoding.trained_length)
