"""Loading a checkpoint to evaluate it: device, dtype, attention, and remote code."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ctxext.checkpoint.head import Head
from ctxext.checkpoint.loading import (
    BUILT_IN,
    choose_device,
    choose_dtype,
    explain_loading_errors,
    guard_vocabulary,
    hub_backbones,
    load_checkpoint,
    rename,
)
from ctxext.data.encoding import Encoder, open_tokenizer
from ctxext.errors import CtxextError
from ctxext.evaluate.checkpoint_info import CheckpointInfo, GgufInfo
from ctxext.evaluate.pooling import Pooler, open_pooler
from ctxext.evaluate.scoring.prefix_cache import is_static, sharing_works
from ctxext.gguf.engine import tokenizer_of
from ctxext.recipes.code.own_code import carries_code, check_pinned, needs_code
from ctxext.recipes.code.staging import staged
from ctxext.verify.engine import ENGINE_NAMES


@dataclass(frozen=True)
class Loading:
    """How models are loaded.

    Attributes:
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        dtype: "auto" (as saved; on a CPU 16-bit weights become float32, unless they are bf16 and the processor
            multiplies bf16 natively), bf16, fp16 or fp32.
        attention: An attention implementation of transformers, such as sdpa, eager or flash_attention_2.
        chat_template: Whether to use the tokenizer's chat template, if it has one.
        trust_remote_code: Run a checkpoint's code even if ctxext did not write it.
        revision: A branch, tag or commit on the Hub, for every model.
        token: A Hub token.
        engine: "transformers", or "vllm" or "llama.cpp" (for GGUF files), which only generate answers.
        engine_arguments: Further arguments of the engine.
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
        choose_dtype(self.dtype)
        if self.engine not in ENGINE_NAMES:
            raise CtxextError(f'There is no engine "{self.engine}".', hint=f"Choose {', '.join(ENGINE_NAMES)}.")
        if self.engine_arguments and self.engine == "transformers":
            raise CtxextError("--engine-args are those of an engine.", hint="Name it with --engine vllm or llama.cpp.")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready for evaluation.

    Attributes:
        name: The name in reports.
        model: A transformers model in eval mode.
        encoder: The tokenizer.
        can_share: Whether prompts with a common beginning may share a cache.
        kind: One of the values of `checkpoint_info.KINDS`.
        pooler: How it makes one vector of a text.
    """

    name: str
    model: Any
    encoder: Encoder
    can_share: bool
    kind: str = "causal"
    pooler: Pooler = field(default_factory=Pooler)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return torch.device(self.model.device)

    @functools.cached_property
    def head(self) -> Head:
        """The head of the model; whether it can run separately is tried once."""
        return Head(self.model, is_masked=self.kind == "masked")

    def facts(self) -> dict[str, str]:
        """How the model was loaded, for the report."""
        return {
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.device.type,
            "attention": str(getattr(self.model.config, "_attn_implementation", None)),
            "chat_template": "yes" if self.encoder.uses_chat else "no",
        }

    def questions_at_once(self, length: int, num_depths: int) -> int | None:
        """How many questions run together, each at some depths; None for as many as fit into memory."""
        return None

    def close(self) -> None:
        """Release resources besides memory: there are none here."""


def make_ready(
    name: str,
    model: Any,
    tokenizer: Any,
    *,
    chat_template: bool = True,
    kind: str = "causal",
    pooler: Pooler | None = None,
) -> LoadedModel:
    """Wrap a model and a tokenizer that are already loaded."""
    model.eval()
    can_share = kind == "causal" and is_static(model.config.to_dict()) and sharing_works(model)
    return LoadedModel(
        name, model, Encoder(tokenizer, chat_template=chat_template), can_share, kind, pooler or Pooler()
    )


def load_tokenizer(info: CheckpointInfo, loading: Loading) -> Any:
    """Load the checkpoint's tokenizer."""
    if isinstance(info, GgufInfo):
        return tokenizer_of(info.path)
    hint = "Copy the tokenizer files of its source into its folder."
    message = f'The tokenizer of "{info.name}" cannot be loaded'
    with (
        staged(info.checkpoint, foreign=runs_foreign_code(info, loading)) as stage,
        explain_loading_errors(message, hint),
    ):
        return rename(open_tokenizer(stage.folder, trust_remote_code=stage.trust_tokenizer), info.checkpoint)


def load_model(info: CheckpointInfo, loading: Loading) -> LoadedModel:
    """Load the checkpoint's model and tokenizer."""
    device = choose_device(loading.device)
    pooler = open_pooler(info.pipeline, info.checkpoint.folder, info.cut_at)
    extra = {"attn_implementation": loading.attention} if loading.attention else {}
    # Only a kernel that the user names is fetched, and nothing that such a configuration names.
    fetches_kernel = (loading.attention or "eager") not in BUILT_IN and not hub_backbones(info.checkpoint.config)
    with staged(info.checkpoint, foreign=runs_foreign_code(info, loading), kernels=fetches_kernel) as stage:
        model = load_checkpoint(
            info.checkpoint, stage.folder, trust=stage.trust, dtype=loading.dtype, device=device, **extra
        )
    tokenizer = load_tokenizer(info, loading)
    guard_vocabulary(model, tokenizer)
    return make_ready(info.name, model, tokenizer, chat_template=loading.chat_template, kind=info.kind, pooler=pooler)


def runs_foreign_code(info: CheckpointInfo, loading: Loading) -> bool:
    """Return whether the user allowed code that ctxext did not write, so that the checkpoint is loaded from its folder.

    Without `trust_remote_code` a checkpoint that needs such code is refused; ctxext's own always runs.
    """
    if info.is_own_code:
        return False
    if loading.trust_remote_code and carries_code(info.checkpoint):
        check_pinned(info.checkpoint, loading.revision)
        return True
    if needs_code(info.checkpoint.config):
        raise CtxextError(
            f'"{info.name}" needs the Python code that comes with it, which is not this version\'s own.',
            hint="Read that code; if you trust it, add --trust-remote-code.",
        )
    return False
