"""The checkpoint that a fine-tune starts from: what it must be, and how it is loaded."""

import shlex
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.auto_class import CAUSAL, MASKED, auto_class
from ctxext.checkpoint.loading import (
    check_device,
    choose_dtype,
    explain_loading_errors,
    guard_vocabulary,
    load_checkpoint,
    rename,
)
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.data.encoding import open_tokenizer
from ctxext.errors import CtxextError
from ctxext.finetune.options import TrainingOptions
from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.recipes.code.method import CodeMethod
from ctxext.recipes.code.own_code import needs_code, runs_only_own_code
from ctxext.recipes.code.staging import staged
from ctxext.recipes.encodings.rotary import ModelConfig, model_config, provenance
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.recipes.registry import method_named


@dataclass(frozen=True)
class Base:
    """A checkpoint to train, and its configuration."""

    checkpoint: Checkpoint
    model: ModelConfig

    @property
    def learned_tensors(self) -> tuple[str, ...]:
        """The last parts of the names of weights that are trained directly: position tables, and weights of methods."""
        methods = [method_named(step["method"]) for step in self.model.code.get("steps", ())]
        by_methods = [name for method in methods if issubclass(method, CodeMethod) for name in method.learned_tensors]
        return (*self.model.encoding.learned_tensors, *by_methods)

    @property
    def is_masked(self) -> bool:
        """Whether it guesses masked tokens, as encoders do; otherwise the next one."""
        return auto_class(self.checkpoint.config) == MASKED


def open_base(
    source: str,
    length: int | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    original_length: int | None = None,
) -> Base:
    """Find the checkpoint and check that it can be trained at a length in tokens, by default its context length.

    The other arguments are those of `open_checkpoint`.
    """
    checkpoint = open_checkpoint(source, revision=revision, token=token, original_length=original_length)
    base, config = Base(checkpoint, model_config(checkpoint.config, original_length)), checkpoint.config
    encoding = base.model.encoding
    if auto_class(config) not in (CAUSAL, MASKED):
        raise CtxextError(
            f'"{source}" is a {(config.get("architectures") or ["model"])[0]}; what is trained here guesses the next '
            "token, or masked ones.",
            hint="Save it once as its ...ForCausalLM or ...ForMaskedLM class, if it has one.",
        )
    if length is not None and length > encoding.context_length:
        factor = -(-length // encoding.trained_length)
        raise CtxextError(
            f'--length {length} is above the context length of "{source}": {encoding.context_length} tokens.',
            hint=f"Convert its source with --factor {factor} first.",
        )
    noted = provenance(config).get("recipe")
    steps = recipe_from_dict(noted, "config.json").steps if noted else ()
    untrainable = [step for step in steps if isinstance(step, CodeMethod) and not step.is_trainable]
    if untrainable or depends_on_prompt(base.model.config):
        raise CtxextError(
            f'"{source}" chooses again for each prompt, which no training sequence resembles.',
            hint="Convert its source with --head-order calibrated.",
        )
    if needs_code(config) and not runs_only_own_code(checkpoint):
        raise CtxextError(
            f'"{source}" needs Python code that is not this version\'s, which ctxext does not run for training.',
            hint=f"ctxext verify {shlex.quote(source)} says which; converted again by this version, its source can be "
            "trained.",
        )
    checkpoint.check_weights()
    return base


def load_base(base: Base, options: TrainingOptions, *, config: Any = None) -> tuple[Any, Any]:
    """Load the model, or a stock class with another configuration for the same weights, and the tokenizer."""
    import torch

    from ctxext.finetune.attention import attend_by_document

    on_cpu = options.device == "cpu" or not torch.cuda.is_available()
    is_widened = options.dtype == "auto" and (on_cpu or options.full)
    dtype = torch.float32 if is_widened else choose_dtype(options.dtype)
    extra: dict[str, Any] = {} if config is None else {"config": config}
    if options.quantize == "4bit":
        extra["quantization_config"] = _four_bits(dtype)
    else:
        check_device(base.checkpoint, "cpu" if on_cpu else "cuda")
    with staged(base.checkpoint) as stage:
        with explain_loading_errors(f'"{base.checkpoint.name}" cannot be loaded'):
            tokenizer = rename(open_tokenizer(stage.folder), base.checkpoint)
        model = load_checkpoint(
            base.checkpoint, stage.folder, trust=stage.trust and config is None, dtype=dtype, **extra
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes would repack the weights of a model in eval mode for a kernel that has no gradient.
            module.support_avx512bf16_for_cpu = False
    model.config.use_cache = False
    if options.pack == "restart":
        attend_by_document(model)
    guard_vocabulary(model, tokenizer)
    return model, tokenizer


def _four_bits(dtype: Any) -> Any:
    """QLoRA's quantization (arXiv 2305.14314, section 3): normal floats, their scales quantized too."""
    from importlib.util import find_spec

    import torch
    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise CtxextError("--quantize 4bit needs bitsandbytes.", hint='pip install "ctxext[quantize]"')
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
    )
