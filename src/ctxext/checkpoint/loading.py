"""How models are loaded, for every command that loads one: device, number format, and in silence."""

import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The words of the command line, and torch's names for them."""

BUILT_IN = frozenset({"eager", "sdpa"})
"""Kinds of attention and of experts that need nothing but torch; other names are kernels, some of them on the Hub."""

_IMPLEMENTATIONS = frozenset(
    f"{underscore}{part}_implementation{internal}"
    for underscore in ("", "_")
    for part in ("attn", "experts")
    for internal in ("", "_internal", "_autoset")
)
_OF_THE_HUB = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "custom_pipelines", "custom_generate", "trust_remote_code"}
    | {
        "configuration_files",
        "use_kernel",
        "use_kernels",
        "_use_kernels",
        "kernel_config",
        "allow_all_kernels",
        "gguf_file",
        "adapter_kwargs",
    }
)
"""Keys of a configuration that transformers may follow to code or files elsewhere."""

_BACKBONE, _PRETRAINED_BACKBONE = "backbone", "use_pretrained_backbone"
"""Keys by which a vision model names a model of the Hub or of timm, and whether its weights are fetched."""

_CPU_FLAGS = Path("/proc/cpuinfo")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
"""How Linux names a processor's own matrix products of bf16."""


def choose_device(name: str) -> "torch.device":
    """The device of a name; "auto" takes an accelerator where there is one, each process its own."""
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CtxextError(f'"{name}" is not a device.', hint="Choose auto, cpu, cuda or mps.") from error
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}.get(device.type, True)
    if not there:
        raise CtxextError(f'This machine has no "{name}" that torch can use.', hint="Choose --device auto or cpu.")
    return device


def choose_dtype(name: str) -> "torch.dtype | str":
    """The number format of a name; "auto" stays "auto", which transformers takes for "as saved"."""
    import torch

    if name == "auto":
        return name
    if name not in DTYPES:
        raise CtxextError(f'"{name}" is not a dtype.', hint=f"Choose auto, {', '.join(DTYPES)}.")
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def fast_cpu_dtype() -> "torch.dtype":
    """The number format in which this processor runs bf16 weights fastest: as they are, where it multiplies bf16."""
    import torch

    try:
        flags = _CPU_FLAGS.read_text(encoding="utf-8")
    except OSError:
        return torch.float32
    return torch.bfloat16 if any(flag in flags for flag in _BF16_FLAGS) else torch.float32


def settle_dtype(model: Any, name: str, device: "torch.device") -> Any:
    """A loaded model in the number format that "auto" means on a device; as it is for every other name.

    Auto is "as saved". On a CPU bf16 weights become what the processor is fast in, and fp16 weights float32: weights
    are never rounded.
    """
    import torch

    if name != "auto" or device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float16):
        return model
    settled = fast_cpu_dtype() if model.dtype == torch.bfloat16 else torch.float32
    # Moving a model to the format that it has would still round its buffers, inverse frequencies among them.
    return model if model.dtype == settled else model.to(settled)


