"""Verify a converted checkpoint: first its files, then the model in a process without ctxext."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.families import serves_sliding
from ctxext.checkpoint.loading import needs_accelerator
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.console import shows_progress
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.files.packages import untested_notice
from ctxext.files.tensor_files import read_safetensors_header
from ctxext.recipes.code.own_code import check_pinned
from ctxext.recipes.encodings.biases import Buckets
from ctxext.recipes.encodings.learned import ClippedTable, LearnedTable
from ctxext.verify import file_checks
from ctxext.verify.conversion import FAILED, PASSED, SKIPPED, Conversion, Finding, quote_names, training_of
from ctxext.verify.isolated_checks import ScriptFailedError, compare_logits, lacks_package, run_script
from ctxext.verify.rotation import (
    OTHER_TOWERS,
    TOLERANCE,
    Rotation,
    difference,
    expected_rotation,
    largest_difference,
    reference_of,
    rotations,
)

Check = Callable[[Conversion], Finding | None]
"""A check; it returns None if it does not apply."""

READING: tuple[Check, ...] = (
    file_checks.check_record,
    file_checks.check_files,
    file_checks.check_weights,
    file_checks.check_configuration,
    file_checks.check_lengths,
    file_checks.check_code,
)
"""The checks that read files only, in the order of the output."""

_NOT_RUN = "it contains code that this version did not write; --trust-remote-code runs it"


def check_version(conversion: Conversion) -> Finding | None:
    """Report an installed transformers that is newer than the tested versions."""
    notice = untested_notice()
    return Finding("transformers", SKIPPED, notice) if notice else None


def check_loading(conversion: Conversion) -> Finding:
    """Check whether the model loads without ctxext, with all its weights."""
    if not conversion.may_load:
        return Finding("loading", SKIPPED, _NOT_RUN)
    if reason := needs_accelerator(conversion.checkpoint):
        return Finding("loading", SKIPPED, f"cannot be checked here: {reason}")
    report = conversion.load_report
    if package := lacks_package(conversion.checkpoint.config, report.error):
        return Finding("loading", SKIPPED, f"cannot be checked here: {package}")
    if report.error or report.missing:
        return Finding("loading", FAILED, report.error or f"weights are missing: {quote_names(list(report.missing))}")
    flag = " with its own code" if conversion.own_code else ""
    return Finding("loading", PASSED, f"{report.name}, {report.parameters:,} parameters, without ctxext{flag}")


def _reason_to_skip(conversion: Conversion) -> str:
    """Return why a loaded model cannot be compared; empty if it can."""
    if not conversion.may_load:
        return _NOT_RUN
    if reason := needs_accelerator(conversion.checkpoint):
        return reason
    if not conversion.has_recipe:
        return '"config.json" has no recipe'
    return "it does not load" if conversion.load_report.error else ""


def check_frequencies(conversion: Conversion) -> Finding | None:
    """Check whether the loaded model rotates by the recipe's inverse frequencies."""
    name = "frequencies"
    if conversion.family.positions != "rotary":
        return None
    if reason := _reason_to_skip(conversion):
        return Finding(name, SKIPPED, reason)
    if conversion.family.encoding == "none":
        return _check_kept_frequencies(conversion)
    types = ("", *conversion.family.full_types)
    modules = [
        entry
        for entry in conversion.load_report.rotary
        if entry["layer_type"] in types
        and not any(word in entry["module"] for word in OTHER_TOWERS)
        and not serves_sliding(conversion.checkpoint.config, conversion.family, entry["module"])
    ]
    if not modules:
        return Finding(name, SKIPPED, "this family stores no inverse frequencies to compare")
    try:
        expected, scaling = expected_rotation(
            conversion.recipe,
            conversion.plain_model,
            conversion.expected_model,
            conversion.plain_model.rotary.trained_length,
        )
    except CtxextError as error:
        return Finding(name, SKIPPED, error.message)
    for entry in modules:
        actual = [frequency for frequency in entry["frequencies"] if frequency != 0]  # 0 does not rotate (Gemma 4).
        if len(actual) != len(expected):
            return Finding(name, FAILED, f"{entry['module']} has {len(actual)} frequencies, expected {len(expected)}")
        pairs = [*zip(actual, expected, strict=True), (entry["scaling"], scaling)]
        if (off := largest_difference(pairs)) >= TOLERANCE:
            return Finding(name, FAILED, f"{entry['module']} differs from the recipe by up to {off:.1e}")
    factor = f", cosine and sine × {scaling:.4g}" if scaling != 1 else ""
    return Finding(name, PASSED, f"{len(expected)} inverse frequencies match the recipe{factor}")


