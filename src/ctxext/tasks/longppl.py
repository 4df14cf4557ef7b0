"""LongPPL, https://arxiv.org/abs/2410.23771: the loss on tokens that an evaluator predicts only from distant context.

The evaluator and the measured model may have different tokenizers, as key tokens are places in the text. A file with
these places replaces the evaluator in later runs.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ctxext.errors import CtxextError
from ctxext.tasks.base import DocumentPlan, Key, Record, Task, Work

if TYPE_CHECKING:
    from ctxext.data.encoding import Encoder
    from ctxext.models.model import LoadedModel

WINDOW, STEP = 4096, 1024
"""Minimum number of tokens of the short context, and tokens per short context: the defaults of the authors' code."""

_CHARACTERS_PER_TOKEN = 6
_REMEMBERED = 1024

Spans = Sequence[tuple[int, int]]
"""Begins and ends in characters."""


@dataclass(frozen=True)
class KeyText:
    """A text to find key tokens in, and one line of a file of key tokens.

    Attributes:
        sha256: The digest of the text.
        characters: The number of characters of the text.
        evaluator: The name of the model that picks the key tokens.
        tokens: The number of its tokens in the text.
        window: The minimum number of its tokens in the short context.
        step: The number of its tokens per short context.
        first: The first character that may belong to a key token.
        spans: The places of the key tokens; None if they are still to be found.
    """

    sha256: str
    characters: int
    evaluator: str
    tokens: int
    window: int
    step: int
    first: int
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class KeyTokenWork(Work):
    """One text up to a length.

    Attributes:
        plan: The evaluator and the file of key tokens.
        text: The text as the evaluator reads it.
        key: The evaluator's view of the text.
        ids: Tokens of the measured model, with begin tokens.
        offsets: Begin and end of each token in the text.
        sample: Index of the text.
    """

    task: "LongPerplexity"
    plan: DocumentPlan
    text: str
    key: KeyText
    ids: list[int]
    offsets: list[tuple[int, int]]
    sample: int

    @property
    def keys(self) -> list[Key]:
        """The only key: the text."""
        return [Key(self.task.name, self.length, None, self.sample)]

    def run(self, loaded: "LoadedModel", keys: set[Key]) -> Iterator[Record]:
        """Read the text once if its key is in `keys`; the evaluator reads it whole and in windows."""
        from ctxext.models.token_losses import losses_of

        if self.keys[0] not in keys:
            return
        spans = self.key.spans
        if spans is None:
            assert self.plan.evaluator is not None
            spans = _find_spans(self.plan.evaluator, str(loaded.device), self.text, self.key, self.plan.key_tokens)
        ids, offsets = self.ids[: self.length], self.offsets[: self.length]
        chosen = [token - 1 for token in select_tokens(offsets, spans)]  # The first loss is that of the second token.
        yield {
            "task": self.task.name,
            "length": self.length,
            "depth": None,
            "samples": [self.sample],
            "loss": [float(losses_of(loaded, ids)[chosen].sum())],
            "key_tokens": [len(chosen)],
            "of": [sum(end > self.key.first for _, end in offsets)],
            "evaluator": self.key.evaluator,
            "window": [self.key.window, self.key.step],
        }


@dataclass(frozen=True, kw_only=True)
class LongPerplexity(Task):
    """Measure the loss on tokens that another model predicts only from distant context."""

    name: str = "longppl"
    description: str = (
        "The loss on key tokens, at the same places of the text for all models. The evaluator predicts them well from "
        "the whole text (loss below 2 nats), and worse by over 2 nats from a short context (LongPPL, arXiv 2410.23771)."
    )
    shows: str = "the loss on tokens that only far context predicts"
    options: tuple[str, ...] = ("data", "evaluator", "key_tokens")

    def documents_to_read(self, plan: DocumentPlan) -> list[KeyTokenWork]:
        """Return the work, one for each text and each length beyond the short context."""
        works = []
        for sample, (text, key) in enumerate(_read_texts(plan)):
            ids, offsets = plan.encoder.encode_with_offsets(text)
            works += [
                KeyTokenWork(self, length, plan, text, key, ids, offsets, sample)
                for length in plan.lengths
                if length > key.window
            ]
        return works


def choose_window(longest: int) -> tuple[int, int]:
    """Return the minimum length of the short context and the tokens per context, shorter than published if needed."""
    window = WINDOW if longest >= WINDOW + STEP else longest // 4
    return window, window * STEP // WINDOW


def name_evaluator(source: str) -> str:
    """Return the name of an evaluator, without folders."""
    return Path(source).resolve().name if Path(source).is_dir() else source


def select_tokens(offsets: Spans, spans: Spans) -> list[int]:
    """Return the indices of tokens that are inside one of the spans, both in order (`cal_overlap` of the authors)."""
    chosen, at = [], 0
    for token, (begin, end) in enumerate(offsets):
        while at < len(spans) and spans[at][0] <= begin and spans[at][1] < end:
            at += 1
        if at < len(spans) and spans[at][0] <= begin:
            chosen.append(token)
    return chosen


