"""What the rotary embeddings of a family turn by under the installed transformers, told from a configuration alone.

The stock model is built without weights: everything stands on the meta device but its rotary embeddings, which are
small and are asked directly. So it costs an import and no memory, however large the model is.
"""

import inspect
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.system.loading import without_hub

if TYPE_CHECKING:
    import torch

_OTHER_TOWERS = ("vision", "visual", "audio")


@dataclass(frozen=True)
class Rotation:
    """What one rotary embedding turns by.

    Attributes:
        module: Its name in the model.
        layer_type: The type of layer that it was asked for, where one module serves several.
        frequencies: Its different inverse frequencies, from the smallest; 0 where dimensions do not turn.
        scaling: The factor on cosine and sine.
    """

    module: str
    layer_type: str
    frequencies: tuple[float, ...]
    scaling: float


def rotations(config: Mapping[str, Any], lengths: Sequence[int]) -> dict[int, list[Rotation]]:
    """Build the stock model of a configuration and ask each rotary embedding of its language model.

    Args:
        config: The content of a config.json without code of its own.
        lengths: For sequences of how many tokens they are asked, from the shortest.

    Raises:
        CtxextError: the installed transformers does not know the family, or refuses the configuration.
    """
    rotary = [
        (name, module)
        for name, module in stock_model(config).named_modules()
        if "otary" in type(module).__name__ and not any(word in name for word in _OTHER_TOWERS)
    ]
    return {
        length: [_asked(*one, layer_type, length) for one in rotary for layer_type in _layer_types(one[1])]
        for length in lengths
    }


def stock_model(config: Mapping[str, Any]) -> Any:
    """The stock model of a configuration on the meta device, its rotary embeddings in memory.

    Raises:
        CtxextError: the installed transformers does not know the family, or refuses the configuration.
    """
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    version = transformers.__version__
    stock = {key: value for key, value in without_hub(config).items() if key != "auto_map"}
    try:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            (Path(folder) / "config.json").write_text(json.dumps(stock), encoding="utf-8")
            model_config = AutoConfig.from_pretrained(folder)
            kind = AutoModelForCausalLM._model_mapping[type(model_config)]
            if kind.config_class is not type(model_config):
                model_config = model_config.get_text_config(decoder=True)
            return _built(kind, model_config)
    except Exception as error:  # Whatever transformers raises is the finding.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CtxextError(
            f'transformers {version} does not build "{config.get("model_type")}" from this configuration: {reason}'
        ) from error


def _built(kind: Any, config: Any) -> Any:
    import torch
    from transformers import activations

    # Some activations read their own numbers while they are built.
    small = {
        kind for kind in vars(activations).values() if isinstance(kind, type) and issubclass(kind, torch.nn.Module)
    }
    with torch.device("meta"), _in_memory(small):
        model = kind._from_config(config, dtype=torch.float32)
        with _in_memory({type(module) for module in model.modules() if "otary" in type(module).__name__}):
            return kind._from_config(config, dtype=torch.float32)


@contextmanager
def _in_memory(kinds: set[type]) -> Iterator[None]:
    """Build modules of these classes on the processor, whatever the device of the rest."""
    import torch

    originals = {kind: kind.__init__ for kind in kinds}  # type: ignore[misc]

    def placed(original: Any) -> Any:
        def init(*args: Any, **kwargs: Any) -> None:
            with torch.device("cpu"):
                original(*args, **kwargs)

        return init

    try:
        for kind, original in originals.items():
            kind.__init__ = placed(original)  # type: ignore[misc]
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[misc]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says about configurations, which is not about this one."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _layer_types(module: Any) -> Sequence[str]:
    """The layer types that a rotary embedding tells apart; one without a name where it does not."""
    names = [name.removesuffix("_inv_freq") for name, _ in module.named_buffers() if name.endswith("_inv_freq")]
    return [name for name in names if name != "original" and not name.endswith("_original")] or [""]


def _asked(name: str, module: Any, layer_type: str, length: int) -> Rotation:
    import torch

    positions = torch.tensor([[1, max(length, 2) - 1]])
    if hasattr(module, "mrope_section"):
        positions = positions.expand(3, 1, 2)
    answers = {"x": torch.zeros(1, 2, 1), "position_ids": positions, "layer_type": layer_type, "seq_len": length}
    wanted = inspect.signature(module.forward).parameters
    with torch.no_grad():
        out = module(**{key: answer for key, answer in answers.items() if key in wanted})
    turned = _as_complex(out)
    row = turned[1] if turned.ndim == 2 else turned.flatten(0, -3)[0, 0]  # A table by position, or by row.
    angles = row.angle()
    return Rotation(name, layer_type, tuple(sorted(set(angles.tolist()))), float(row.abs().max()))


def _as_complex(out: Any) -> "torch.Tensor":
    import torch

    return torch.complex(*(part.double() for part in out)) if isinstance(out, tuple) else out.to(torch.complex128)
