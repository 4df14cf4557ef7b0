"""The verdict on a server: the reading of the checkpoint that fits its answers, and the setting that fixes a fault."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.engine_support import WRONG, serving_of, source_commands
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.model_config import model_config
from ctxext.served.probes import IN_TEMPLATE, Probe
from ctxext.served.readings import CONVERTED, CUT
from ctxext.server.client import Server

SERVED, FAULT, UNDECIDED = "as converted", "fault", "cannot be decided"

_CLEAR = 3.0
"""Standard errors by which the server must be nearer to one reading than to another."""

_LEAST = 0.03
"""Smallest mean difference between two readings in nats that is more than rounding to 16 bits."""

_MOST_OFF = 0.5
"""Largest mean difference in nats of a reading that fits; 4-bit weights differ by less."""

_LENGTH_FLAGS = {
    "vLLM": "--max-model-len {}",
    "SGLang": "--context-length {}",
    "llama.cpp": "-c {} (for each slot: times --parallel)",
    "Ollama": "OLLAMA_CONTEXT_LENGTH={}",
}
"""The setting of the context length of each server."""

_TEMPLATE_FLAGS = {
    "vLLM": "--chat-template FILE",
    "SGLang": "--chat-template FILE",
    "llama.cpp": "--jinja --chat-template-file FILE",
    "Ollama": "TEMPLATE in its Modelfile",
    "LM Studio": "the prompt template in the settings of the model",
    "TGI": "--tokenizer-config-path FILE",
}
"""The setting of the chat template of each server."""

_NO_LOGPROBS = {
    "TGI": "Start TGI with --max-top-n-tokens 5 or more.",
    "Ollama": "Use Ollama 0.12.11 or later, which returns log-probabilities in chat.",
    "LM Studio": "LM Studio returns no log-probabilities; serve the same file with llama-server.",
}
"""How to get log-probabilities from a server with chat answers that may lack them."""

_WRAP_COMPLETIONS = ("Ollama",)
"""Servers with completions that wrap a text in the chat template by design, which is no fault."""

_HAVE_COMPLETIONS = ("vLLM", "SGLang", "llama.cpp")
"""Servers with completions that continue text and return log-probabilities."""


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
        probes: A row for each prompt: place, tokens, tokens read, whether it was refused, whether it got no token, and
            differences by reading.
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
    reading = _judge_chat(server, probes) or _judge_reading(checkpoint, server, probes, is_sampled=is_sampled)
    is_chat = server.is_chat or server.name in _WRAP_COMPLETIONS
    if is_chat and reading.status == UNDECIDED and not reading.fix:
        reading = dataclasses.replace(reading, fix=_describe_chat(server, probes))
    findings = [
        *([] if is_chat else _judge_template(probes, reading)),
        *_judge_length(checkpoint, server, probes),
        *_judge_silence(checkpoint, server, probes),
        reading,
    ]
    faults = [finding for finding in findings if finding.status == FAULT]
    # Serving the schedule also sets the length.
    fixes = [finding.fix for finding in [*reversed(faults), reading] if finding.fix]
    rows = [
        {
            "place": probe.place,
            "tokens": len(probe.ids),
            "read": probe.read,
            "refused": probe.is_refused,
            "silent": probe.is_silent,
            "differences": {
                name: mean for name in _list_names([probe]) if math.isfinite(mean := _compute_mean([probe], name))
            },
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


def _judge_chat(server: Server, probes: Sequence[Probe]) -> Finding | None:
    """Return the finding on a server with another chat template than the checkpoint; None without a difference."""
    added = next((probe.num_added for probe in probes if probe.is_answered and not probe.is_cut), 0)
    if not server.is_chat or not added:
        return None
    size = f"{abs(added)} tokens {'more' if added > 0 else 'less'}"
    setting = _TEMPLATE_FLAGS.get(server.name)
    same = f"Set the template of the checkpoint with {setting}" if setting else "Serve the template of the checkpoint"
    fix = f"{same}, or add that of the server to the checkpoint as chat_template.jinja."
    return Finding(UNDECIDED, f"Its chat template has {size} than that of the checkpoint.", fix)


def _describe_chat(server: Server, probes: Sequence[Probe]) -> str:
    """Return how to compare a server that chat completions do not decide."""
    if not _has_numbers(probes) and server.name in _NO_LOGPROBS:
        return _NO_LOGPROBS[server.name]
    if server.name in _HAVE_COMPLETIONS:
        return f"Give the address of {server.name} itself, which also has /v1/completions, instead of that of a proxy."
    return "Use a server with log-probabilities, or with /v1/completions that continues text."


def _judge_reading(checkpoint: Checkpoint, server: Server, probes: Sequence[Probe], *, is_sampled: bool) -> Finding:
    """Return the reading that fits the prompts that were not cut, or the reason why none can be chosen."""
    whole = _list_whole(probes)
    if not whole:
        return Finding(UNDECIDED, "It returns no tokens that can be compared.")
    if is_sampled:
        fix = "Start the server without a default temperature."
        return Finding(UNDECIDED, "Sampling cannot be disabled: temperature 0 has no effect.", fix)
    best, rivals = _compare_readings(whole)
    if off := _find_misfit(whole, best):
        size = "" if off is whole[0] else f" at {len(off.ids):,} tokens"
        text = f"It fits no reading of the checkpoint{size} (nearest: {best}, {_compute_mean([off], best):.2g} nats)."
        fix = "Check that it serves these weights with this tokenizer, and in 4 bits or more."
        return Finding(UNDECIDED, text, fix)
    if rivals:
        is_equal = all(_measure_distance(whole, best, name) < _LEAST for name in rivals)
        if not _has_numbers(probes):
            reason = "Generated text without log-probabilities does not distinguish them."
        else:
            reason = "They are equal on these prompts." if is_equal else "Its numerical noise hides the difference."
        return Finding(UNDECIDED, f"It serves {', '.join([best, *rivals[:-1]])} or {rivals[-1]}. {reason}")
    if best != CONVERTED:
        return Finding(FAULT, f"It serves {best}.", _describe_fix(checkpoint, server))
    missing = [probe for probe in probes if not probe.errors and not probe.is_refused and not probe.is_silent]
    if missing:
        known = max(len(probe.ids) for probe in whole)
        text = (
            f"It serves the checkpoint as converted up to {known:,} tokens; {_list_sizes(missing)} were not compared."
        )
        return Finding(UNDECIDED, text)
    return Finding(SERVED, "It serves the checkpoint as converted.")


def _has_numbers(probes: Sequence[Probe]) -> bool:
    """Return whether the server returned log-probabilities."""
    return any(probe.evidence and probe.evidence.numbers for probe in probes)


def is_settled(probes: Sequence[Probe]) -> bool:
    """Return whether one reading is clearly nearest to the server, and fits all prompts that were computed."""
    whole = _list_whole(probes)
    if not whole:
        return True
    best, rivals = _compare_readings(whole)
    return not rivals and _find_misfit(whole, best) is None


def _list_whole(probes: Sequence[Probe]) -> list[Probe]:
    """Return the computed prompts that the server did not cut."""
    return [probe for probe in probes if probe.errors and find_cut(probe) is None]


def _list_names(probes: Sequence[Probe]) -> list[str]:
    """Return all readings that were computed, the right one first."""
    names = dict.fromkeys(name for probe in probes for name in probe.errors)
    return sorted(names, key=lambda name: name != CONVERTED)


def _compare_readings(probes: Sequence[Probe]) -> tuple[str, list[str]]:
    """Return the reading nearest to the server, and those that are not clearly farther from it."""
    names = [name for name in _list_names(probes) if not name.startswith(CUT)]
    best = names[0]
    for name in names[1:]:
        shared = [probe for probe in probes if {name, best} <= probe.errors.keys()]
        if _compute_mean(shared, name) < _compute_mean(shared, best):
            best = name
    return best, [name for name in names if name != best and not _is_clear(probes, best, name)]


def _find_misfit(probes: Sequence[Probe], reading: str) -> Probe | None:
    """Return the first prompt from which a reading is too far to fit."""
    computed = (probe for probe in probes if reading in probe.errors)
    return next((probe for probe in computed if _compute_mean([probe], reading) > _MOST_OFF), None)


def _is_clear(probes: Sequence[Probe], one: str, other: str) -> bool:
    """Return whether the server is clearly nearer to one reading than to another.

    On the line from the one (0) to the other (1), the least-squares place of the server must be below the middle by
    several standard errors, which are robust against noise that is correlated within a generated token.
    """
    rows = _pair_errors(probes, one, other)
    total = sum(move**2 for row in rows for _, move in row)
    if len(rows) < 2 or not total or _measure_distance(probes, one, other) < _LEAST:
        return False
    place = sum(error * move for row in rows for error, move in row) / total
    scores = [sum(move * (error - place * move) for error, move in row) for row in rows]
    variance = sum(score**2 for score in scores) * len(rows) / (len(rows) - 1) / total**2
    return place + _CLEAR * math.sqrt(variance) < 0.5


def _pair_errors(probes: Sequence[Probe], one: str, other: str) -> list[list[tuple[float, float]]]:
    """Return the errors of a reading and its differences from another reading, by generated token."""
    shared = [probe.errors for probe in probes if {one, other} <= probe.errors.keys()]
    pairs = [pair for errors in shared for pair in zip(errors[one], errors[other], strict=True)]
    return [[(a, a - b) for a, b in zip(first, second, strict=True)] for first, second in pairs if first]


def _measure_distance(probes: Sequence[Probe], one: str, other: str) -> float:
    """Return the mean difference between two readings in nats."""
    distances = [abs(move) for row in _pair_errors(probes, one, other) for _, move in row]
    return sum(distances) / len(distances) if distances else math.inf


def _compute_mean(probes: Sequence[Probe], reading: str) -> float:
    """Return the mean absolute error of a reading in nats; infinity if it has none or is not finite."""
    errors = [abs(error) for probe in probes for row in probe.errors[reading] for error in row]
    mean = sum(errors) / len(errors) if errors else math.inf
    return mean if math.isfinite(mean) else math.inf


def _list_sizes(probes: Sequence[Probe]) -> str:
    """Return the lengths of some prompts."""
    *first, last = (f"{len(probe.ids):,}" for probe in probes)
    return f"{', '.join(first)} and {last} tokens" if first else f"{last} tokens"


def find_cut(probe: Probe) -> int | None:
    """Return the length to which the server cut a prompt, in tokens; None if it read all of it."""
    if probe.is_cut:
        return probe.read
    return _find_last(probe)


def _find_last(probe: Probe) -> int | None:
    """Return the number of last tokens of a prompt that the server read, if its answer shows that it read no others."""
    best = min(probe.errors, key=lambda name: _compute_mean([probe], name), default="")
    is_cut = best.startswith(CUT) and _is_clear([probe], best, CONVERTED)
    return int(best.removeprefix(CUT)) if is_cut else None


def _judge_template(probes: Sequence[Probe], reading: Finding) -> list[Finding]:
    """Return the finding on a server that adds text to prompts, if it does."""
    fix = "Use a server or an endpoint that passes prompts on unchanged."
    if any(probe.form == IN_TEMPLATE for probe in probes):
        return [Finding(FAULT, "It wraps prompts in the chat template.", fix)]
    added = {max(probe.num_added, 0) for probe in probes if probe.is_answered}
    if reading.status == UNDECIDED and len(added) == 1 and (num_added := added.pop()):
        return [Finding(FAULT, f"It adds {num_added} tokens to each prompt, as a template does.", fix)]
    return []


def _judge_length(checkpoint: Checkpoint, server: Server, probes: Sequence[Probe]) -> list[Finding]:
    """Return the finding on a server that cuts or refuses prompts within the context length, if it does."""
    fix = _describe_length(checkpoint, server)
    last = [cut for probe in probes if (cut := _find_last(probe)) is not None]
    if last:
        return [Finding(FAULT, f"It silently cuts prompts to their last {min(last):,} tokens.", fix)]
    if counted := [probe for probe in probes if probe.is_cut]:
        text = f"It silently reads only {counted[0].read:,} of {len(counted[0].ids):,} tokens of a prompt."
        return [Finding(FAULT, text, fix)]
    refused = [probe for probe in probes if probe.is_refused]
    if refused:
        limit = min(probe.limit for probe in refused)
        size = f"more than {limit:,}" if limit else f"{len(refused[0].ids):,}"
        return [Finding(FAULT, f"It refuses prompts of {size} tokens.", fix)]
    return []


def _judge_silence(checkpoint: Checkpoint, server: Server, probes: Sequence[Probe]) -> list[Finding]:
    """Return the finding on a server that generates nothing, if it does."""
    silent = [probe for probe in probes if probe.is_silent]
    if not silent:
        return []
    text = f"It generates no token after prompts of {_list_sizes(silent)}."
    return [Finding(FAULT, text, _describe_length(checkpoint, server))]


def _describe_length(checkpoint: Checkpoint, server: Server) -> str:
    """Return how to serve the whole context."""
    length, flag = model_config(checkpoint.config).rotary.usable_length, _LENGTH_FLAGS.get(server.name)
    return f"Start it with {flag.format(length)}." if flag else f"Raise its context length to {length:,} tokens."


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
