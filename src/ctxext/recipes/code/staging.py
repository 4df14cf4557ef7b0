"""Staging: transformers loads from a temporary folder of listed files, never directly from an untrusted folder.

With trust, transformers runs more of a folder than its modeling code (`custom_generate/generate.py`, code of tokenizers
and processors), 4.57 some of it even without trust, and a configuration can name things to fetch from the Hub (kernels
for attention, modules of other repositories) or to read from anywhere (an adapter, a vocabulary). So every command
loads from a folder with an identical copy of our verified code, config.json and the tokenizer's files without such
names, and links to the weights. docs/security.md lists these entrances of transformers.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.loading import forbid_downloads, without_hub
from ctxext.checkpoint.opening import LOADABLE, Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.recipes.code.own_code import module_of, own_code_content

_INDEX = re.compile(r"(model\.safetensors|pytorch_model\.bin)\.index\.json$")
_TOKENIZER = re.compile(
    r"(tokenizer(\.[^/]*)?\.json|tokenizer\.model[^/]*|[^/]*\.tiktoken|tiktoken\.model|tekken\.json|vocab(-src|-tgt)?\.json"
    r"|(target|entity)_vocab\.json|vocab\.txt|dict\.txt|merges\.txt|bpe\.codes|spiece\.model|spm(_char)?\.model"
    r"|sentencepiece(\.bpe)?\.model|prophetnet\.tokenizer|(normalizer|emoji|byte_maps|word_shape|word_pronunciation)\.json"
    r"|special_tokens_map\.json|added_tokens\.json|chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja)$"
)
"""Data files of the tokenizers of transformers 4.57 and 5.23, other than pickles."""

_NOT_FOR_TOKENIZERS = frozenset({"gguf_file", "init_inputs", "name_or_path", "custom_generate", "trust_remote_code"})
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
"""Files of tokenizers that are not data: programs may take classes or paths from them."""

_REFERENCE = re.compile(r"[\w./\-]+--\w+(\.\w+)+")
"""A class in another repository or folder, `repo--module.Class`."""

_GENERATION_CONFIG = "generation_config.json"
_EXPLICIT = "transformers_weights"


@dataclass(frozen=True)
class Staged:
    """A folder that may be loaded.

    Attributes:
        folder: The folder to load from.
        trust: Whether the model is loaded with its code: ctxext's, or other code that the user trusts.
        trust_tokenizer: Whether the tokenizer is loaded with its code; checkpoints of ctxext have none.
    """

    folder: Path
    trust: bool = False
    trust_tokenizer: bool = False


@contextmanager
def stage_checkpoint(checkpoint: Checkpoint, *, foreign: bool = False, kernels: bool = False) -> Iterator[Staged]:
    """Stage a checkpoint in a temporary folder; in the context nothing is fetched and no other code runs.

    Args:
        checkpoint: The checkpoint to load.
        foreign: Whether the user trusts all of its code. It is then loaded directly from its folder.
        kernels: Whether the user selected a Hub kernel, which may be fetched.
    """
    if foreign:
        yield Staged(checkpoint.folder, trust=True, trust_tokenizer=True)
        return
    with tempfile.TemporaryDirectory(prefix="ctxext-") as place:
        code = own_code_content(checkpoint)
        # transformers keeps copies of code under the folder's name.
        folder = Path(place) / (checkpoint.folder.resolve().name or "checkpoint")
        try:
            write_stage(folder, checkpoint, checkpoint.config, code)
            with forbid_downloads(kernels=kernels):
                yield Staged(folder, trust=bool(code))
        except CtxextError as error:  # Name the checkpoint, not the temporary folder.
            message = error.message.replace(str(folder), str(checkpoint.folder))
            raise CtxextError(message, hint=error.hint) from error


def write_stage(folder: Path, checkpoint: Checkpoint, config: Mapping[str, Any], code: Mapping[str, bytes]) -> None:
    """Create a folder to load from; without our modeling code, given by file name, no code can run."""
    folder.mkdir()
    (folder / "config.json").write_text(as_json(own_classes(without_hub(config), code)), encoding="utf-8")
    for name, content in code.items():
        (folder / name).write_bytes(content)
    for name in _SETTINGS:
        if (described := checkpoint.read_json(name)) is not None:
            # Without paths: its files are loaded by their standard names.
            dropped = {key for key in described if key in _NOT_FOR_TOKENIZERS or key.endswith("_file")}
            settings = {key: value for key, value in described.items() if key not in dropped}
            (folder / name).write_text(json.dumps(without_code(settings)), encoding="utf-8")
    if (generation := checkpoint.read_json(_GENERATION_CONFIG)) is not None:
        tokens = {key: value for key, value in generation.items() if key.endswith(("_token_id", "_token_ids"))}
        (folder / _GENERATION_CONFIG).write_text(as_json(tokens), encoding="utf-8")
    for path in _linked_files(checkpoint, config):
        checkpoint.check_file(path)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).symlink_to((checkpoint.folder / path).resolve())


def own_classes(config: dict[str, Any], code: Mapping[str, bytes | str]) -> dict[str, Any]:
    """Return a configuration with only classes of our code in its `auto_map`, and without it if there are none.

    Programs that load the folder may trust it by default: llama.cpp's converter does.
    """
    auto_map, plain = config.get("auto_map"), without_code(config)
    classes = auto_map if isinstance(auto_map, Mapping) else {}
    ours = {auto: place for auto, place in classes.items() if f"{module_of(place)}.py" in code}
    return {**plain, "auto_map": ours} if ours else plain


def without_code(content: Any) -> Any:
    """Copy settings without classes to import: `auto_map` and references `repo--module.Class`, at any depth."""
    if isinstance(content, Mapping):
        kept = (key for key, value in content.items() if not _names_code(key, value))
        return {key: without_code(content[key]) for key in kept}
    if isinstance(content, list):
        return [without_code(entry) for entry in content if not _names_code("", entry)]
    return content


def _names_code(key: str, value: Any) -> bool:
    is_token = isinstance(value, int)  # A vocabulary may contain any word.
    return (key == "auto_map" and not is_token) or (isinstance(value, str) and bool(_REFERENCE.fullmatch(value)))


def is_of_tokenizer(name: str) -> bool:
    """Return whether a file, by its path in the folder, contains data of a tokenizer."""
    return bool(_TOKENIZER.match(name))


def _linked_files(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[Path]:
    """List weights and tokenizer data, relative to the folder; pickled weights only if there are no others."""
    names = {path.as_posix(): path for path in checkpoint.files}
    weights = {name for name in names if LOADABLE.match(name) or _INDEX.match(name)}
    if isinstance(explicit := config.get(_EXPLICIT), str):
        weights.add(explicit)
    for index in sorted(weights):
        if index.endswith(".index.json"):
            weights |= {str(shard) for shard in ((checkpoint.read_json(index) or {}).get("weight_map") or {}).values()}
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in weights):
        weights = {name for name in weights if ".bin" not in name}
    if missing := sorted(weights - {*names}):
        raise CtxextError(f'"{checkpoint.name}" has no file "{missing[0]}", which its configuration or index names.')
    data = {name for name in names if is_of_tokenizer(name) and name not in _SETTINGS}
    return [path for name, path in names.items() if name in weights | data]
