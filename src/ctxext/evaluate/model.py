"""Loading a checkpoint to evaluate it: device, number format, attention, and whose code may run."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.described_size import check_described
from ctxext.data.encoding import Encoder
from ctxext.data.tokenizer import open_tokenizer
from ctxext.errors import CtxextError
from ctxext.evaluate.checkpoint_info import CheckpointInfo
from ctxext.evaluate.scoring.prefix_cache import is_static, sharing_works
from ctxext.recipes.code.own_code import carries_code, check_pinned, needs_code
from ctxext.recipes.code.staging import rename, staged
from ctxext.system.loading import (
    DTYPES,
    choose_device,
    choose_dtype,
    guard_vocabulary,
    loading_told,
    no_hub_kernels,
    settle_dtype,
)
from ctxext.verify.engine import ENGINE_NAMES


@dataclass(frozen=True)
class Loading:
    """How models are loaded.

    Attributes:
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: "auto" (as saved; on a CPU bf16 weights are computed as they are where the processor multiplies bf16
            itself, all other 16-bit weights in float32), bf16, fp16 or fp32.
        attention: An attention implementation of transformers, such as sdpa, eager or flash_attention_2.
        chat_template: Whether to use the tokenizer's chat template, where it has one.
        trust_remote_code: Run a checkpoint's own code even where this package did not write it.
        revision: A branch, tag or commit on the Hub, for every model.
        token: A Hub token.
        engine: What runs the models: "transformers", or "vllm", which only writes answers.
        engine_arguments: More arguments of that engine.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str | None = None
    chat_template: bool = True
    trust_remote_code: bool = False
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    engine: str = "transformers"
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", *DTYPES):
            raise CtxextError(f'"{self.dtype}" is not a dtype.', hint=f"Choose auto, {', '.join(DTYPES)}.")
        if self.engine not in ENGINE_NAMES:
            raise CtxextError(f'There is no engine "{self.engine}".', hint=f"Choose {' or '.join(ENGINE_NAMES)}.")
        if self.engine_arguments and self.engine == "transformers":
            raise CtxextError("--engine-args are those of an engine.", hint="Name it with --engine vllm.")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to be asked.

    Attributes:
        name: What reports call it.
        model: A transformers model in eval mode.
        encoder: Its tokenizer.
        can_share: Whether prompts that begin alike may share one cache.
        kind: Which of `checkpoint_info.KINDS` it is.
    """

    name: str
    model: Any
    encoder: Encoder
    can_share: bool
    kind: str = "causal"

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return torch.device(self.model.device)

    def facts(self) -> dict[str, str]:
        """How it was loaded, for the report."""
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.device.type,
            "attention": str(getattr(self.model.config, "_attn_implementation", None)),
            "chat_template": "yes" if self.encoder.uses_chat else "no",
        }

    def close(self) -> None:
        """Give back what it holds besides memory: nothing."""


def make_ready(
    name: str, model: Any, tokenizer: Any, *, chat_template: bool = True, kind: str = "causal"
) -> LoadedModel:
    """Wrap a model and a tokenizer that are already in memory."""
    model.eval()
    can_share = kind == "causal" and is_static(model.config.to_dict()) and sharing_works(model)
    return LoadedModel(name, model, Encoder(tokenizer, chat_template=chat_template), can_share, kind)


def load_tokenizer(info: CheckpointInfo, loading: Loading) -> Any:
    """The checkpoint's tokenizer.

    Raises:
        CtxextError: it cannot be loaded.
    """
    hint = "Copy the tokenizer files of its source into its folder."
    told = f'The tokenizer of "{info.name}" cannot be loaded'
    with staged(info.checkpoint, foreign=runs_foreign_code(info, loading)) as stage, loading_told(told, hint):
        return rename(open_tokenizer(stage.folder, trust_remote_code=stage.trust_tokenizer), info.checkpoint)


def load_model(info: CheckpointInfo, loading: Loading) -> LoadedModel:
    """The checkpoint's model and tokenizer.

    Raises:
        CtxextError: it cannot be loaded, its weights are incomplete, or it brings code that is not ours.
    """
    import transformers

    device = choose_device(loading.device)
    check_described(info.checkpoint, auto_class(info.checkpoint.config))
    tokenizer = load_tokenizer(info, loading)
    extra = {"attn_implementation": loading.attention} if loading.attention else {}
    kernels = nullcontext() if loading.attention else no_hub_kernels()  # A kernel that the user names is loaded.
    with (
        staged(info.checkpoint, foreign=runs_foreign_code(info, loading)) as stage,
        loading_told(f'"{info.name}" cannot be loaded'),
        kernels,
    ):
        model, report = getattr(transformers, auto_class(info.checkpoint.config)).from_pretrained(
            stage.folder,
            dtype=choose_dtype(loading.dtype),
            trust_remote_code=stage.trust,
            output_loading_info=True,
            **extra,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CtxextError(f'"{info.name}" lacks {len(missing)} weights, "{missing[0]}" among them.')
    model = settle_dtype(rename(model, info.checkpoint), loading.dtype, device)
    guard_vocabulary(model, tokenizer)
    return make_ready(info.name, model.to(device), tokenizer, chat_template=loading.chat_template, kind=info.kind)


def may_run_code(info: CheckpointInfo, loading: Loading) -> bool:
    """Whether the checkpoint's own Python code runs: ours always, other code only where the user says so.

    Raises:
        CtxextError: it needs code that nobody allowed, or that may change on the Hub before it is run.
    """
    if info.is_own_code:
        return True
    if loading.trust_remote_code and carries_code(info.checkpoint):
        check_pinned(info.checkpoint, loading.revision)
        return True
    if needs_code(info.checkpoint.config):
        raise CtxextError(
            f'"{info.name}" needs the Python code that comes with it, which is not this version\'s own.',
            hint="Read that code; if you trust it, add --trust-remote-code.",
        )
    return False


def runs_foreign_code(info: CheckpointInfo, loading: Loading) -> bool:
    """Whether the user allowed code that is not ours, so that the checkpoint is loaded from its own folder.

    Raises:
        CtxextError: it needs code that nobody allowed, or that may change on the Hub before it is run.
    """
    return may_run_code(info, loading) and not info.is_own_code


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