def join_spans(spans: Spans) -> tuple[tuple[int, int], ...]:
    """Join spans that follow each other without a gap, so that a longer token of another tokenizer can be inside."""
    joined = list[tuple[int, int]]()
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def _read_texts(plan: DocumentPlan) -> list[tuple[str, KeyText]]:
    """Return the texts with their key tokens, which are still to be found if the file does not contain them."""
    file = plan.key_tokens
    lines = _read_file(file) if file is not None and file.exists() else []
    if plan.evaluator is None:
        assert file is not None
        return _match_lines(plan, file, lines)
    from ctxext.data.encoding import Encoder
    from ctxext.models.checkpoint_info import open_infos
    from ctxext.models.model import Loading, load_tokenizer

    name, (window, step) = name_evaluator(plan.evaluator), choose_window(plan.longest)
    if other := next((line.evaluator for line in lines if line.evaluator != name), None):
        raise CtxextError(f'"{file}" contains key tokens of "{other}", not of "{name}".', hint="Use another file.")
    encoder = Encoder(load_tokenizer(open_infos([plan.evaluator])[0], Loading()))
    texts = []
    for text in _cut(plan, lambda begin: _cut_tokens(begin, encoder, plan.longest)):
        _, offsets = encoder.encode_with_offsets(text)
        key = KeyText(_digest(text), len(text), name, len(offsets), window, step, offsets[window - 1][1])
        texts.append((text, next((line for line in lines if dataclasses.replace(line, spans=None) == key), key)))
    if not texts:
        raise CtxextError(
            f"The data contain no text of {plan.longest} tokens of the evaluator.",
            hint="Use longer texts with --data, or shorter --lengths.",
        )
    return texts


def _match_lines(plan: DocumentPlan, file: Path, lines: Sequence[KeyText]) -> list[tuple[str, KeyText]]:
    """Return the texts of a file of key tokens, found by their digests."""
    if (most := max(line.tokens for line in lines)) < plan.longest - 1:
        raise CtxextError(
            f'"{file}" contains key tokens up to {most} tokens, but a prompt length is {plan.longest}.',
            hint="Use shorter --lengths, or find key tokens with --evaluator.",
        )
    by_digest = {line.sha256: line for line in lines if line.tokens >= plan.longest - 1}
    sizes = sorted({line.characters for line in by_digest.values()})

    def cut(begin: Callable[[int], str]) -> str:
        texts = (begin(size)[:size] for size in sizes)
        return next((text for text in texts if _digest(text) in by_digest), "")

    texts = _cut(plan, cut)
    if len(texts) < plan.samples:
        raise CtxextError(
            f'"{file}" contains the key tokens of {len(texts)} of the {plan.samples} texts.',
            hint=f"Use --samples {len(texts)}, or find the others with --evaluator."
            if texts
            else "Use the same --data and --seed as with --evaluator.",
        )
    return [(text, by_digest[_digest(text)]) for text in texts]


def _cut(plan: DocumentPlan, cut: Callable[[Callable[[int], str]], str]) -> list[str]:
    from ctxext.data.texts import cut_texts

    return plan.in_turn(lambda data, count: cut_texts(data, cut, count=count, seed=plan.seed))


def _cut_tokens(begin: Callable[[int], str], encoder: "Encoder", most: int) -> str:
    """Return the first `most` tokens of a document as text; empty if it is shorter."""
    size = _CHARACTERS_PER_TOKEN * most
    while True:
        text = begin(size)
        _, offsets = encoder.encode_with_offsets(text)
        if len(offsets) > most:  # The last token may change with the text after it.
            return text[: offsets[most - 1][1]]
        if len(text) < size:
            return text if len(offsets) == most else ""
        size *= 2


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=_REMEMBERED)
def _find_spans(source: str, device: str, text: str, key: KeyText, file: Path | None) -> tuple[tuple[int, int], ...]:
    """Find the key tokens of a text once for all models and lengths, and add them to the file."""
    from ctxext.models.token_losses import key_tokens, load_evaluator

    evaluator = load_evaluator(source, device)
    ids, offsets = evaluator.encoder.encode_with_offsets(text)
    spans = join_spans([offsets[token] for token in key_tokens(evaluator, ids, key.window, key.step)])
    if file is not None:
        line = json.dumps(dataclasses.asdict(dataclasses.replace(key, spans=spans))) + "\n"
        with file.open("ab", buffering=0) as lines:  # A single write, because several processes may write.
            lines.write(line.encode())
    return spans


def _read_file(file: Path) -> list[KeyText]:
    from ctxext.tasks.entries import KEY_TOKENS, read_entries

    hint = "Use a file that was written with --key-tokens, or delete this line."
    entries = [entry for _, entry in read_entries(file, KEY_TOKENS, hint)]
    if not entries:
        raise CtxextError(f'"{file}" is empty.', hint="Delete it, and find key tokens with --evaluator.")
    return [KeyText(**entry) for entry in entries]
