"""What is being verified: a checkpoint, what was recorded about it, and what its recipe says it must be."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.described_size import check_described
from ctxext.checkpoint.families import FAMILIES, Family, family_of
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.code.own_code import CODE_FILES, own_code, runs_only_own_code
from ctxext.recipes.code.staging import staged
from ctxext.recipes.encodings.rotary import ModelConfig, Rotary, model_config, provenance
from ctxext.recipes.recipe import Recipe, plain_config, recipe_from_dict
from ctxext.system.files import MANIFEST, Progress, sha256_of
from ctxext.verify.clean_load import LoadReport, load_in_clean_process

PASSED, FAILED, SKIPPED = "passed", "failed", "not checked"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: Its name.
        status: "passed", "failed" or "not checked".
        detail: One line; names the files where something is wrong with them.
    """

    check: str
    status: str
    detail: str


@contextlib.contextmanager
def _making_sense() -> Iterator[None]:
    """Say of a configuration that someone broke that it is broken, whatever it is that breaks on it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CtxextError(f'"config.json" makes no sense: {type(error).__name__} {error}') from error


@dataclass(frozen=True)
class Subject:
    """A checkpoint and everything that can be said about it without loading it.

    Attributes:
        checkpoint: Its files.
        source: The checkpoint whose weights it must have; None where nobody asks.
        trust_remote_code: Whether code that is not this version's own may be run.
        rewritten: A folder whose files are about to be written again, so that they are not checked.
        progress: Called with a file's name, bytes read and bytes in all.
    """

    checkpoint: Checkpoint
    source: Checkpoint | None = None
    trust_remote_code: bool = False
    rewritten: str | None = None
    progress: Progress | None = field(default=None, repr=False)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of ctxext.json; empty where there is none."""
        return self.checkpoint.read_json(MANIFEST) or {}

    def recorded(self, key: str) -> dict[str, str | None]:
        """The digests under one key of ctxext.json.

        Raises:
            CtxextError: ctxext.json is not what this package writes.
        """
        digests = self.manifest.get(key)
        if not isinstance(digests, dict):
            raise CtxextError(f"{MANIFEST} records no {key}.")
        return digests

    @cached_property
    def family(self) -> Family:
        """The model's family."""
        return family_of(self.checkpoint.config)

    @property
    def has_recipe(self) -> bool:
        """Whether config.json says what ctxext did."""
        return isinstance(provenance(self.checkpoint.config).get("recipe"), dict)

    @cached_property
    def recipe(self) -> Recipe:
        """What config.json says was applied."""
        with _making_sense():
            return recipe_from_dict(provenance(self.checkpoint.config).get("recipe"), "config.json")

    @cached_property
    def model(self) -> ModelConfig:
        """The configuration, as this version would have written it."""
        with _making_sense():
            return model_config(self.checkpoint.config)

    @cached_property
    def plain(self) -> ModelConfig:
        """The configuration with the recipe taken back."""
        with _making_sense():
            return plain_config(self.model)

    @cached_property
    def expected(self) -> ModelConfig:
        """The configuration as the recipe makes it again."""
        with _making_sense():
            return self.recipe.edit(self.plain)

    @cached_property
    def new_tensors(self) -> list[str]:
        """The tensors that the recipe writes anew, by the names in the weights, sorted."""
        if not self.has_recipe or not self.recipe.rewrites_weights:
            return []
        # The same question that convert asked of the source: the result has the same names, and more rows.
        at_its_length = ModelConfig(self.model.config, self.family, self.model.encoding)
        return sorted(tensor.name for tensor in self.recipe.new_tensors(self.checkpoint, at_its_length))

    @property
    def rotary(self) -> Rotary:
        """The encoding that the recipe asks for."""
        return self.expected.rotary

    @cached_property
    def own_code(self) -> dict[str, str]:
        """The modeling code that the recipe needs: names and digests."""
        return own_code(self.checkpoint)

    @cached_property
    def foreign_code(self) -> list[Path]:
        """Python files that are not this version's own, byte for byte."""
        python = [path for path in self.checkpoint.files if path.suffix == ".py"]
        return [
            path for path in python if sha256_of(self.checkpoint.folder / path) != self.own_code.get(path.as_posix())
        ]

    @cached_property
    def loaded(self) -> LoadReport:
        """What the model uses once it is loaded, in a process that cannot import ctxext."""
        with staged(self.checkpoint, foreign=self.runs_foreign_code) as stage:
            return load_in_clean_process(stage.folder, trust=stage.trust, auto=auto_class(self.checkpoint.config))

    @property
    def runs_foreign_code(self) -> bool:
        """Whether the user allowed code that is not ctxext's own, so that it is loaded from its own folder."""
        return self.trust_remote_code and not runs_only_own_code(self.checkpoint)

    @cached_property
    def may_load(self) -> bool:
        """Whether it can be loaded without running code that is neither transformers' nor this version's own.

        Raises:
            CtxextError: config.json describes far more than the files hold.
        """
        check_described(self.checkpoint, auto_class(self.checkpoint.config))
        needs_code = self.has_recipe and self.recipe.needs_code
        is_unknown = self.checkpoint.config.get("model_type") not in FAMILIES
        return self.trust_remote_code or not (needs_code or is_unknown) or runs_only_own_code(self.checkpoint)


def training_of(subject: Subject) -> dict[str, Any]:
    """What ctxext.json or config.json notes of a fine-tuning; empty where they note none."""
    noted = provenance(subject.checkpoint.config).get("finetune")
    record = subject.manifest.get("finetune") or noted or {}
    return dict(record) if isinstance(record, dict) else {}


def listed(names: list[str], limit: int = 5) -> str:
    """Names in one line."""
    shown = ", ".join(f'"{name}"' for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def is_own_code(path: Path) -> bool:
    """Whether a file has the name of modeling code that this package writes."""
    return path.as_posix() in CODE_FILES
