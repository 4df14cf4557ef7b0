"""The checkpoint under verification, with its record and the configuration implied by its recipe."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import FAMILIES, Family, family_of
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST, Progress, report_stage, sha256_of
from ctxext.recipes.code.own_code import explain_broken_config, own_code, runs_only_own_code
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.model_config import ModelConfig, model_config
from ctxext.recipes.recipe import Recipe, plain_config, recipe_from_dict
from ctxext.verify.isolated_checks import LoadReport, load_isolated

PASSED, FAILED, SKIPPED = "passed", "failed", "not checked"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Its name.
        status: "passed", "failed" or "not checked".
        detail: One line, with the names of affected files.
    """

    check: str
    status: str
    detail: str


@dataclass(frozen=True)
class Conversion:
    """A checkpoint, and its properties without loading it.

    Attributes:
        checkpoint: Its files.
        source: The checkpoint with the weights that it must have; None leaves that unchecked.
        trust_remote_code: Whether code that this version did not write may run.
        rewritten: A folder with files that are not checked because they will be rewritten.
        progress: Called with a file's name, bytes read and bytes in total.
    """

    checkpoint: Checkpoint
    source: Checkpoint | None = None
    trust_remote_code: bool = False
    rewritten: str | None = None
    progress: Progress | None = field(default=None, repr=False)

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The content of ctxext.json; empty without that file."""
        return self.checkpoint.read_json(MANIFEST) or {}

    @property
    def compared_source(self) -> str:
        """Recorded name of the source with the same weights; empty if unknown, or after a training."""
        return "" if training_of(self) else str((self.manifest.get("source") or {}).get("name") or "")

    def report_stage(self, stage: str) -> None:
        """Report the beginning of a stage that may take minutes."""
        report_stage(self.progress, stage)

    def read_digests(self, key: str) -> dict[str, str | None]:
        """Return the digests under one key of ctxext.json."""
        digests = self.manifest.get(key)
        if not isinstance(digests, dict):
            raise CtxextError(f"{MANIFEST} has no {key}.")
        return digests

    @cached_property
    def family(self) -> Family:
        """The model's family."""
        return family_of(self.checkpoint.config)

    @property
    def has_recipe(self) -> bool:
        """Whether config.json has a recipe."""
        return isinstance(provenance(self.checkpoint.config).get("recipe"), dict)

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe in config.json."""
        with explain_broken_config():
            return recipe_from_dict(provenance(self.checkpoint.config).get("recipe"), "config.json")

    @cached_property
    def model(self) -> ModelConfig:
        """The configuration in config.json, in the form that this version writes."""
        with explain_broken_config():
            return model_config(self.checkpoint.config)

    @cached_property
    def plain_model(self) -> ModelConfig:
        """The configuration before the recipe was applied."""
        with explain_broken_config():
            return plain_config(self.model)

    @cached_property
    def expected_model(self) -> ModelConfig:
        """The configuration that results from applying the recipe again."""
        with explain_broken_config():
            return self.recipe.edit(self.plain_model)

    @cached_property
    def new_tensors(self) -> list[str]:
        """The names of the tensors that the recipe rewrites, sorted."""
        if not self.has_recipe or not self.recipe.rewrites_weights:
            return []
        # As computed by convert for the source; the result has the same names, and more rows.
        at_its_length = ModelConfig(self.model.config, self.family, self.model.encoding)
        return sorted(tensor.name for tensor in self.recipe.new_tensors(self.checkpoint, at_its_length))

    @cached_property
    def own_code(self) -> dict[str, str]:
        """The modeling code that the recipe needs: names and digests."""
        return own_code(self.checkpoint.config)

    @cached_property
    def foreign_code(self) -> list[Path]:
        """Python files that differ from those that this version writes."""
        python = [path for path in self.checkpoint.files if path.suffix == ".py"]
        return [
            path for path in python if sha256_of(self.checkpoint.folder / path) != self.own_code.get(path.as_posix())
        ]

    @cached_property
    def load_report(self) -> LoadReport:
        """The model as loaded in a process that cannot import ctxext."""
        self.report_stage("loading the model in a clean process")
        return load_isolated(self.checkpoint, foreign=self.runs_foreign_code)

    @property
    def runs_foreign_code(self) -> bool:
        """Whether the user allowed code that ctxext did not write, so that it is loaded from the folder unchanged."""
        return self.trust_remote_code and not runs_only_own_code(self.checkpoint)

    @cached_property
    def may_load(self) -> bool:
        """Whether loading runs only code of transformers and of this version, or the user allowed other code."""
        needs_code = self.has_recipe and self.recipe.needs_code
        is_unknown = self.checkpoint.config.get("model_type") not in FAMILIES
        return self.trust_remote_code or not (needs_code or is_unknown) or runs_only_own_code(self.checkpoint)


def training_of(conversion: Conversion) -> dict[str, Any]:
    """Return the record of a fine-tuning in ctxext.json or config.json; empty by default."""
    in_config = provenance(conversion.checkpoint.config).get("finetune")
    record = conversion.manifest.get("finetune") or in_config or {}
    return dict(record) if isinstance(record, dict) else {}


def quote_names(names: list[str]) -> str:
    """Return names in quotes on one line: the first five, and the number of the others."""
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
