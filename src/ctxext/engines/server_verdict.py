"""The verdict on a server: the reading of the checkpoint that fits its answers, and the setting that fixes a fault."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.engines import WRONG, serving_of, source_commands
from ctxext.engines.server import Server
from ctxext.engines.server_probes import IN_TEMPLATE, Probe
from ctxext.engines.server_readings import CONVERTED, CUT
from ctxext.recipes.encodings.rotary import model_config, provenance

SERVED, FAULT, UNDECIDED = "as converted", "fault", "cannot be decided"

_CLEAR = 3.0
"""A reading fits if its difference is this many times smaller than that of every other reading."""

_LEAST = 0.03
"""Smallest mean difference in nats that is more than rounding to 16 bits."""

_MOST_OFF = 0.5
"""Largest mean difference in nats of a reading that fits; 4-bit weights differ by less."""

_LENGTH_FLAGS = {
    "vLLM": "--max-model-len {}",
    "SGLang": "--context-length {}",
    "llama.cpp": "-c {} (for each slot: times --parallel)",
    "Ollama": "OLLAMA_CONTEXT_LENGTH={}",
}
"""The setting of the context length of each server."""


@dataclass(frozen=True)
class Finding:
    """A finding on a server.

    Attributes:
        status: "as converted", "fault" or "cannot be decided".
        text: One sentence.
        fix: The remedy; empty if there is none.
    """

    status: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class ServerReport:
    """The result of a check.

    Attributes:
        server: Name and version of the server.
        model: The model's name on the server.
        status: "as converted", "fault" or "cannot be decided".
        verdict: All findings.
        fix: The remedy; empty if there is none.
        basis: "log-probabilities" or "generated text".
        probes: A row for each prompt: place, tokens, tokens read, whether it was refused, and differences by reading.
        notes: Remarks on the measurement.
    """

    server: str
    model: str
    status: str
    verdict: str
    fix: str
    basis: str
    probes: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()


def judge(
    checkpoint: Checkpoint, server: Server, probes: Sequence[Probe], notes: Sequence[str], *, is_sampled: bool
) -> ServerReport:
    """Return the report on a server from its answers to all prompts."""
    reading = _judge_reading(checkpoint, server, probes, is_sampled=is_sampled)
    findings = [*_judge_template(probes, reading), *_judge_length(checkpoint, server, probes), reading]
    faults = [finding for finding in findings if finding.status == FAULT]
    # Serving the schedule also sets the length.
    fixes = [finding.fix for finding in [*reversed(faults), reading] if finding.fix]
    rows = [
        {
            "place": probe.place,
            "tokens": len(probe.ids),
            "read": probe.read,
            "refused": probe.is_refused,
            "differences": {name: value for name, value in probe.differences.items() if math.isfinite(value)},
        }
        for probe in probes
    ]
    return ServerReport(
        server=server.label,
        model=server.model,
        status=FAULT if faults else reading.status,
        verdict=" ".join(finding.text for finding in findings),
        fix=fixes[0] if fixes else "",
        basis="log-probabilities" if _has_numbers(probes) else "generated text",
        probes=tuple(rows),
        notes=tuple(dict.fromkeys(notes)),
    )


def _judge_reading(checkpoint: Checkpoint, server: Server, probes: Sequence[Probe], *, is_sampled: bool) -> Finding:
    """Return the reading that fits the prompts that were not cut, or the reason why none can be chosen."""
    means = _compute_means([probe for probe in probes if find_cut(probe) is None])
    if not means:
        return Finding(UNDECIDED, "It returns no tokens that can be compared.")
    if is_sampled:
        fix = "Start the server without a default temperature."
        return Finding(UNDECIDED, "Sampling cannot be disabled: temperature 0 has no effect.", fix)
    best = min(means, key=lambda name: means[name])
    if means[best] > _MOST_OFF:
        text = f"It fits no reading of the checkpoint (nearest: {best}, {means[best]:.2g} nats)."
        fix = "Check that it serves these weights with this tokenizer, and in 4 bits or more."
        return Finding(UNDECIDED, text, fix)
    rivals = [name for name in means if name != best and not is_clear(means[best], means[name])]
    if rivals:
        is_equal = max(means[name] for name in rivals) < means[best] + _LEAST
        if not _has_numbers(probes):
            reason = "Generated text without log-probabilities does not distinguish them."
        else:
            reason = "They are equal on these prompts." if is_equal else "Its numerical noise hides the difference."
        return Finding(UNDECIDED, f"It serves {', '.join([best, *rivals[:-1]])} or {rivals[-1]}. {reason}")
    if best != CONVERTED:
        return Finding(FAULT, f"It serves {best}.", _describe_fix(checkpoint, server))
    return Finding(SERVED, "It serves the checkpoint as converted.")


def _has_numbers(probes: Sequence[Probe]) -> bool:
    """Return whether the server returned log-probabilities."""
    return any(probe.evidence and probe.evidence.numbers for probe in probes)


def is_clear(best: float, other: float) -> bool:
    """Return whether a difference is clearly larger than the smallest one, both in nats."""
    return other >= max(_CLEAR * best, best + _LEAST)


def _compute_means(probes: Sequence[Probe]) -> dict[str, float]:
    """Return the mean difference of each reading that was computed for all of these prompts."""
    rows = [probe.differences for probe in probes if probe.differences]
    names = [name for name in rows[0] if not name.startswith(CUT)] if rows else []
    means = {name: sum(row[name] for row in rows) / len(rows) for name in names if all(name in row for row in rows)}
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def find_cut(probe: Probe) -> int | None:
    """Return the length to which the server cut a prompt, in tokens; None if it read all of it."""
    finite = {name: value for name, value in probe.differences.items() if math.isfinite(value)}
    best = min(finite, key=lambda name: finite[name], default="")
    is_cut = best.startswith(CUT) and is_clear(finite[best], finite.get(CONVERTED, math.inf))
    return int(best.removeprefix(CUT)) if is_cut else None


def _judge_template(probes: Sequence[Probe], reading: Finding) -> list[Finding]:
    """Return the finding on a server that adds text to prompts, if it does."""
    fix = "Use a server or an endpoint that passes prompts on unchanged."
    if any(probe.form == IN_TEMPLATE for probe in probes):
        return [Finding(FAULT, "It wraps prompts in the chat template.", fix)]
    added = {probe.num_added for probe in probes if not probe.is_refused}
    if reading.status == UNDECIDED and len(added) == 1 and (num_added := added.pop()):
        return [Finding(FAULT, f"It adds {num_added} tokens to each prompt, as a template does.", fix)]
    return []


def _judge_length(checkpoint: Checkpoint, server: Server, probes: Sequence[Probe]) -> list[Finding]:
    """Return the finding on a server that cuts or refuses prompts within the context length, if it does."""
    length = model_config(checkpoint.config).rotary.context_length
    flag = _LENGTH_FLAGS.get(server.name)
    fix = f"Start it with {flag.format(length)}." if flag else f"Raise its context length to {length:,} tokens."
    cuts = [cut for probe in probes if (cut := find_cut(probe)) is not None]
    if cuts:
        return [Finding(FAULT, f"It silently cuts prompts to their last {min(cuts):,} tokens.", fix)]
    refused = [probe for probe in probes if probe.is_refused]
    if refused:
        limit = min(probe.limit for probe in refused)
        size = f"more than {limit:,}" if limit else f"{len(refused[0].ids):,}"
        return [Finding(FAULT, f"It refuses prompts of {size} tokens.", fix)]
    return []


def _describe_fix(checkpoint: Checkpoint, server: Server) -> str:
    """Return how to serve the schedule: the engine's own flags, or the converted files."""
    model = model_config(checkpoint.config)
    serving = serving_of(model)
    lines = source_commands(str(provenance(checkpoint.config).get("source") or "SOURCE"), model, serving)
    row = next((row for row in serving if row.engine == server.name), None)
    if row is not None and row.status == WRONG:
        return f"{row.engine} cannot serve it: {row.remark}."
    if server.name in lines:
        return f"Start it with the schedule: {lines[server.name]}"
    return (
        f'Serve "{checkpoint.name}" itself with a version that reads its schedule; `ctxext inspect` lists the engines.'
    )
