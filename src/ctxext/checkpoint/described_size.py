"""Whether a checkpoint's files can hold the model that its config.json describes, before any of it is made.

transformers makes up the weights that a file lacks, all of them before it says so: minutes and gigabytes where a
config.json is not that of the weights beside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ctxext.checkpoint.loading import quiet_transformers, sealed, without_hub
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError

_NUMBERS, _PER_BYTE = 100_000_000, 16
"""The margin is wide, as nothing that loads may be refused: weights of one bit are 8 a byte, tied ones count once here
and once there, and buffers that no file holds (the masks of GPT-2) are small beside weights."""

_TENSORS, _BYTES_PER_TENSOR = 2_000, 64
"""The same for how many weights there are: making a hundred thousand modules takes a minute, whatever their size."""

_LARGE = 2**30
"""Bytes from which on nothing is looked at: reading so much takes longer than making up what it lacks."""

_ROPE = ("rope_scaling", "rope_parameters", "auto_map", "quantization_config")
"""What does not change how many weights there are; only a checkpoint's own code knows some of it."""


class _TooMuch(Exception):
    """More is described than the files hold."""


def check_described(checkpoint: Checkpoint, auto: str) -> None:
    """Build the model without its numbers, and stop where there are far more of them than the files have room for.

    A description that transformers cannot build, such as one for the code of a checkpoint's own, is left to the
    loading, which says why.

    Args:
        checkpoint: Its files.
        auto: The Auto class of transformers that loads it.
    """
    held = sum(map(checkpoint.size_of, checkpoint.weight_files))
    if held >= _LARGE:
        return
    import torch
    import transformers

    limits = max(_NUMBERS, _PER_BYTE * held), _TENSORS + held // _BYTES_PER_TENSOR
    try:
        with sealed(), quiet_transformers(), _counted(*limits), torch.device("meta"):
            config = transformers.AutoConfig.for_model(**_plain(without_hub(checkpoint.config)))
            getattr(transformers, auto).from_config(config)
    except _TooMuch:
        raise CtxextError(
            f'"{checkpoint.name}": config.json describes far more weights than its files hold ({held:,} bytes).',
            hint="Is it the config.json of these weights? Download both again.",
        ) from None
    except Exception:  # Whatever transformers cannot make of it, loading tells.
        return


def needs_accelerator(checkpoint: Checkpoint) -> str:
    """Return why a checkpoint does not load on a CPU; empty if that is not known.

    bitsandbytes quantizes plain weights only while it moves them to an accelerator.
    """
    described = checkpoint.config.get("quantization_config")
    described = described if isinstance(described, dict) else {}
    key = next((key for key in ("load_in_4bit", "load_in_8bit") if described.get(key)), None)
    packed = (".weight.absmax", ".SCB", ".weight_format")
    if key is None or any(name.endswith(packed) for header in checkpoint.headers() for name in header):
        return ""
    return f'config.json has "{key}", which quantizes the weights on an accelerator only'


def check_device(checkpoint: Checkpoint, device: str) -> None:
    """Refuse to load a checkpoint on a CPU that quantizes its weights while loading.

    Args:
        checkpoint: Its files.
        device: The type of the device that it is loaded on.
    """
    if device == "cpu" and (reason := needs_accelerator(checkpoint)):
        raise CtxextError(
            f'"{checkpoint.name}" cannot be loaded on a CPU: {reason}.',
            hint="Use a GPU, or remove quantization_config from config.json.",
        )


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without its schedule."""
    return {
        key: _plain(value) if isinstance(value, dict) else value for key, value in config.items() if key not in _ROPE
    }


@contextmanager
def _counted(most_numbers: int, most_tensors: int) -> Iterator[None]:
    """Raise as soon as modules have more parameters and buffers than so many."""
    from torch.nn.modules import module as hooks

    numbers = tensors = 0

    def count(_module: Any, _name: str, tensor: Any) -> None:
        nonlocal numbers, tensors
        numbers, tensors = numbers + (0 if tensor is None else tensor.numel()), tensors + 1
        if numbers > most_numbers or tensors > most_tensors:
            raise _TooMuch

    held = [
        register(count)
        for register in (
            hooks.register_module_parameter_registration_hook,
            hooks.register_module_buffer_registration_hook,
        )
    ]
    try:
        yield
    finally:
        for hook in held:
            hook.remove()
