"""Facts from a checkpoint's files, without torch: context length, recipe, digest."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from typing_extensions import override

from ctxext.checkpoint.auto_class import CAUSAL, MASKED, auto_class
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.checkpoint.other_files import SentencePipeline, read_pipeline
from ctxext.errors import CtxextError
from ctxext.files.content import sha256_of
from ctxext.gguf.model import open_gguf
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.recipe import describe_steps

_DIGESTED = (".json", ".model", ".py", ".txt", ".jinja", ".tiktoken", ".safetensors", ".bin", ".pt", ".pth")
_NOT_DIGESTED = ("ctxext.json", "generation_config.json", "report.json")
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json")

KINDS = {CAUSAL: "causal", MASKED: "masked", "AutoModel": "encoder"}
"""Kind of model by Auto class: it generates text, fills in masked tokens, or only encodes."""

_BIAS_TABLES = ("mpt",)
"""ALiBi families with a table of biases; their class fails beyond the context length."""


@dataclass(frozen=True)
class CheckpointInfo:
    """The context of a checkpoint, as specified by its files.

    Attributes:
        name: The name in reports.
        checkpoint: The files.
        trained_length: The context length in training, in tokens, if known.
        context_length: The maximum context length, in tokens, if known.
        has_table: Whether a table of position embeddings or biases ends at the context length.
        source: The name in reports of its source checkpoint, if that is evaluated too.
    """

    name: str
    checkpoint: Checkpoint
    trained_length: int | None
    context_length: int | None
    has_table: bool = False
    source: str | None = None

    @property
    def kind(self) -> str:
        """One of the values of `KINDS`; a sentence encoder from a causal model only encodes."""
        kind = KINDS[auto_class(self.checkpoint.config)]
        return "encoder" if self.pipeline and kind == "causal" else kind

    @cached_property
    def pipeline(self) -> SentencePipeline | None:
        """The modules of a sentence encoder; None for other models."""
        return read_pipeline(self.checkpoint.folder)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that affects answers: configuration, tokenizer, code, weights."""
        digest = hashlib.sha256()
        for path in self.checkpoint.files:
            if path.suffix in _DIGESTED and path.name not in _NOT_DIGESTED:
                content = self.checkpoint.known_digest(path) or sha256_of(self.checkpoint.folder / path)
                digest.update(f"{path.as_posix()} {content}\n".encode())
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return the entry in reports, before any measurement."""
        origin = provenance(self.checkpoint.config)
        steps = (origin.get("recipe") or {}).get("steps") or []
        return {
            "name": self.name,
            "revision": self.checkpoint.revision,
            "kind": self.kind,
            "model_type": self.checkpoint.config.get("model_type"),
            "recipe": origin.get("recipe"),
            "summary": describe_steps(steps) or "unmodified",
            "is_finetuned": bool(origin.get("finetune")),
            "source": self.source,
            "trained_length": self.trained_length,
            "context_length": self.context_length,
            "digest": self.digest,
        }


@dataclass(frozen=True)
class GeneratorInfo(CheckpointInfo):
    """The context of a model that generates text and has no files of a checkpoint, nor a source to compare it with."""

    @property
    @override
    def kind(self) -> str:
        return "causal"

    @cached_property
    def pipeline(self) -> SentencePipeline | None:
        """None, because it is not a sentence encoder."""
        return None


@dataclass(frozen=True)
class GgufInfo(GeneratorInfo):
    """The context of a GGUF file, as specified by its header; `checkpoint` contains the header but no files.

    Attributes:
        paths: The file, or the files of a split model in order.
    """

    paths: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """The file that llama.cpp opens."""
        return self.paths[0]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file, or over the digests of all files."""
        digests = [sha256_of(path) for path in self.paths]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


@dataclass(frozen=True)
class ServedInfo(GeneratorInfo):
    """The context of a model on a server, about which nothing else is known; `checkpoint` is empty."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the name, as the files are unknown."""
        return hashlib.sha256(self.name.encode()).hexdigest()

    @override
    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "summary": "as served"}


def open_gguf_infos(paths: Sequence[str], original_length: int | None = None) -> list[GgufInfo]:
    """Open GGUF files with unique names."""
    models = [open_gguf(path, original_length) for path in paths]
    names = _make_names_unique([(model.path.name, str(model.path)) for model in models])
    infos = []
    for name, model in zip(names, models, strict=True):
        config = {**model.model.config, "model_type": model.architecture.name}
        if model.recipe:
            config["ctxext"] = {"recipe": model.recipe["recipe"]}
        encoding = model.model.encoding
        checkpoint = Checkpoint(name, model.path.parent, config)
        infos.append(GgufInfo(name, checkpoint, encoding.trained_length, encoding.usable_length, paths=model.parts))
    return infos


def open_infos(
    sources: Sequence[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    original_length: int | None = None,
) -> list[CheckpointInfo]:
    """Open checkpoints with unique names."""
    checkpoints = [
        open_checkpoint(source, revision=revision, token=token, original_length=original_length) for source in sources
    ]
    names = _make_names_unique([(checkpoint.public_name, checkpoint.name) for checkpoint in checkpoints])
    return [info_of(name, checkpoint) for name, checkpoint in zip(names, checkpoints, strict=True)]


def _make_names_unique(names: Sequence[tuple[str, str]]) -> list[str]:
    """Return the short name of each model if it is unique, else the full name."""
    short_names = [name for name, _ in names]
    chosen = [name if short_names.count(name) == 1 else full_name for name, full_name in names]
    for name in chosen:
        if chosen.count(name) > 1:
            raise CtxextError(f'Model "{name}" is listed twice.', hint="List each model once.")
    return chosen


def info_of(name: str, checkpoint: Checkpoint) -> CheckpointInfo:
    """Read the facts about a checkpoint's context from its files."""
    from ctxext.checkpoint.families import family_of
    from ctxext.recipes.encodings.learned import ClippedTable
    from ctxext.recipes.model_config import is_readable, model_config

    names = {path.name for path in checkpoint.files}
    if not names & set(_TOKENIZERS) and not any(path.suffix == ".tiktoken" for path in checkpoint.files):
        raise CtxextError(f'"{name}" has no tokenizer.', hint="Copy the tokenizer files of its source into its folder.")
    config = checkpoint.config
    family = family_of(config)
    if auto_class(config) not in KINDS:
        raise CtxextError(
            f'"{checkpoint.name}" is neither a causal nor a masked language model: {auto_class(config)} loads it.',
            hint="ctxext eval supports causal and masked language models, and encoders without a task head.",
        )
    has_table = family.positions == "learned" or family.model_type in _BIAS_TABLES
    if is_readable(config, family):
        encoding = model_config(config, checkpoint.original_length).encoding
        has_table = has_table and not isinstance(encoding, ClippedTable)
        return CheckpointInfo(name, checkpoint, encoding.trained_length, encoding.usable_length, has_table)
    length = next((int(config[key]) for key in _LENGTH_KEYS if config.get(key)), None)
    return CheckpointInfo(name, checkpoint, length, length, has_table)
