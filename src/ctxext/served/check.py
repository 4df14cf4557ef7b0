"""Find out how a running server reads a checkpoint: as converted, or with one of the usual faults.

The server continues prompts inside the original context length, just beyond it, at twice its length and near the end.
Its log-probabilities are compared with those of transformers under several readings of config.json: the right one, and
those of engines that ignore the schedule, its base or its temperature, read it as linear, or cut the prompt.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ctxext.checkpoint.durations import cost_of, estimate_seconds
from ctxext.checkpoint.loading import explain_loading_errors
from ctxext.checkpoint.opening import Checkpoint
from ctxext.data.encoding import Encoder, open_tokenizer, tokenize
from ctxext.files.content import Progress
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.model_config import model_config
from ctxext.served.probes import IN_TEMPLATE, TOKENS, Probe, Vocabulary, probes_of, send_probe
from ctxext.served.readings import CONVERTED, CUT, list_cuts, load_reading, measure_errors, readings_of
from ctxext.served.verdict import ServerReport, is_settled, judge
from ctxext.server.client import Server, ServerError, ServerTimeout


def check_server(
    checkpoint: Checkpoint,
    server: Server,
    *,
    trust_remote_code: bool = False,
    minutes: float = 3,
    progress: Progress | None = None,
) -> ServerReport:
    """Compare a server with transformers on the checkpoint that it should serve.

    Args:
        checkpoint: The converted checkpoint.
        server: The server.
        trust_remote_code: Run modeling code that this version did not write.
        minutes: Time limit of the computation in transformers; the time of the server does not count. Long prompts
            that would exceed it are omitted; the shortest one never is.
        progress: Called with the name of a stage, the work done and the total work.

    Raises:
        CtxextError: The checkpoint is not extended, or the server fails.
    """
    progress = progress or (lambda label, done, total: None)
    readings = readings_of(checkpoint)
    foreign = trust_remote_code and not runs_only_own_code(checkpoint)
    with (
        stage_checkpoint(checkpoint, foreign=foreign) as stage,
        explain_loading_errors("The tokenizer cannot be loaded"),
    ):
        encoder = Encoder(open_tokenizer(stage.folder, trust_remote_code=stage.trust_tokenizer))
    probes, vocabulary = probes_of(checkpoint, encoder), Vocabulary(encoder.tokenizer)
    sent: list[Probe] = []
    notes: list[str] = []
    for number, probe in enumerate(probes):
        progress(f"sending {len(probe.ids):,} tokens", number, len(probes))
        try:
            send_probe(server, probe, encoder, vocabulary)
        except ServerTimeout:
            if not sent:
                raise
            size = f"{len(probe.ids):,} tokens"
            notes.append(
                f"The server did not answer a prompt of {size} within {server.timeout:g} seconds; raise --timeout."
            )
            break
        if not sent:
            probe = probes[0] = _send_as_messages(server, probe, encoder, vocabulary)
        sent.append(probe)
    is_sampled = _is_sampled(server, sent[0])
    _compute(checkpoint, readings, sent, 60 * minutes, progress, foreign=foreign)
    progress("done", 1, 1)
    notes += [f"The server reads a prompt of {len(probe.ids):,} tokens {probe.form}." for probe in sent if probe.form]
    late = [probe for probe in sent if probe.evidence and not probe.errors]
    if late:
        size = f"{len(late[0].ids):,} tokens or more"
        notes.append(f"{minutes:g} minutes do not suffice for prompts of {size}; raise --minutes.")
    return judge(checkpoint, server, probes, notes, is_sampled=is_sampled)


def _send_as_messages(server: Server, probe: Probe, encoder: Encoder, vocabulary: Vocabulary) -> Probe:
    """Return the first prompt with an answer that can be compared, if chat completions have a better one.

    The completions of some servers have no log-probabilities (TGI), or put prompts into the chat template (Ollama).
    """
    is_known = probe.form != IN_TEMPLATE and probe.evidence is not None and bool(probe.evidence.numbers)
    if is_known or server.is_chat or not encoder.uses_chat or not probe.is_answered:
        return probe
    server.use_completions(chat=True)
    other = Probe(probe.place, list(tokenize(encoder.tokenizer, probe.text)), probe.text)
    try:
        send_probe(server, other, encoder, vocabulary)
    except ServerError:
        other.evidence = None
    if other.evidence and other.evidence.numbers and not other.num_added:
        return other
    server.use_completions(chat=False)
    return probe


def _compute(
    checkpoint: Checkpoint,
    readings: Mapping[str, dict[str, Any]],
    sent: Sequence[Probe],
    seconds: float,
    progress: Progress,
    *,
    foreign: bool,
) -> None:
    """Measure the errors of every reading, within a time limit in seconds.

    Every reading reads the shortest prompt, and the checkpoint as converted also reads the longer ones. The others read
    those only until one reading is clear.
    """
    trained = model_config(checkpoint.config).rotary.trained_length
    probes = [probe for probe in sent if probe.evidence is not None]
    if not probes:
        return
    began, passes, done = time.monotonic(), list[tuple[int, float]](), 0
    cost = cost_of(checkpoint.config)
    others = [name for name in readings if name != CONVERTED]
    rounds = [(others, probes[:1], False), ([CONVERTED], probes, False), (others, probes[1:], True)]
    for names, given, stops in rounds:
        for name in names:
            if stops and is_settled(probes):
                return
            progress(f"computing {name}", done, len(readings) + len(others))
            done += 1
            with load_reading(checkpoint, readings[name], foreign=foreign) as head:
                for probe in given:
                    now = time.monotonic()
                    # The first passes are slower, so the fastest one counts.
                    estimates = (estimate_seconds([len(probe.ids)], measured, cost) for measured in passes)
                    if probe is not probes[0] and now - began + min(estimates) > seconds:
                        break
                    if stops and (CONVERTED not in probe.errors or is_settled(probes)):
                        break
                    probe.errors[name] = measure_errors(head, probe)
                    passes.append((len(probe.ids), time.monotonic() - now))
                    for length in list_cuts(probe, trained) if name == CONVERTED else ():
                        probe.errors[f"{CUT} {length}"] = measure_errors(head, probe, last=length)


def _is_sampled(server: Server, probe: Probe) -> bool:
    """Return whether the same request at temperature 0 has two answers, of a server without log-probabilities."""
    if probe.evidence is None or probe.evidence.numbers:  # Log-probabilities can be compared for any tokens.
        return False
    if not server.is_greedy:
        return True
    answers = {server.complete(probe.ids, probe.text, max_tokens=TOKENS).text for _ in range(2)}
    return len(answers) > 1
