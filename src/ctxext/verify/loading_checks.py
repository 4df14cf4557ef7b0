"""The checks that load the model, each in a process of its own that cannot import ctxext."""

from ctxext.errors import CtxextError
from ctxext.verify.carried import expected_rotation, largest_difference
from ctxext.verify.logits import compare_logits
from ctxext.verify.subject import FAILED, PASSED, SKIPPED, Finding, Subject, listed

_TOLERANCE = 2e-5
_NOT_RUN = "it carries code that is not this version's own; --trust-remote-code runs it"
_OTHER_TOWERS = ("vision", "visual", "audio", "local")


def check_loading(subject: Subject) -> Finding:
    """Whether the model loads without ctxext, with all its weights."""
    if not subject.may_load:
        return Finding("loading", SKIPPED, _NOT_RUN)
    report = subject.loaded
    if report.error or report.missing:
        return Finding("loading", FAILED, report.error or f"weights are missing: {listed(list(report.missing))}")
    flag = " with its own code" if subject.own_code else ""
    return Finding("loading", PASSED, f"{report.name}, {report.parameters:,} parameters, without ctxext{flag}")


def _unasked(subject: Subject) -> str:
    """Why a loaded model cannot be compared; empty where it can."""
    if not subject.may_load:
        return _NOT_RUN
    if not subject.has_recipe:
        return '"config.json" has no recipe'
    return "it does not load" if subject.loaded.error else ""


def check_frequencies(subject: Subject) -> Finding | None:
    """Whether the loaded model rotates by the recipe's inverse frequencies."""
    name = "frequencies"
    if subject.family.positions != "rotary":
        return None
    if reason := _unasked(subject):
        return Finding(name, SKIPPED, reason)
    types = ("", *subject.family.full_types)
    modules = [
        entry
        for entry in subject.loaded.rotary
        if entry["layer_type"] in types and not any(word in entry["module"] for word in _OTHER_TOWERS)
    ]
    if not modules:
        return Finding(name, SKIPPED, "this family keeps no inverse frequencies that could be compared")
    try:
        wanted, scaling = expected_rotation(
            subject.recipe, subject.plain, subject.expected, subject.plain.rotary.trained_length
        )
    except CtxextError as error:
        return Finding(name, SKIPPED, error.message)
    for entry in modules:
        got = entry["frequencies"]
        if len(got) != len(wanted):
            return Finding(name, FAILED, f"{entry['module']} has {len(got)}, the recipe {len(wanted)}")
        pairs = [*zip(got, wanted, strict=True), (entry["scaling"], scaling)]
        if (off := largest_difference(pairs)) >= _TOLERANCE:
            return Finding(name, FAILED, f"{entry['module']} differs from the recipe by up to {off:.1e}")
    factor = f", cosine and sine × {scaling:.4g}" if scaling != 1 else ""
    return Finding(name, PASSED, f"{len(wanted)} inverse frequencies as the recipe says{factor}")


def check_logits(subject: Subject) -> Finding | None:
    """Whether the logits of a checkpoint with code are what its method says, worked out the plain way."""
    if not subject.has_recipe or not subject.recipe.needs_code:
        return None
    if reason := _unasked(subject):
        return Finding("logits", SKIPPED, reason)
    stock = subject.recipe.edit(subject.plain, with_code=False)
    report = compare_logits(
        subject.checkpoint.folder,
        subject.checkpoint,
        subject.recipe,
        subject.expected,
        stock,
        foreign=subject.runs_foreign_code,
    )
    if report.skipped:
        return Finding("logits", SKIPPED, report.skipped)
    return Finding("logits", PASSED, f"as the method says (largest relative difference {report.difference:.0e})")
