"""Find out how a running server reads a checkpoint: as converted, or with one of the usual faults.

The server continues prompts inside the original context length, just beyond it, at twice its length and near the end.
Its log-probabilities are compared with those of transformers under several readings of config.json: the right one, and
those of engines that ignore the schedule, its base or its temperature, read it as linear, or cut the prompt.
"""

import time
from collections.abc import Sequence

from ctxext.checkpoint.head import Head
from ctxext.checkpoint.loading import explain_loading_errors
from ctxext.checkpoint.opening import Checkpoint
from ctxext.data.encoding import Encoder, open_tokenizer
from ctxext.engines.server import Server
from ctxext.engines.server_probes import TOKENS, Probe, Vocabulary, probes_of, send_probe
from ctxext.engines.server_readings import CONVERTED, CUT, list_cuts, load_reading, measure_difference, readings_of
from ctxext.engines.server_verdict import ServerReport, judge
from ctxext.files.content import Progress
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.encodings.rotary import ModelConfig, model_config


def check_server(
    checkpoint: Checkpoint,
    server: Server,
    *,
    trust_remote_code: bool = False,
    minutes: float = 10,
    progress: Progress | None = None,
) -> ServerReport:
    """Compare a server with transformers on the checkpoint that it should serve.

    Args:
        checkpoint: The converted checkpoint.
        server: The server.
        trust_remote_code: Run modeling code that this version did not write.
        minutes: Time limit. Long prompts that would exceed it are omitted; the shortest one never is.
        progress: Called with the name of a stage, the work done and the total work.

    Raises:
        CtxextError: The checkpoint is not extended, or the server fails.
    """
    end, progress = time.monotonic() + 60 * minutes, progress or (lambda label, done, total: None)
    readings = readings_of(checkpoint)
    foreign = trust_remote_code and not runs_only_own_code(checkpoint)
    with (
        stage_checkpoint(checkpoint, foreign=foreign) as stage,
        explain_loading_errors("The tokenizer cannot be loaded"),
    ):
        encoder = Encoder(open_tokenizer(stage.folder, trust_remote_code=stage.trust_tokenizer))
    probes, vocabulary = probes_of(checkpoint, encoder), Vocabulary(encoder.tokenizer)
    sent: list[Probe] = []
    for number, probe in enumerate(probes):
        if number and time.monotonic() > end:
            break
        progress(f"sending {len(probe.ids):,} tokens", number, len(probes))
        send_probe(server, probe, encoder, vocabulary)
        sent.append(probe)
    is_sampled = _is_sampled(server, sent[0])
    computed = [probe for probe in sent if probe.evidence is not None]
    for number, (name, config) in enumerate(readings.items()):
        progress(f"computing {name}", number, len(readings))
        with load_reading(checkpoint, config, foreign=foreign) as head:
            if name == CONVERTED:
                seconds = (end - time.monotonic()) / len(readings)
                computed = _compute_converted(head, computed, model_config(checkpoint.config), seconds)
            else:
                for probe in computed:
                    probe.differences[name] = measure_difference(head, probe)
    progress("done", 1, 1)
    notes = [f"The server reads a prompt of {len(probe.ids):,} tokens {probe.form}." for probe in sent if probe.form]
    late = [probe for probe in sent if probe.evidence and not probe.differences] + probes[len(sent) :]
    if late:
        size = f"{len(late[0].ids):,} tokens or more"
        notes.append(f"{minutes:g} minutes do not suffice for prompts of {size}; raise --minutes.")
    return judge(checkpoint, server, sent, notes, is_sampled=is_sampled)


def _compute_converted(head: Head, probes: Sequence[Probe], model: ModelConfig, seconds: float) -> list[Probe]:
    """Measure the differences from the right reading, and from that of cut prompts.

    Args:
        head: The checkpoint.
        probes: The prompts, the shortest first.
        model: Its configuration.
        seconds: Time limit.

    Returns:
        The prompts that do not exceed the limit; the shortest one always.
    """
    began, last = time.monotonic(), 0.0
    for at, probe in enumerate(probes):
        now = time.monotonic()
        # The time grows at most quadratically.
        if at and now - began + last * (len(probe.ids) / len(probes[at - 1].ids)) ** 2 > seconds:
            return list(probes[:at])
        probe.differences[CONVERTED] = measure_difference(head, probe)
        last = time.monotonic() - now
        for length in list_cuts(probe, model.rotary.trained_length):
            probe.differences[f"{CUT} {length}"] = measure_difference(head, probe, last=length)
    return list(probes)


def _is_sampled(server: Server, probe: Probe) -> bool:
    """Return whether the same request at temperature 0 has two answers, of a server without log-probabilities."""
    if probe.evidence is None or probe.evidence.numbers:  # Log-probabilities can be compared for any tokens.
        return False
    answers = {server.complete(probe.ids, probe.text, max_tokens=TOKENS).text for _ in range(2)}
    return len(answers) > 1
