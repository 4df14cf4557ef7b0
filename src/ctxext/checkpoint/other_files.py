"""Files other than config.json: pipelines, and files that must not be copied because some program would load them.

The files of sentence-transformers, PyLate and ColBERT specify lengths, modules and pooling.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ctxext.errors import CtxextError
from ctxext.files.strict import parse_json, read_text

VERSIONED = "configuration_files"
"""Key of config.json for a list of files that replace it in some versions of transformers."""

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


def find_excluded_files(files: Iterable[Path], config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the files that must not be copied to a result, by reason.

    Args:
        files: The files of the source, relative to it.
        config: The content of its config.json.
    """
    names = [path.as_posix() for path in files]
    versioned = config.get(VERSIONED)
    listed = {name for name in versioned if isinstance(name, str)} if isinstance(versioned, list) else set()
    reasons = {
        "transformers 4 would load their base model instead of the result; merge the adapter first to keep it": [
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
    return {reason: excluded for reason, excluded in reasons.items() if excluded}


def is_of_trainer(name: str) -> bool:
    """Return whether a file, by its path in the folder, belongs to the state of a training run."""
    return bool(_OF_THE_TRAINER.match(name))


def other_formats(files: Iterable[Path]) -> list[str]:
    """Return the files of the model for other programs than transformers, which have the source's positions."""
    names = [path.as_posix() for path in files]
    return [name for name in names if _OTHER_FORMATS.match(Path(name).name) or ".mlpackage/" in name]


_MODULES = "modules.json"
_TRANSFORMERS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
LENGTHS: tuple[tuple[str, str], ...] = (
    *((name, key) for name in _TRANSFORMERS for key in ("max_seq_length", "document_length")),
    ("config_sentence_transformers.json", "document_length"),
    ("artifact.metadata", "doc_maxlen"),
)
"""Files and keys of the truncation length of texts. Lengths of queries, which may be padded, are not included."""

_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of the pooling in versions before 6, in the order of concatenation."""


@dataclass(frozen=True)
class SentenceModule:
    """One module of a pipeline: the name of its class, and its folder relative to the checkpoint."""

    type: str
    path: str

    @property
    def name(self) -> str:
        """Name of the class without its package."""
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class SentencePipeline:
    """The modules that compute the embedding of a text.

    Attributes:
        modules: The modules in order; the first is the transformer.
        pooling: The pooling modes, with one vector each; empty without such a module.
    """

    modules: tuple[SentenceModule, ...]
    pooling: tuple[str, ...]

    def __str__(self) -> str:
        """Return the modules in one line, human-readable."""
        pooling = f" ({', '.join(self.pooling)})"
        return " → ".join(module.name + pooling * (module.name == "Pooling") for module in self.modules)


def read_lengths(folder: Path) -> dict[tuple[str, str], int]:
    """Read the length limits in tokens from the files of `LENGTHS`, by file and key; invalid values are skipped."""
    contents = {name: _read(folder, name) for name, _ in LENGTHS if (folder / name).is_file()}
    lengths = {}
    for name, key in LENGTHS:
        content = contents.get(name)
        number = content.get(key) if isinstance(content, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            lengths[name, key] = number
    return lengths


def read_pipeline(folder: Path) -> SentencePipeline | None:
    """Read the pipeline that modules.json describes; None without that file."""
    if not (folder / _MODULES).is_file():
        return None
    content = _read(folder, _MODULES)
    entries = content if isinstance(content, list) and content else [None]
    modules = []
    for entry in entries:
        module = entry if isinstance(entry, dict) else {}
        kind, path = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str) or _is_outside(folder, path):
            raise CtxextError(
                f'"{folder / _MODULES}" is not a list of modules with a type and a path in the folder.',
                hint="Download the checkpoint again.",
            )
        modules.append(SentenceModule(kind, path))
    pooling = next((module for module in modules if module.name == "Pooling"), None)
    return SentencePipeline(tuple(modules), _pooling(folder, pooling) if pooling else ())


def _is_outside(folder: Path, path: str) -> bool:
    """Return whether a module's folder is outside the checkpoint, by its path or through a link."""
    if "\0" in path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        return True
    home = folder.resolve()
    return home not in (target := (folder / path).resolve(), *target.parents)


def _pooling(folder: Path, module: SentenceModule) -> tuple[str, ...]:
    content = _read(folder, f"{module.path}/config.json")
    config: dict[str, Any] = content if isinstance(content, dict) else {}
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return (mode,)
    if isinstance(mode, list) and mode:
        return tuple(map(str, mode))
    return tuple(name for key, name in _LEGACY_POOLING.items() if config.get(key)) or ("mean",)


def _read(folder: Path, name: str) -> Any:
    return parse_json(read_text(folder / name), str(folder / name))
