"""Files beside config.json that decide what some program loads, so that a converted checkpoint must not keep them."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

VERSIONED = "configuration_files"
"""The key of config.json that lists files which some versions of transformers read instead of it."""

_OF_ADAPTERS = re.compile(r"adapter_(config\.json|model\S*\.(safetensors|bin)(\.index\.json)?)$")
_OF_MISTRAL = re.compile(r"(params\.json|consolidated\S*\.(safetensors|pth|pt|bin)(\.index\.json)?)$")
_OF_THE_TRAINER = re.compile(
    r"(training_args\.bin|trainer_state\.json|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state\S*\.pth)$"
    r"|global_step\d+/|zero_to_fp32\.py$"
)
_OTHER_FORMATS = re.compile(
    r"\S*\.(gguf|onnx|onnx_data|tflite|mlmodel|engine|plan|pte|llamafile)$|openvino\S*\.(xml|bin)$"
    r"|\S*\.mlpackage/|(genai_config|mlc-chat-config)\.json$|Modelfile$"
)


def left_out(files: Iterable[Path], config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the files that a result must not keep, by the reason.

    Args:
        files: The files of the source, relative to it.
        config: The content of its config.json.
    """
    names = [path.as_posix() for path in files]
    versioned = config.get(VERSIONED)
    listed = {name for name in versioned if isinstance(name, str)} if isinstance(versioned, list) else set()
    reasons = {
        "transformers 4 would load the base that they name instead of the result; merge the adapter first to keep it": [
            name for name in names if _OF_ADAPTERS.match(name)
        ],
        "they describe the source in Mistral's format, which vLLM may load instead": [
            name for name in names if _OF_MISTRAL.match(Path(name).name)
        ],
        "some versions of transformers would read them instead of config.json": [
            name for name in names if name in listed - {"config.json"}
        ],
        "they are the state of the source's training": [name for name in names if is_of_trainer(name)],
    }
    return {reason: found for reason, found in reasons.items() if found}


def is_of_trainer(name: str) -> bool:
    """Return whether a file, by its path in the folder, holds the state of a training."""
    return bool(_OF_THE_TRAINER.match(name))


def other_formats(files: Iterable[Path]) -> list[str]:
    """Return the files that describe the model to other programs than transformers, with the source's positions."""
    names = [path.as_posix() for path in files]
    return [name for name in names if _OTHER_FORMATS.match(Path(name).name) or ".mlpackage/" in name]
