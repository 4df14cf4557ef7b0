"""The Python API: functions, their options and the types of their results. Everything is imported on first use.

Packages such as `ctxext.evaluate` have the names of functions, so this module is the only one that exports them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxext.checkpoint.opening import Checkpoint as Checkpoint
    from ctxext.checkpoint.opening import open_checkpoint as open_checkpoint
    from ctxext.compare.candidates import CompareOptions as CompareOptions
    from ctxext.compare.run import compare as compare
    from ctxext.converters.convert import Conversion as Conversion
    from ctxext.converters.convert import convert as convert
    from ctxext.converters.convert import plan_conversion as plan_conversion
    from ctxext.converters.inspection import Inspection as Inspection
    from ctxext.converters.inspection import inspect_checkpoint as inspect_checkpoint
    from ctxext.converters.options import ConvertOptions as ConvertOptions
    from ctxext.converters.plan import Plan as Plan
    from ctxext.errors import CtxextError as CtxextError
    from ctxext.evaluate.run import EvaluationReport as EvaluationReport
    from ctxext.evaluate.run import evaluate as evaluate
    from ctxext.finetune.documents import TrainingData as TrainingData
    from ctxext.finetune.options import TrainingOptions as TrainingOptions
    from ctxext.finetune.run import Finetuned as Finetuned
    from ctxext.finetune.run import finetune as finetune
    from ctxext.merge.run import Merged as Merged
    from ctxext.merge.run import merge as merge
    from ctxext.publish.push import Push as Push
    from ctxext.publish.push import plan_push as plan_push
    from ctxext.publish.push import push as push
    from ctxext.publish.upload_plan import UploadPlan as UploadPlan
    from ctxext.recipes.recipe import Recipe as Recipe
    from ctxext.recipes.recipe import load_recipe as load_recipe
    from ctxext.recipes.registry import METHODS as METHODS
    from ctxext.search.options import SearchOptions as SearchOptions
    from ctxext.search.run import SearchResult as SearchResult
    from ctxext.search.run import search as search
    from ctxext.tasks.settings import Settings as Settings
    from ctxext.verify.conversion import Finding as Finding
    from ctxext.verify.run import verify as verify

_NAMES = {
    "checkpoint.opening": ("Checkpoint", "open_checkpoint"),
    "compare.candidates": ("CompareOptions",),
    "compare.run": ("compare",),
    "converters.convert": ("Conversion", "convert", "plan_conversion"),
    "converters.inspection": ("Inspection", "inspect_checkpoint"),
    "converters.options": ("ConvertOptions",),
    "converters.plan": ("Plan",),
    "errors": ("CtxextError",),
    "evaluate.run": ("EvaluationReport", "evaluate"),
    "tasks.settings": ("Settings",),
    "finetune.documents": ("TrainingData",),
    "merge.run": ("Merged", "merge"),
    "finetune.options": ("TrainingOptions",),
    "finetune.run": ("Finetuned", "finetune"),
    "publish.push": ("Push", "plan_push", "push"),
    "publish.upload_plan": ("UploadPlan",),
    "recipes.recipe": ("Recipe", "load_recipe"),
    "recipes.registry": ("METHODS",),
    "search.options": ("SearchOptions",),
    "search.run": ("SearchResult", "search"),
    "verify.run": ("verify",),
    "verify.conversion": ("Finding",),
}
"""Public names by module, the same as the imports above for type checkers."""

_MODULES = {name: f"ctxext.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)
