"""The prompts that a server continues, its answers as token ids, and the prompts as the server reads them."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ctxext.checkpoint.opening import Checkpoint
from ctxext.data import prose
from ctxext.data.chat_template import render_chat
from ctxext.data.encoding import Encoder, tokenize
from ctxext.errors import CtxextError
from ctxext.recipes.model_config import model_config
from ctxext.server.client import Completion, Server, ServerError, find_limit

TOKENS = 16
"""Tokens that the server generates for each prompt; all of them are compared."""

AS_SENT, IN_TEMPLATE = "", "in the chat template"
"""Forms in which a server reads a prompt."""


@dataclass(frozen=True)
class Evidence:
    """The continuation of one prompt, as token ids.

    Attributes:
        chosen: The generated tokens.
        numbers: For each of them, the server's log-probabilities in nats by token; empty without log-probabilities.
    """

    chosen: list[int]
    numbers: list[dict[int, float]]


@dataclass
class Probe:
    """A prompt, and the answer of the server.

    Attributes:
        place: "inside", "just beyond", "at twice", or "near the end" of the original context length.
        ids: The tokens of the prompt as the server reads them.
        text: The prompt as text.
        is_refused: Whether the server refused its length.
        limit: The server's limit in tokens, if it refused; 0 if it is unknown.
        is_answered: Whether the server completed it.
        is_silent: Whether the answer has no token at all.
        read: The number of prompt tokens that the server reports; None if it reports none.
        is_cut: Whether that is less than the prompt.
        form: The form in which the server reads the prompt.
        num_added: Number of tokens that the server adds in an unknown form; negative if it reads fewer.
        evidence: The continuation; None without comparable tokens.
        errors: The server's log-probabilities minus those of a reading, for each generated token in nats, by reading.
    """

    place: str
    ids: list[int]
    text: str
    is_refused: bool = False
    limit: int = 0
    is_answered: bool = False
    is_silent: bool = False
    read: int | None = None
    is_cut: bool = False
    form: str = AS_SENT
    num_added: int = 0
    evidence: Evidence | None = None
    errors: dict[str, list[list[float]]] = field(default_factory=dict)


def probes_of(checkpoint: Checkpoint, encoder: Encoder) -> list[Probe]:
    """Return the prompts, the shortest first: each ends in the beginning of a sentence that its text contains.

    Raises:
        CtxextError: The context is too short for any.
    """
    rotary = model_config(checkpoint.config).rotary
    trained, reach = rotary.trained_length, rotary.usable_length
    # The server adds the chat template to some of them, and perhaps a begin token.
    room = TOKENS + 8 + (len(_render(encoder, "a")) if encoder.uses_chat else 0)
    lengths = {
        "inside": min(trained // 2, 1024),
        "just beyond": trained + max(trained // 8, 2 * TOKENS),
        "at twice": 2 * trained,
        "near the end": reach - room,
    }
    probes: list[Probe] = []
    for place, length in lengths.items():
        if 4 * TOKENS <= length <= reach - room and (not probes or length > len(probes[-1].ids)):
            probes.append(_make_probe(place, length, encoder))
    if not probes:
        raise CtxextError(f'The context of "{checkpoint.name}" is too short for a check: {reach} tokens.')
    return probes


def _make_probe(place: str, length: int, encoder: Encoder) -> Probe:
    """Return a prompt of at most `length` tokens."""
    rng = random.Random(length)
    stream, texts, size = prose.sentences(rng), list[str](), 0
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


def send_probe(server: Server, probe: Probe, encoder: Encoder, vocabulary: "Vocabulary") -> None:
    """Send a prompt, and record the answer or the refusal of its length.

    Raises:
        ServerError: The server refuses the prompt for another reason.
    """
    try:
        answer = server.complete(probe.ids, probe.text, max_tokens=TOKENS)
    except ServerError as error:
        limit = find_limit(error, len(probe.ids))
        if limit is None:
            raise
        probe.is_refused, probe.limit = True, limit or server.length or 0
        return
    probe.is_answered, probe.is_silent = True, answer.is_empty
    probe.read = server.measure_read(answer, probe.ids, probe.text, len(probe.ids))
    probe.is_cut = server.cuts(probe.read, len(probe.ids))
    _align(probe, encoder, is_chat=server.is_chat)
    evidence = vocabulary.read_evidence(probe, answer)
    is_comparable = any(evidence.numbers) if evidence.numbers else bool(evidence.chosen)
    is_unknown = server.is_chat and probe.num_added
    probe.evidence = evidence if is_comparable and not is_unknown else None


def _align(probe: Probe, encoder: Encoder, *, is_chat: bool) -> None:
    """Replace the tokens of a prompt by those that the server read, as far as its count shows them."""
    start = encoder.get_start_tokens()
    forms = [(AS_SENT, probe.ids), ("without begin tokens", probe.ids[len(start) :])]
    forms += [("with two sets of begin tokens", [*start, *probe.ids])]
    if encoder.uses_chat:
        turn = _render(encoder, probe.text)
        forms += [(IN_TEMPLATE, turn), (IN_TEMPLATE, [*start, *turn])]
    if is_chat and encoder.uses_chat:
        forms = forms[3:]
        probe.ids = forms[0][1]
    for form, ids in forms:
        if len(ids) == probe.read:
            probe.ids, probe.form = ids, AS_SENT if is_chat else form
            return
    probe.num_added = probe.read - len(probe.ids) if probe.read is not None else 0


def _render(encoder: Encoder, text: str) -> list[int]:
    """Return the tokens of a user's turn in the chat template."""
    turn = [{"role": "user", "content": text}]
    rendered = render_chat(encoder.tokenizer, turn, add_generation_prompt=True)
    return list(tokenize(encoder.tokenizer, rendered, add_special_tokens=False))