def _check_kept_frequencies(conversion: Conversion) -> Finding:
    """Check whether the loaded model, without positions in its full-attention layers, rotates as its source."""
    name, length = "frequencies", conversion.plain_model.encoding.trained_length
    before = {
        (entry.module, entry.layer_type): entry for entry in rotations(conversion.plain_model.config, [length])[length]
    }
    loaded = conversion.load_report.rotary
    if not loaded:
        return Finding(name, SKIPPED, "this family stores no inverse frequencies to compare")
    for entry in loaded:
        old = before.get((entry["module"], entry["layer_type"]))
        expected = () if old is None else [theta for theta in old.frequencies if theta > 0]
        actual = Rotation("", "", tuple(sorted(set(entry["frequencies"]))), entry["scaling"])
        if (off := difference(actual, expected, 1.0 if old is None else old.scaling)) >= TOLERANCE:
            return Finding(name, FAILED, f"{entry['module']} differs from the source by up to {off:.1e}")
    return Finding(name, PASSED, "the layers that rotate have the inverse frequencies of the source")


def check_scores(conversion: Conversion) -> Finding | None:
    """Check whether latent attention multiplies all scores as the recipe specifies."""
    name = "scores"
    if not conversion.family.scales_scores or not conversion.has_recipe or not conversion.recipe.changes_frequencies:
        return None
    if reason := _reason_to_skip(conversion):
        return Finding(name, SKIPPED, reason)
    expected = 1.0
    for step in conversion.recipe.steps:
        if scores := getattr(reference_of(step), "scores", None):
            expected = scores(step.to_dict())
    factors = conversion.load_report.scores
    for module, actual in factors.items():
        if (off := largest_difference([(actual, expected)])) >= TOLERANCE:
            return Finding(name, FAILED, f"{module} differs from the recipe by {off:.1e}")
    if not factors:
        return Finding(name, SKIPPED, "this family stores no scale of its scores to compare")
    return Finding(name, PASSED, f"the latent attention multiplies all scores by {expected:.4g}, as the recipe")


def check_logits(conversion: Conversion) -> Finding | None:
    """Check whether the logits of a checkpoint with code match its method, computed by the reference."""
    if not conversion.has_recipe or not conversion.recipe.needs_code:
        return None
    if reason := _reason_to_skip(conversion):
        return Finding("logits", SKIPPED, reason)
    conversion.report_stage("comparing the logits with what the method specifies")
    try:
        report = compare_logits(
            conversion.checkpoint.folder,
            conversion.checkpoint,
            conversion.recipe,
            conversion.expected_model,
            conversion.recipe.edit(conversion.plain_model, with_code=False),
            foreign=conversion.runs_foreign_code,
        )
    except CtxextError as error:
        return Finding("logits", FAILED, error.message)
    if report.skipped:
        return Finding("logits", SKIPPED, report.skipped)
    forms = f" in {report.coverage}" if report.forms else ""
    difference = f"largest relative difference {report.difference:.0e}"
    return Finding("logits", PASSED, f"match the reference{forms} ({difference})")


