"""Verify a finished checkpoint: one finding per check."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.recipes.code.own_code import check_pinned
from ctxext.verify import file_checks, loading_checks
from ctxext.verify.subject import FAILED, SKIPPED, Finding, Subject

Check = Callable[[Subject], Finding | None]
"""A check returns None if it does not apply."""

READING: tuple[Check, ...] = (
    file_checks.check_record,
    file_checks.check_files,
    file_checks.check_weights,
    file_checks.check_configuration,
    file_checks.check_lengths,
    file_checks.check_code,
)
"""The checks that read files only, in the order in which they are shown."""

LOADING: tuple[Check, ...] = (
    loading_checks.check_version,
    loading_checks.check_loading,
    loading_checks.check_frequencies,
    loading_checks.check_tables,
    loading_checks.check_buckets,
    loading_checks.check_logits,
)
"""The checks that load the model."""


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
        against: The checkpoint whose weights it must have; None leaves that unchecked.
        load: Also load the model, in a separate process.
        trust_remote_code: Also run modeling code that this version did not write.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token; None reads the usual places.
        progress: Called with what is being read, how much of it and how much in all.

    Raises:
        CtxextError: there is no such checkpoint, or other people's code would run from a place that can change.
    """
    checkpoint = open_checkpoint(folder, revision=revision, token=token)
    if trust_remote_code:
        check_pinned(checkpoint, revision)
    source = None if against is None else open_checkpoint(against, token=token)
    subject = Subject(checkpoint, source, trust_remote_code, progress=progress)
    if load and not subject.has_recipe and not subject.manifest:
        return [*run_checks(READING, subject), Finding("loading", SKIPPED, "ctxext did not write this checkpoint")]
    checks = (*READING, *(LOADING if load else ()), file_checks.check_against)
    return run_checks(checks, subject)


def run_checks(checks: Sequence[Check], subject: Subject) -> list[Finding]:
    """Run checks one after another; a check that cannot read something fails with the reason."""
    findings = [_run(check, subject) for check in checks]
    return [finding for finding in findings if finding is not None]


def _run(check: Check, subject: Subject) -> Finding | None:
    try:
        return check(subject)
    except CtxextError as error:
        problem = error.message
    except OSError as error:
        problem = f'"{error.filename}" cannot be read: {error.strerror}'
    return Finding(check.__name__.removeprefix("check_"), FAILED, problem)


def failures(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that make a checkpoint fail."""
    return [finding for finding in findings if finding.status == FAILED]