class Vocabulary:
    """The ids of tokens by their text, for servers that return no ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def _by_text(self) -> dict[str, int | None]:
        """The id of each text; None for a text of several tokens, such as parts of characters."""
        ids = list(range(len(self.tokenizer)))
        pieces = self.tokenizer.convert_ids_to_tokens(ids)
        by_text: dict[str, int | None] = {}
        for at, piece in zip(ids, pieces, strict=True):
            # Decoding one token removes the space that this character stands for.
            text = piece.replace("\u2581", " ") if "\u2581" in piece else self.tokenizer.decode([at])
            by_text[text] = None if text in by_text else at
        return by_text

    def id_of(self, key: int | str) -> int | None:
        """Return the id of a token; None if no token or several have its text."""
        return key if isinstance(key, int) else self._by_text.get(key)

    def read_evidence(self, probe: Probe, answer: Completion) -> Evidence:
        """Return the continuation of a prompt up to the first token without a known id."""
        if not answer.tokens:
            return Evidence(self._continue(probe, answer.text), [])
        chosen, numbers = [], []
        for token in answer.tokens:
            if (at := self.id_of(token.key)) is None:
                break
            known = {self.id_of(key): value for key, value in token.alternatives.items()}
            numbers.append({key: value for key, value in known.items() if key is not None and math.isfinite(value)})
            chosen.append(at)
        # mlx_lm.server reports any of the alternatives as the generated token; its text is right.
        if self.tokenizer.decode(chosen).strip() != (text := answer.text.strip()):
            chosen = self._follow(text, numbers) or chosen
        return Evidence(chosen, numbers[: len(chosen)])

    def _continue(self, probe: Probe, text: str) -> list[int]:
        """Return the tokens of a text after a prompt."""
        whole = tokenize(self.tokenizer, probe.text + text)
        sent = tokenize(self.tokenizer, probe.text)
        is_shared = whole[: len(sent)] == sent
        ids = whole[len(sent) :] if is_shared else tokenize(self.tokenizer, text, add_special_tokens=False)
        return list(ids)[:TOKENS]

    def _follow(self, text: str, numbers: Sequence[Mapping[int, float]]) -> list[int]:
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
