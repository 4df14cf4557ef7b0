"""The files of sentence-transformers, PyLate and ColBERT beside a checkpoint: their lengths, modules and pooling."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ctxext.errors import CtxextError
from ctxext.files.strict import parse_json, read_text

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
"""The files and keys at whose number of tokens texts are cut. Lengths of queries, which may be padded, are others."""

_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How versions before 6 wrote the pooling, in the order in which several are concatenated."""


@dataclass(frozen=True)
class SentenceModule:
    """One module of a pipeline: the name of its class, and its folder relative to the checkpoint."""

    type: str
    path: str

    @property
    def name(self) -> str:
        """The class without its package."""
        return self.type.rpartition(".")[2]


@dataclass(frozen=True)
class SentencePipeline:
    """The modules that turn a text into one vector.

    Attributes:
        modules: The modules in order; the first is the transformer.
        pooling: How the token states are pooled, one vector for each way; empty without such a module.
    """

    modules: tuple[SentenceModule, ...]
    pooling: tuple[str, ...]

    def __str__(self) -> str:
        """The modules in one line, human-readable."""
        pooling = f" ({', '.join(self.pooling)})"
        return " → ".join(module.name + pooling * (module.name == "Pooling") for module in self.modules)


def stated_lengths(folder: Path) -> dict[tuple[str, str], int]:
    """The number of tokens that each file of `LENGTHS` states, by file and key."""
    contents = {name: _read(folder, name) for name, _ in LENGTHS if (folder / name).is_file()}
    stated = {}
    for name, key in LENGTHS:
        content = contents.get(name)
        number = content.get(key) if isinstance(content, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and number > 0:
            stated[name, key] = number
    return stated


def read_pipeline(folder: Path) -> SentencePipeline | None:
    """The pipeline that modules.json describes; None without one."""
    if not (folder / _MODULES).is_file():
        return None
    content = _read(folder, _MODULES)
    entries = content if isinstance(content, list) and content else [None]
    modules = []
    for entry in entries:
        named = entry if isinstance(entry, dict) else {}
        kind, path = named.get("type"), named.get("path", "")
        if not isinstance(kind, str) or not isinstance(path, str) or _is_outside(folder, path):
            raise CtxextError(
                f'"{folder / _MODULES}" is not a list of modules with a type and a path in the folder.',
                hint="Download the checkpoint again.",
            )
        modules.append(SentenceModule(kind, path))
    pooling = next((module for module in modules if module.name == "Pooling"), None)
    return SentencePipeline(tuple(modules), _pooling(folder, pooling) if pooling else ())


def _is_outside(folder: Path, path: str) -> bool:
    """Return whether a module's folder lies elsewhere, by its path or by a link."""
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