def without_hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a configuration without what names kernels, code or files elsewhere, in any part of it.

    An implementation of attention is kept where it is transformers' own: `_attn_implementation: "user/kernel"` would
    be fetched from the Hub and run, by `from_config` as by `from_pretrained`.

    Args:
        config: The content of config.json.
    """

    def cleaned(value: Any, *, is_inner: bool = True) -> Any:
        if isinstance(value, Mapping):
            kept = {key: cleaned(inner) for key, inner in value.items() if _is_kept(key, inner)}
            if is_inner:  # No code of ctxext is named there.
                kept.pop("auto_map", None)
            if isinstance(kept.get(_BACKBONE), str) or _PRETRAINED_BACKBONE in kept:
                kept[_PRETRAINED_BACKBONE] = False  # The checkpoint holds those weights; True is some classes' default.
            return kept
        return [cleaned(inner) for inner in value] if isinstance(value, list) else value

    return cleaned(config, is_inner=False)  # type: ignore[no-any-return]


def hub_kernels(config: Any) -> tuple[str, ...]:
    """Kernels of the Hub, as user/name, that a configuration or one inside it asks for, sorted."""
    if isinstance(config, list):
        return tuple(sorted({name for entry in config for name in hub_kernels(entry)}))
    if not isinstance(config, Mapping):
        return ()
    named = {value for key, value in config.items() if key in _IMPLEMENTATIONS and "/" in str(value)}
    return tuple(sorted({*map(str, named), *(name for value in config.values() for name in hub_kernels(value))}))


def hub_backbones(config: Any) -> tuple[str, ...]:
    """Return the backbones that a configuration names instead of describing them, sorted."""
    if isinstance(config, list):
        return tuple(sorted({name for entry in config for name in hub_backbones(entry)}))
    if not isinstance(config, Mapping):
        return ()
    named = {config[_BACKBONE]} if isinstance(config.get(_BACKBONE), str) else set[str]()
    return tuple(sorted(named.union(*map(hub_backbones, config.values()))))


def _is_kept(key: str, value: Any) -> bool:
    if key in _IMPLEMENTATIONS:
        return isinstance(value, str) and value in BUILT_IN
    return key not in _OF_THE_HUB


@contextmanager
def sealed(*, kernels: bool = False) -> Iterator[None]:
    """Load from local files alone: nothing is fetched, no question is asked, and no code or kernel of others runs.

    A configuration can name a backbone or code elsewhere, at any depth. transformers would fetch it, or ask on the
    terminal whether to run it; here it raises.

    Args:
        kernels: The user named a kernel of the Hub, which may be fetched.
    """
    import huggingface_hub
    import torch
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    def refused(name: Any, *_: Any, **__: Any) -> Any:
        raise ImportError(f'"{getattr(name, "full_url", name)}" is not fetched.')

    changes: list[tuple[Any, str, Any]] = [
        (dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0),  # With 0 nobody is asked: code raises.
        (torch.hub, "urlopen", refused),
    ]
    if not kernels:
        changes += [(huggingface_hub.constants, "HF_HUB_OFFLINE", True), (hub, "_is_offline_mode", True)]
        if importlib.util.find_spec("kernels") is not None:
            from transformers.integrations import hub_kernels

            places = (importlib.import_module("kernels"), "get_kernel"), (hub_kernels, "get_kernel")
            changes += [(place, name, refused) for place, name in (*places, (hub_kernels, "get_kernel_hub"))]
    originals = [(place, name, getattr(place, name)) for place, name, _ in changes if hasattr(place, name)]
    # Its client of version 0 decides for each session whether it is offline.
    reset = getattr(huggingface_hub.utils, "reset_sessions", lambda: None)
    try:
        for place, name, value in changes:
            if hasattr(place, name):
                setattr(place, name, value)
        reset()
        yield
    finally:
        for place, name, original in originals:
            setattr(place, name, original)
        reset()


@contextmanager
def explain_loading_errors(what: str, hint: str = "") -> Iterator[None]:
    """Load in silence, and say in one line why it failed: strangers' files break transformers in every way there is.

    Args:
        what: What is loaded, as errors begin.
        hint: What to do about it.
    """
    try:
        with quiet_transformers():
            yield
    except CtxextError:
        raise
    except Exception as error:  # The one place where any will do: none of them is of our making.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        reason = first if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: {first}"
        raise CtxextError(f"{what}: {reason}", hint=hint) from error


def guard_vocabulary(model: Any, tokenizer: Any) -> None:
    """Make a model refuse tokens that it has no embedding for; torch would stop with an index, or the whole device.

    A vocabulary may name more than a model knows as long as nothing is written with it, so that each input is looked
    at: on a CPU, and on an accelerator, which would have to be waited for, where the vocabulary reaches beyond.
    """
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None:
        return
    reaches_beyond = max(tokenizer.get_vocab().values(), default=0) >= rows

    def check(_module: Any, given: tuple[Any, ...]) -> None:
        if not given or not given[0].numel() or not (reaches_beyond or given[0].device.type == "cpu"):
            return
        if (largest := int(given[0].max())) >= rows:
            raise CtxextError(
                f"The tokenizer gives the token {largest}, and the model knows {rows}.",
                hint="Are the tokenizer's files those of this model?",
            )

    embedding.register_forward_pre_hook(check)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and warnings of transformers while it loads; we tell what matters ourselves."""
    from transformers.utils import logging

    level, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()
