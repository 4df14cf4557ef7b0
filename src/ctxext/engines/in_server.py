"""Find out how a running server reads a checkpoint: as converted, or with one of the usual faults.

Some prompts inside the original context length, just beyond it, at twice its length and near the end are continued by
the server. Its log-probabilities are compared with those of transformers under several readings of config.json: the
right one, and those of engines that ignore the schedule, its base or its temperature, read it as linear, or cut the
prompt.
"""

import dataclasses
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.head import Head
from ctxext.checkpoint.loading import choose_device, explain_loading_errors, load_checkpoint
from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.engines import WRONG, serving_of, source_commands
from ctxext.data import prose
from ctxext.data.encoding import Encoder, open_tokenizer, tokenize
from ctxext.engines.server import Completion, Server, ServerError, exceeded_length
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.encodings.rotary import ModelConfig, attention_scaling, model_config
from ctxext.recipes.recipe import plain_config

if TYPE_CHECKING:
    import torch

SERVED, FAULT, UNDECIDED = "as converted", "fault", "cannot be decided"

CONVERTED = "the checkpoint as converted"
UNMODIFIED = "the unmodified model"
_NO_THETA = "the schedule without rope_theta"
_NO_TEMPERATURE = "the schedule without its attention temperature"
_LINEAR = "a linear schedule"

CUT = "the last tokens only:"
_TEMPLATE = "in the chat template"

_USUAL_THETA = 10_000.0
_TOKENS = 16
"""Tokens that the server generates for each prompt, all of them compared."""

_CLEAR = 3.0
"""A reading fits if its difference is this many times smaller than that of every other reading."""

_MOST_OFF = 0.5
"""Largest mean difference in nats of a reading that fits; 4-bit weights differ by less."""

_SAME = 1e-3
"""Mean difference in nats below which two readings are the same on these prompts."""


@dataclass
class Probe:
    """A prompt, and what the server made of it.

    Attributes:
        place: "inside", "just beyond", "at twice", or "near the end" of the original context length.
        ids: The tokens of the prompt as the server should read them.
        text: The prompt as text.
        answer: The continuation; None if the server refused the length.
        limit: The largest length that the server accepts, in tokens, if it refused; 0 if unknown.
        read: The tokens that the server read, by its own count; None if it counts none.
        values: Log-probabilities in transformers, by reading.
        differences: Mean difference of log-probabilities from the server in nats, by reading.
    """

    place: str
    ids: list[int]
    text: str
    answer: Completion | None = None
    limit: int | None = None
    read: int | None = None
    values: dict[str, Any] = field(default_factory=dict, repr=False)
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def cut(self) -> int | None:
        """The length to which the server cut the prompt, in tokens; None if it read all of it."""
        name, difference = min(self.differences.items(), key=lambda item: _order(item[1]), default=("", math.nan))
        fits = difference * _CLEAR <= self.differences.get(CONVERTED, 0)
        return int(name.removeprefix(CUT)) if name.startswith(CUT) and fits else None


@dataclass(frozen=True)
class ServerReport:
    """The result of a check.

    Attributes:
        server: Name and version of the server.
        model: The model's name on the server.
        status: "as converted", "fault" or "cannot be decided".
        verdict: One sentence.
        fix: What to do; empty if nothing.
        basis: "log-probabilities" or "generated text".
        probes: A row for each prompt: place, tokens, tokens read, and differences by reading.
        notes: Further findings.
    """

    server: str
    model: str
    status: str
    verdict: str
    fix: str
    basis: str
    probes: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()