def check_buckets(conversion: Conversion) -> Finding | None:
    """Check whether each stack of the model looks up its biases in the buckets of the reference."""
    name = "buckets"
    if not conversion.has_recipe or all(step.kind != name for step in conversion.recipe.steps):
        return None
    (step,) = (step for step in conversion.recipe.steps if step.kind == name)
    plain = conversion.plain_model.encoding
    assert isinstance(plain, Buckets)
    task: dict[str, Any] = {
        "check": name,
        "numbers": step.to_dict(),
        "source": {
            "formula": plain.layout.formula,
            "distance": plain.distance,
            "num_buckets": plain.num_buckets,
        },
    }
    try:
        report = run_script(conversion.checkpoint, task, methods=[step.name])
    except ScriptFailedError as error:
        return Finding(name, FAILED, f"the buckets cannot be compared: {error}")
    if not report["stacks"]:
        return Finding(name, FAILED, "no bias lookup was observed")
    if report["wrong"]:
        return Finding(name, FAILED, f"a distance of {report['wrong'][0]} tokens is in another bucket")
    return Finding(name, PASSED, f"{report['distances']} distances in {report['stacks']} stacks match the recipe")


def check_memory(conversion: Conversion) -> Finding | None:
    """Check whether a model reads segments with the memory of the recipe, as the reference computes them."""
    name = "memory"
    if not conversion.has_recipe or all(step.kind != name for step in conversion.recipe.steps):
        return None
    (step,) = (step for step in conversion.recipe.steps if step.kind == name)
    task = {"check": name, "numbers": step.to_dict()}
    if (kept := conversion.model.encoding.context_length) > _MOST_STATES:
        return Finding(name, SKIPPED, f"{kept} states; the reference computes at most {_MOST_STATES}")
    try:
        report = run_script(conversion.checkpoint, task, methods=[step.name])
    except ScriptFailedError as error:
        return Finding(name, FAILED, f"the memory cannot be compared: {error}")
    if report["states"] != report["expected"]:
        return Finding(name, FAILED, f"the model keeps {report['states']} states, the recipe {report['expected']}")
    if not report["difference"] <= _ROUNDING * report["scale"]:
        return Finding(name, FAILED, f"segments differ from the reference by up to {report['difference']:.1e}")
    detail = f"{report['states']} states; segments match the reference (largest difference "
    return Finding(name, PASSED, f"{detail}{report['difference']:.0e})")


_MOST_STATES = 1 << 13
"""Largest memory that is compared: the reference needs about 20 seconds for it."""

_ROUNDING = 1e-5
"""Largest difference of float32 from the float64 reference, over the scale of the result."""


