"""Where and in which number format a model runs, from the words of the command line."""

from typing import TYPE_CHECKING

from ctxext.errors import CtxextError

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def choose_device(name: str) -> "torch.device":
    """The device of a name; "auto" takes an accelerator where there is one.

    Raises:
        CtxextError: there is no such device here.
    """
    import torch

    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CtxextError(f'There is no device "{name}" here.', hint="ctxext env lists the devices.") from error
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