def readings_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Return the configurations of all readings that differ from each other, by name; the right one is first.

    Raises:
        CtxextError: The checkpoint has no rotary embeddings, or no reading differs from the unmodified model.
    """
    model = model_config(checkpoint.config)
    rotary, plain = model.rotary, plain_config(model)
    if not model.is_extended:
        raise CtxextError(
            f'"{checkpoint.name}" is not extended, so a server cannot read it wrongly in these ways.',
            hint="Give the converted checkpoint that the server should serve.",
        )

    def edited(**changes: Any) -> ModelConfig:
        return model.with_encoding(dataclasses.replace(rotary, **changes))

    others = {UNMODIFIED: plain}
    if rotary.theta != _USUAL_THETA:
        others[_NO_THETA] = edited(theta=_USUAL_THETA)
    if attention_scaling(rotary) != 1:
        numbers = {key: value for key, value in rotary.parameters.items() if not key.startswith("mscale")}
        others[_NO_TEMPERATURE] = edited(parameters={**numbers, "attention_factor": 1.0})
    if rotary.rope_type not in ("default", "linear") and not model.code:
        factor = rotary.context_length / rotary.trained_length
        others[_LINEAR] = edited(parameters={"rope_type": "linear", "factor": factor})
    return {CONVERTED: dict(model.config), **{name: dict(other.config) for name, other in others.items()}}


def probes_of(checkpoint: Checkpoint, encoder: Encoder, *, longest: int | None = None) -> list[Probe]:
    """Return the prompts, the shortest first: each ends in the beginning of a sentence that its text contains."""
    rotary = model_config(checkpoint.config).rotary
    trained, reach = rotary.trained_length, rotary.context_length
    reach = min(reach, longest) if longest else reach
    wanted = {
        "inside": min(trained // 2, 1024),
        "just beyond": trained + max(trained // 8, 2 * _TOKENS),
        "at twice": 2 * trained,
        "near the end": reach - _TOKENS - 8,
    }
    probes: list[Probe] = []
    for place, length in wanted.items():
        if 4 * _TOKENS <= length <= reach - _TOKENS and (not probes or length > len(probes[-1].ids)):
            probes.append(_probe(place, length, encoder))
    return probes


def _probe(place: str, length: int, encoder: Encoder) -> Probe:
    """Return a prompt of at most `length` tokens."""
    rng = random.Random(length)
    stream, texts, size = prose.sentences(rng), [], 0
    while size < length:
        block = [next(stream) for _ in range(64)]
        texts += block
        size += len(tokenize(encoder.tokenizer, " ".join(block), add_special_tokens=False))
    words = texts[2].split()
    tail = " ".join(words[: max(len(words) // 2, 1)])
    while True:
        text = " ".join([*texts, tail])
        ids = tokenize(encoder.tokenizer, text)
        if len(ids) <= length or len(texts) <= 3:
            return Probe(place, list(ids), text)
        # Sentences have about ten tokens, so the last steps remove one at a time.
        texts = texts[: -max(1, (len(ids) - length) // 32)]


@dataclass(frozen=True)
class Evidence:
    """The continuation of one prompt, as token ids.

    Attributes:
        chosen: The generated tokens.
        numbers: For each of them, the server's log-probabilities in nats by token; empty without log-probabilities.
    """

    chosen: list[int]
    numbers: list[dict[int, float]]


class Vocabulary:
    """The ids of tokens by their text, for servers that return no ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def _by_text(self) -> dict[str, int | None]:
        ids = list(range(len(self.tokenizer)))
        pieces = self.tokenizer.convert_ids_to_tokens(ids)
        texts = [
            piece.replace("\u2581", " ") if "\u2581" in piece else self.tokenizer.decode([at])
            for at, piece in zip(ids, pieces, strict=True)
        ]
        by_text: dict[str, int | None] = {}
        for at, text in zip(ids, texts, strict=True):
            by_text[text] = None if text in by_text else at  # Parts of characters share one text.
        return by_text

    def id_of(self, key: int | str) -> int | None:
        """Return the id of a token; None if several have its text."""
        return key if isinstance(key, int) else self._by_text.get(key)

    def evidence(self, probe: Probe) -> Evidence:
        """Return the continuation of a prompt up to the first token without a known id."""
        assert probe.answer is not None
        if not probe.answer.tokens:
            whole = tokenize(self.tokenizer, probe.text + probe.answer.text)
            shared = whole[: len(probe.ids)] == probe.ids
            alone = tokenize(self.tokenizer, probe.answer.text, add_special_tokens=False)
            return Evidence(list(whole[len(probe.ids) :] if shared else alone)[:_TOKENS], [])
        chosen, numbers = [], []
        for token in probe.answer.tokens:
            if (at := self.id_of(token.key)) is None:
                break
            known = {self.id_of(key): value for key, value in token.alternatives.items()}
            numbers.append({key: value for key, value in known.items() if key is not None and math.isfinite(value)})
            chosen.append(at)
        # mlx_lm.server reports any of the alternatives as the generated token; its text is right.
        if self.tokenizer.decode(chosen).strip() != (text := probe.answer.text.strip()):
            by_text = self._along(text, numbers)
            chosen = by_text or chosen
        return Evidence(chosen, numbers[: len(chosen)])

    def _along(self, text: str, numbers: Sequence[Mapping[int, float]]) -> list[int]:
        """Return the most probable tokens that form the beginning of a text."""
        chosen: list[int] = []
        for known in numbers:
            for token in sorted(known, key=lambda key: -known[key]):
                if text.startswith(self.tokenizer.decode([*chosen, token]).strip()):
                    chosen.append(token)
                    break
            else:
                break
        return chosen


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
        minutes: Prompts that would begin later are left out.
        progress: Called with the name of a stage, the work done and in total.

    Raises:
        CtxextError: The checkpoint is not extended, or the server fails.
    """
    end = time.monotonic() + 60 * minutes
    readings = readings_of(checkpoint)
    foreign = trust_remote_code and not runs_only_own_code(checkpoint)
    with (
        stage_checkpoint(checkpoint, foreign=foreign) as stage,
        explain_loading_errors("The tokenizer cannot be loaded"),
    ):
        encoder = Encoder(open_tokenizer(stage.folder, trust_remote_code=stage.trust_tokenizer))
    probes, notes = probes_of(checkpoint, encoder), list[str]()
    for number, probe in enumerate(probes):
        if number and time.monotonic() > end:
            notes.append(f"The time of {minutes:g} minutes ended before prompts of {len(probe.ids):,} tokens.")
            probes = probes[:number]
            break
        _begin(progress, f"sending {len(probe.ids):,} tokens", number, len(probes))
        _ask(server, probe)
    if _is_sampled(server, probes[0]):
        notes.append("The server samples: the same request at temperature 0 has two answers.")
    notes += [note for probe in probes if (note := _align(probe, encoder, server))]
    vocabulary = Vocabulary(encoder.tokenizer)
    answered = {at: vocabulary.evidence(probe) for at, probe in enumerate(probes) if probe.answer is not None}
    trained = model_config(checkpoint.config).rotary.trained_length
    for number, (name, config) in enumerate(readings.items()):
        _begin(progress, f"computing {name}", number, len(readings))
        with _loaded(checkpoint, config, foreign=foreign) as head:
            for at, evidence in answered.items():
                probe = probes[at]
                if number and time.monotonic() > end and len(probe.ids) > trained:
                    continue
                probe.values[name] = _values(head, probe.ids, evidence)
                for length in _cuts(probe, trained) if name == CONVERTED else ():
                    probe.values[f"{CUT} {length}"] = _values(head, probe.ids[-length:], evidence)
    _begin(progress, "done", 1, 1)
    for at, evidence in answered.items():
        probes[at].differences = {name: _difference(values, evidence) for name, values in probes[at].values.items()}
    return _judge(checkpoint, server, probes, notes)


def _begin(progress: Progress | None, stage: str, done: int, total: int) -> None:
    if progress is not None:
        progress(stage, done, total)


def _ask(server: Server, probe: Probe) -> None:
    try:
        probe.answer = server.complete(probe.ids, probe.text, max_tokens=_TOKENS)
        probe.read = probe.answer.prompt_tokens
    except ServerError as error:
        limit = exceeded_length(error, len(probe.ids))
        if limit is None:
            raise
        probe.limit = limit


def _is_sampled(server: Server, probe: Probe) -> bool:
    if probe.answer is None or probe.answer.tokens:  # Log-probabilities can be compared for any tokens.
        return False
    again = server.complete(probe.ids, probe.text, max_tokens=_TOKENS)
    return again.text != probe.answer.text


def _align(probe: Probe, encoder: Encoder, server: Server) -> str:
    """Replace the tokens of a prompt by those that the server read, as far as its count shows them; return a note."""
    if server.takes_ids or (probe.read is None and not server.is_chat):
        return ""
    bare = tokenize(encoder.tokenizer, probe.text, add_special_tokens=False)
    forms = {"": probe.ids, "without special tokens": bare}
    if start := probe.ids[: len(probe.ids) - len(bare)]:
        forms["with the special tokens twice"] = [*start, *probe.ids]
    if encoder.uses_chat:
        rendered = encoder.tokenizer.apply_chat_template(
            [{"role": "user", "content": probe.text}], add_generation_prompt=True, tokenize=False
        )
        forms[_TEMPLATE] = tokenize(encoder.tokenizer, rendered, add_special_tokens=False)
    if server.is_chat:
        probe.ids = list(forms.get(_TEMPLATE, probe.ids))
        return ""
    form = next((form for form, ids in forms.items() if len(ids) == probe.read), "")
    probe.ids = list(forms[form])
    return f"The server reads a prompt of {len(probe.ids):,} tokens {form}." if form else ""


def _cuts(probe: Probe, trained: int) -> list[int]:
    """Return the lengths to which the server may have cut a prompt silently, in tokens."""
    if probe.read is not None:
        return [probe.read] if 0 < probe.read < len(probe.ids) else []
    return [trained] if len(probe.ids) > trained else []


@contextmanager
def _loaded(checkpoint: Checkpoint, config: dict[str, Any], *, foreign: bool) -> "Iterator[Head]":
    """Load the checkpoint's weights under another configuration, in float32."""
    reading = dataclasses.replace(checkpoint, config=config)
    with stage_checkpoint(reading, foreign=foreign and config == checkpoint.config) as stage:
        model = load_checkpoint(reading, stage.folder, trust=stage.trust, dtype="fp32", device=choose_device("auto"))
        yield Head(model)


