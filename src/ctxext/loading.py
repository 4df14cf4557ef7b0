"""How models are loaded, for every command that loads one: device, number format, and in silence."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""The words of the command line, and torch's names for them."""

_CPU_FLAGS = Path("/proc/cpuinfo")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
"""How Linux names a processor's own matrix products of bf16."""


def choose_device(name: str) -> "torch.device":
    """The device of a name; "auto" takes an accelerator where there is one, each process its own.

    Raises:
        CtxextError: there is no such device here.
    """
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
    """The number format of a name; "auto" stays "auto", which transformers takes for "as saved".

    Raises:
        CtxextError: the name is none of auto, bf16, fp16 and fp32.
    """
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
    return model.to(fast_cpu_dtype() if model.dtype == torch.bfloat16 else torch.float32)


@contextmanager
def loading_told(what: str, hint: str = "") -> Iterator[None]:
    """Load in silence, and say in one line why it failed: strangers' files break transformers in every way there is.

    Args:
        what: What is loaded, as errors begin.
        hint: What to do about it.

    Raises:
        CtxextError: whatever transformers raises, in its first line.
    """
    try:
        with quiet_transformers():
            yield
    except CtxextError:
        raise
    except Exception as error:  # The one place where any will do: none of them is of our making.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        told = first if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: {first}"
        raise CtxextError(f"{what}: {told}", hint=hint) from error


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
