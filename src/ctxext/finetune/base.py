"""The base checkpoint of a fine-tuning: its requirements, and the configuration of the result."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.auto_class import CAUSAL, MASKED, auto_class
from ctxext.checkpoint.families import layer_types, read
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.calibration import set_head_order
from ctxext.converters.convert import convert
from ctxext.converters.options import ConvertOptions
from ctxext.converters.plan import default_name, make_plan
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.files.processes import rank, wait_for
from ctxext.finetune.options import TrainingOptions
from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.code.own_code import needs_code, runs_only_own_code
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.model_config import ModelConfig, model_config
from ctxext.recipes.recipe import Recipe, recipe_from_dict, step_from_dict
from ctxext.recipes.registry import method_named

_FACTOR = 2.0
_PLAIN_TYPES = frozenset({"*", "attention", "full_attention", "global"})
"""Names of layers that only attend, to the whole context and every token in it."""


@dataclass(frozen=True)
class Base:
    """A checkpoint to train.

    Attributes:
        checkpoint: The checkpoint; with a conversion, its source.
        model: Its configuration, or that of its conversion.
        conversion: The recipe to convert the checkpoint by before the training; None if it needs none.
    """

    checkpoint: Checkpoint
    model: ModelConfig
    conversion: Recipe | None = None

    def convert(self, folder: Path, original_length: int | None, progress: Progress | None = None) -> "Base":
        """Return the base after its conversion, which is written into `folder` unless it is there already."""
        if self.conversion is None:
            return self
        place = folder / default_name(Path(self.checkpoint.name).name, self.conversion, self.model.encoding)
        if rank() != 0:
            wait_for(place)  # The first process writes it.
        elif not place.exists():
            options = ConvertOptions(original_length=original_length)
            convert(str(self.checkpoint.folder), place, self.conversion, options=options, progress=progress or _ignore)
        return open_base(str(place), None, original_length=original_length)

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
    recipe: Recipe | None = None,
) -> Base:
    """Open the checkpoint and check that it can be trained at a length in tokens, by default its context length.

    Args:
        source: A folder, a Hub id, or `demo`.
        length: The length.
        revision: As for `open_checkpoint`, and so are `token` and `original_length`.
        token: A Hub token.
        original_length: The original context length.
        recipe: A conversion that comes first, unless the checkpoint is already extended.
    """
    checkpoint = open_checkpoint(source, revision=revision, token=token, original_length=original_length)
    base = Base(checkpoint, model_config(checkpoint.config, original_length))
    if recipe is not None and not base.model.is_extended:
        base = Base(checkpoint, make_plan(checkpoint, set_head_order(recipe, "fixed")).model, recipe)
    config, encoding = base.model.config, base.model.encoding
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
            hint=f"Extend it first, with --method yarn --factor {factor} or ctxext convert.",
        )
    record = provenance(config).get("recipe")
    steps = recipe_from_dict(record, "config.json").steps if record else ()
    untrainable = [step for step in steps if isinstance(step, CodeMethod) and not step.is_trainable]
    if untrainable or depends_on_prompt(base.model.config):
        raise CtxextError(
            f'"{source}" has a method that depends on the prompt, so it cannot be trained.',
            hint="Convert its source with --head-order calibrated.",
        )
    if needs_code(checkpoint.config) and not runs_only_own_code(checkpoint):
        raise CtxextError(
            f'"{source}" needs Python code that this version of ctxext did not write and does not run.',
            hint=f"Find it with: ctxext verify {shlex.quote(source)}. Or convert its source again with this version.",
        )
    checkpoint.check_weights()
    return base


def check_fits(base: Base, *, restart: bool, keep_short: bool) -> None:
    """Raise if --pack restart or --keep-short does not apply to the model."""
    run_on = "Join documents with --pack run-on."
    remedy = "Use --short-share to train on short sequences."
    if keep_short and base.model.family.positions != "rotary":
        raise CtxextError("--keep-short needs a model with rotary position embeddings.", hint=remedy)
    if restart and base.model.encoding.learned_tensors:
        raise CtxextError("--pack restart would train only the first rows of the position table.", hint=run_on)
    for is_chosen, choice, more, hint in (
        (restart, "--pack restart", ": packed documents would attend to each other otherwise", run_on),
        (keep_short, "--keep-short", "", remedy),
    ):
        if is_chosen and base.is_masked:
            raise CtxextError(f"{choice} needs a causal model{more}.", hint=hint)


def check_split(base: Base, size: int) -> None:
    """Raise if the model's sequences cannot be split over `size` processes; no weights are loaded.

    Each process has all heads of some positions, and attention exchanges them for all positions of some heads. Other
    layers that pass information between positions would begin anew in each process.
    """
    if size == 1:
        return
    config, family, encoding = base.model.config, base.model.family, base.model.encoding
    num_heads = read(config, family, "num_attention_heads")
    heads = (num_heads, read(config, family, "num_key_value_heads") or num_heads)
    others = sorted({*layer_types(config, family)} - _PLAIN_TYPES)
    methods = ", ".join(step["method"] for step in base.model.code.get("steps", ()))
    reasons = (
        (base.is_masked, "encoders are not supported"),
        (bool(base.model.code), f"the code of {methods or 'the checkpoint'} replaces the attention"),
        (not isinstance(encoding, Rotary), "it does not have rotary position embeddings"),
        (bool(others), f"it has layers of type {', '.join(others)}"),
        (family.shared_rotary_key, "its heads share a key"),
        (isinstance(encoding, Rotary) and encoding.depends_on_length, "its schedule depends on the number of tokens"),
        (not _can_divide(heads, size), f"its {heads[0]} heads with {heads[1]} keys cannot be divided by {size}"),
    )
    if reason := next((reason for is_so, reason in reasons if is_so), None):
        remedy = " --positions pose trains on short windows that skip positions."
        raise CtxextError(
            f'--sequence-parallel {size} cannot split sequences of "{family.model_type}": {reason}.',
            hint=f"Remove it.{remedy if isinstance(encoding, Rotary) else ''}",
        )


def _can_divide(heads: Sequence[Any], size: int) -> bool:
    """Return whether processes can have equal numbers of heads, each of them with its key; keys may be repeated."""
    if not all(isinstance(count, int) for count in heads):
        return False  # Layers have different numbers of heads.
    return bool(heads[0] % size == 0 and (heads[1] % size == 0 or size % heads[1] == 0))


def describe_unused_method(model: str, method: str) -> str:
    """Return the note that --method has no effect on a model."""
    return f'"{model}" is already extended: --method {method} is not applied.'


def open_model(
    model: str, options: TrainingOptions, revision: str | None, token: str | None
) -> tuple[Base, TrainingOptions]:
    """Open the base and resolve the options; raise if an option does not apply."""
    base = open_base(
        model,
        options.length,
        revision=revision,
        token=token,
        original_length=options.original_length,
        recipe=_make_recipe(model, options),
    )
    check_fits(base, restart=options.pack == "restart", keep_short=options.keep_short)
    check_split(base, options.sequence_parallel)
    encoding, family = base.model.encoding, base.model.family
    width = read(base.model.config, family, "hidden_size")
    return base, options.resolve(
        window=encoding.context_length,
        trained_length=encoding.trained_length,
        width=width if isinstance(width, int) else 0,
    )


def _make_recipe(model: str, options: TrainingOptions) -> Recipe | None:
    """Return the recipe of --method for a model, or None if it is not set; raise if its factor does not apply."""
    if options.method is None:
        return None
    takes_factor = any(field.name == "factor" for field in dataclasses.fields(method_named(options.method)))
    if options.factor and not takes_factor:
        # A preset may have set the factor.
        raise CtxextError(
            f"--method {options.method} does not extend the context, so it has no factor of {options.factor:g}.",
            hint=f"Convert first, then train BASE: ctxext convert {shlex.quote(model)} BASE --method yarn --factor "
            f"{options.factor:g} --method {options.method}",
        )
    factor = options.factor or (_FACTOR if takes_factor else None)
    entry = {"method": options.method, **({"factor": factor} if factor else {})}
    return Recipe([step_from_dict(entry, "--method")])


def _ignore(label: str, done: int, total: int) -> None:
    """Report no progress: the call of a function by another one shows no other bar."""