def _values(head: Head, ids: Sequence[int], evidence: Evidence) -> "torch.Tensor":
    """Return the log-probabilities, (generated tokens, vocabulary), of each token after the prompt."""
    import torch

    device = next(head.model.parameters()).device
    count = len(evidence.chosen)
    tokens = torch.tensor([[*ids, *evidence.chosen[:-1]]], device=device)
    with torch.inference_mode():
        hidden = head.read(tokens)[:, -count:]
        return head(hidden, tokens[:, -count:])[0].float().log_softmax(-1).cpu()


def _difference(values: "torch.Tensor", evidence: Evidence) -> float:
    """Return the mean difference from the server in nats.

    Without log-probabilities, it is the mean difference of each generated token from the most probable one.
    """
    if not evidence.chosen:
        return math.nan
    if not evidence.numbers:
        rows = range(len(evidence.chosen))
        return float((values.amax(-1) - values[rows, evidence.chosen]).mean())
    pairs = [
        abs(number - float(values[at, token]))
        for at, numbers in enumerate(evidence.numbers)
        for token, number in numbers.items()
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


def _order(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _mean(probes: Sequence[Probe], reading: str) -> float:
    numbers = [probe.differences[reading] for probe in probes if reading in probe.differences]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _are_distinct(probes: Sequence[Probe], one: str, other: str) -> bool:
    """Return whether two readings give different log-probabilities on these prompts."""
    both = [probe.values for probe in probes if one in probe.values and other in probe.values]
    gaps = [float((values[one].exp() - values[other].exp()).abs().sum(-1).mean()) for values in both]
    return bool(gaps) and max(gaps) > _SAME


def _judge(checkpoint: Checkpoint, server: Server, probes: Sequence[Probe], notes: Sequence[str]) -> ServerReport:
    """Return the verdict: the reading that fits, or why none can be chosen."""
    has_numbers = any(probe.answer and probe.answer.tokens for probe in probes)
    cuts = {probe.cut for probe in probes} - {None}
    refused = [probe for probe in probes if probe.limit is not None]
    whole = [probe for probe in probes if probe.answer is not None and probe.cut is None]
    names = [
        name for name in dict.fromkeys(name for probe in whole for name in probe.values) if not name.startswith(CUT)
    ]
    means = {name: _mean(whole, name) for name in names}
    best = min(means, key=lambda name: _order(means[name]), default="")
    rivals = [
        name
        for name in names
        if name != best and not _CLEAR * means[best] <= means[name] and (means[best] > 0 or means[name] == 0)
    ]
    basis = "log-probabilities" if has_numbers else "generated text"
    status, verdict, fix = UNDECIDED, "", ""
    if not whole:
        verdict = "It answers none of the prompts."
    elif math.isnan(means[best]):
        verdict = "It generates no tokens that can be compared."
    elif any("samples" in note for note in notes):
        verdict = "Sampling cannot be disabled: temperature 0 has no effect."
        fix = "Start the server without a sampling default, or name a model without one."
    elif means[best] > _MOST_OFF:
        verdict = f"It fits no reading of the checkpoint (nearest: {best}, {means[best]:.2g} nats)."
        fix = "Check that it serves these weights with this tokenizer, and in more than 4 bits."
    elif rivals:
        same = [name for name in rivals if not _are_distinct(whole, best, name)]
        reason = (
            "equal on the prompts that it answers" if same == rivals else "within its numerical noise of each other"
        )
        verdict = f"It serves {_listed([best, *rivals])}, which are {reason}."
    elif best != CONVERTED:
        status, verdict, fix = FAULT, f"It serves {best}.", _fix(checkpoint, server)
    else:
        status, verdict = SERVED, "It serves the checkpoint as converted."
    if cuts:
        length = min(cut for cut in cuts if cut is not None)
        status, fix = FAULT, _fix_length(checkpoint, server)
        verdict = f"It keeps only the last {length:,} tokens of a longer prompt. {verdict}"
    elif refused:
        limit = min(probe.limit or 0 for probe in refused)
        status, fix = FAULT, _fix_length(checkpoint, server) if best in (CONVERTED, "") or rivals else fix
        size = f"more than {limit:,}" if limit else f"{len(refused[0].ids):,}"
        verdict = f"It refuses prompts of {size} tokens. {verdict}"
    if any(_TEMPLATE in note for note in notes):
        status, fix = FAULT, "Use a server or an endpoint that passes prompts on unchanged."
        verdict = f"It wraps prompts in the chat template. {verdict}"
    rows = [
        {
            "place": probe.place,
            "tokens": len(probe.ids),
            "read": probe.read,
            "refused": probe.limit is not None,
            "differences": probe.differences,
        }
        for probe in probes
    ]
    return ServerReport(
        server.label, server.model, status, verdict, fix, basis, tuple(rows), tuple(dict.fromkeys(notes))
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _fix(checkpoint: Checkpoint, server: Server) -> str:
    """Return how to serve the schedule: the engine's own flags, or the converted files."""
    model = model_config(checkpoint.config)
    serving = serving_of(model)
    lines = source_commands(checkpoint.name, model, serving)
    row = next((row for row in serving if row.engine == server.name), None)
    if row is not None and row.status == WRONG:
        return f"{row.engine} cannot serve it: {row.remark}."
    if server.name in lines:
        return f"Start it with the schedule: {lines[server.name]}"
    return (
        f'Serve "{checkpoint.name}" itself with a version that reads its schedule; `ctxext inspect` lists the engines.'
    )


def _fix_length(checkpoint: Checkpoint, server: Server) -> str:
    length = model_config(checkpoint.config).rotary.context_length
    flag = _LENGTH_FLAGS.get(server.name)
    return f"Start it with {flag.format(length)}." if flag else f"Raise its context length to {length:,} tokens."


_LENGTH_FLAGS = {
    "vLLM": "--max-model-len {}",
    "SGLang": "--context-length {}",
    "llama.cpp": "-c {} (for each slot: times --parallel)",
    "Ollama": "OLLAMA_CONTEXT_LENGTH={}",
    "TGI": "--max-total-tokens {}",
}
"""The setting of the context length of each server."""