def check_tables(conversion: Conversion) -> Finding | None:
    """Compare each row of the loaded tables with its reference, computed from the source's rows if it is specified."""
    name = "tables"
    if not conversion.has_recipe or not conversion.recipe.rewrites_weights:
        return None
    encoding = conversion.model.encoding
    is_clipped = isinstance(encoding, ClippedTable)
    # Without names of tables, the model computes them for any length.
    if not isinstance(encoding, LearnedTable) or not encoding.layout.tensors:
        return None
    if not conversion.may_load:
        return Finding(name, SKIPPED, "it contains code that this version did not write")
    if conversion.load_report.error:
        return Finding(name, SKIPPED, "it does not load")
    if training_of(conversion):
        return Finding(name, SKIPPED, "training changed its rows")
    (step,) = (step for step in conversion.recipe.steps if step.kind == "table")
    stored = [tensor for tensor in conversion.new_tensors if tensor.endswith(encoding.layout.tensors)]
    names = stored or encoding.layout.tensors  # Computed tables need not be among the weights.
    plain, files = conversion.plain_model.encoding, dict[str, str]()
    assert isinstance(plain, LearnedTable)
    count = encoding.num_rows - encoding.num_special
    if (source := conversion.source) is not None:  # The files of the source that contain the tables.
        for path in reversed(source.loaded_safetensors):
            file = source.folder / path
            files |= dict.fromkeys(read_safetensors_header(file), str(file.resolve()))
    task = {
        "check": name,
        "auto": auto_class(conversion.checkpoint.config),
        "tables": {tensor: files.get(tensor) for tensor in names},
        "endings": list(encoding.layout.tensors),
        "special": encoding.num_special,
        "length": plain.num_rows - plain.num_special,
        "count": count,
        "numbers": {**step.to_dict(), "distances": is_clipped},
    }
    try:
        report = run_script(conversion.checkpoint, task, methods=[step.name])
    except ScriptFailedError as error:
        return Finding(name, FAILED, f"the tables cannot be compared: {error}")
    tables = report["tables"]
    for table in tables:
        if table["rows"] != count:
            kind = "distances" if is_clipped else "positions"
            problem = f'"{table["name"]}" has {table["rows"]} rows for {kind}, the recipe {count}'
        elif table.get("unknown"):
            return Finding(name, SKIPPED, "not all rows of the source are in the new table; --against SOURCE compares")
        elif not table["same"]:
            problem = f'"{table["name"]}": the rows before position 0 differ from the source\'s'
        elif not table["difference"] <= report["epsilon"] * max(table["scale"], 1e-30):
            problem = f'"{table["name"]}" differs from the recipe by up to {table["difference"]:.1e}'
        else:
            continue
        return Finding(name, FAILED, problem)
    rows = ", ".join(f"{table['name']}: {table['rows']} rows" for table in tables)
    worst = max(table["difference"] for table in tables)
    is_kept = conversion.source is not None and all(table["kept"] for table in tables)
    old = "those of the old distances" if is_clipped else f"the first {encoding.trained_length}"
    note = f", {old} identical to the source's" if is_kept else ""
    return Finding(name, PASSED, f"{rows} match the recipe (largest difference {worst:.0e}){note}")


LOADING: tuple[Check, ...] = (
    check_version,
    check_loading,
    check_frequencies,
    check_scores,
    check_tables,
    check_buckets,
    check_memory,
    check_logits,
)
"""The checks that load the model."""


@shows_progress("verifying")
def verify(
    folder: str | Path,
    *,
    against: str | Path | None = None,
    load: bool = True,
    trust_remote_code: bool = False,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Check a converted checkpoint.

    Args:
        folder: A folder or a Hub id.
        against: The checkpoint with the weights that it must have; None leaves that unchecked.
        load: Also load the model, in a separate process.
        trust_remote_code: Also run modeling code that this version did not write.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token; None reads the usual places.
        progress: Called with the name of the current file, the amount read and the total. By default, a terminal or a
            notebook shows a progress bar.

    Raises:
        CtxextError: there is no such checkpoint, or third-party code would run from a revision that can change.
    """
    checkpoint = open_checkpoint(folder, revision=revision, token=token)
    if trust_remote_code:
        check_pinned(checkpoint, revision)
    source = None if against is None else open_checkpoint(against, token=token)
    conversion = Conversion(checkpoint, source, trust_remote_code, progress=progress)
    if load and not conversion.has_recipe and not conversion.manifest:
        return [*run_checks(READING, conversion), Finding("loading", SKIPPED, "ctxext did not write this checkpoint")]
    checks = (*READING, *(LOADING if load else ()), file_checks.check_against)
    return run_checks(checks, conversion)


def run_checks(checks: Sequence[Check], conversion: Conversion) -> list[Finding]:
    """Run checks one after another; a check that cannot read something fails with the reason."""
    findings = [_run(check, conversion) for check in checks]
    return [finding for finding in findings if finding is not None]


def _run(check: Check, conversion: Conversion) -> Finding | None:
    try:
        return check(conversion)
    except CtxextError as error:
        problem = error.message
    except OSError as error:
        problem = f'"{error.filename}" cannot be read: {error.strerror}'
    return Finding(check.__name__.removeprefix("check_"), FAILED, problem)


def failures(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of failed checks."""
    return [finding for finding in findings if finding.status == FAILED]
