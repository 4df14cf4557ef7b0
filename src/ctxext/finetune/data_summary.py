"""What was read, for people: how much of how much, and what was left out."""

from ctxext.finetune.data import DataReport
from ctxext.finetune.options import TrainingOptions

_WASTE = 0.1
"""Share of padding, or of dropped tokens, from which packing is suggested."""


def data_lines(report: DataReport, options: TrainingOptions) -> list[str]:
    """The lines."""
    in_all = "" if report.num_in_all in (None, report.num_documents) else f" of {report.num_in_all:,}"
    about = ""
    if in_all and report.num_tokens_in_all is not None:
        about = f" of about {report.num_tokens_in_all:,}"
    lines = [
        f"data: {report.num_documents:,}{in_all} documents, {report.num_tokens:,}{about} tokens → "
        f"{report.num_sequences:,} sequences of {options.sequence_length:,}; {report.num_dropped:,} tokens dropped"
    ]
    shorter = [f"{count:,} of {int(length):,}" for length, count in report.num_shorter.items()]
    if shorter:
        lines.append(f"      and {', '.join(shorter)} tokens")
    lines += [f"      {line}" for line in _left_out(report, options)]
    times = options.sequences_wanted()[options.sequence_length] / report.num_sequences
    if times > 1:
        lines.append(f"      each sequence is seen {times:.1f} times")
    return lines


def num_tokens_of(report: DataReport, options: TrainingOptions) -> int:
    """Tokens in all sequences."""
    shorter = sum(int(length) * count for length, count in report.num_shorter.items())
    return shorter + report.num_sequences * options.sequence_length


def _left_out(report: DataReport, options: TrainingOptions) -> list[str]:
    in_all = num_tokens_of(report, options)
    lines = []
    if report.num_learned < in_all:
        lines.append(f"the loss counts {100 * report.num_learned / in_all:.1f} % of all tokens")
    if report.num_padding > _WASTE * in_all:
        remedy = " (--pack restart joins documents)" if options.pack == "off" else ""
        lines.append(f"{100 * report.num_padding / in_all:.0f} % of all tokens are padding{remedy}")
    if report.num_bad:
        lines.append(f"{report.num_bad:,} bad records were skipped; the first: {report.first_bad}")
    if report.unused_fields:
        lines.append(f"fields that are not read: {', '.join(sorted(report.unused_fields))}")
    if report.num_short:
        lines.append(f"{report.num_short:,} documents are too short for a sequence (--pack run-on joins them)")
    if report.num_long:
        lines.append(f"{report.num_long:,} documents with marked answers are too long for a sequence")
    lines += [
        f"nothing has {int(length):,} tokens; those steps use {options.sequence_length:,}"
        for length, count in report.num_shorter.items()
        if not count
    ]
    return lines
