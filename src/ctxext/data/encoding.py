"""Text to token ids, piece by piece, with the same tokens as in one long text."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ctxext.data.chat_template import render_chat
from ctxext.errors import CtxextError

_PANIC = "PanicException"
"""The class that Rust libraries raise instead of an Exception; it cannot be imported."""

_TRIAL = "A word, 1 é\n\n  two"
_HINT = "Are its files whole, and those of this model?"


def open_tokenizer(folder: Path | str, **more: Any) -> Any:
    """Load the tokenizer of a checkpoint, as `from_pretrained` of transformers does, and try it on a few words."""
    from transformers import AutoTokenizer

    with _panics_silenced():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **more)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise _failed("The tokenizer cannot be loaded", error) from error
        with explain_tokenizer_errors("The tokenizer fails"):
            tokenizer(_TRIAL, verbose=False)
    return tokenizer


@contextlib.contextmanager
def explain_tokenizer_errors(what: str) -> Iterator[None]:
    """Turn any failure of a tokenizer into a CtxextError: its library may panic, and has no class for its errors."""
    try:
        yield
    except CtxextError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise _failed(what, error) from error


def _failed(what: str, error: BaseException) -> CtxextError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CtxextError(f"{what}: {lines[0]}", hint=_HINT)


@contextlib.contextmanager
def _panics_silenced() -> Iterator[None]:
    """Suppress the backtrace of a Rust library, which bypasses sys.stderr."""
    try:
        sys.stderr.flush()
        stderr = os.dup(2)
    except (OSError, ValueError, AttributeError):  # Standard error is closed.
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  Only its descriptor is needed.
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


_ANCHORS = ("\n", ":", "a")
_MAX_REMEMBERED, _MAX_REMEMBERED_SIZE = 20_000, 1000
_MARK = "\x00haystack\x00"
_WORD_STARTS = ("▁", "Ġ")
_AT_ONCE, _MOST_AT_ONCE = 1 << 20, 1 << 23
"""Characters per call of the tokenizer, and the most without a possible cut: a call takes 200 to 400 bytes for each."""

_SURROUNDINGS = 1000
"""Characters on either side of a cut whose tokens must be the same with and without the cut."""

_MOST_CUTS = 16
"""Maximum of line ends, and of word ends, to try before the part is made longer."""


def tokenize(tokenizer: Any, text: str | list[str], **more: Any) -> Any:
    """Return the `input_ids` of a text or of several texts."""
    with explain_tokenizer_errors("The tokenizer fails"):
        return tokenizer(text, verbose=False, **more)["input_ids"]


def no_tokens(text: str) -> CtxextError:
    """Return the error for a tokenizer that returns no token for a text."""
    return CtxextError(f'The tokenizer makes no token of "{text[:40]}".', hint="Are its files those of this model?")


class Encoder:
    """Encodes the pieces of a prompt as token ids.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Whether to use the tokenizer's chat template, if it has one.
    """

    def __init__(self, tokenizer: Any, *, chat_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self.uses_chat = chat_template and bool(getattr(tokenizer, "chat_template", None))
        self._known: dict[str, list[int]] = {}
        first = tokenizer.convert_ids_to_tokens(self._plain("a")[:1])
        # Such a tokenizer adds a word start to every text, so a piece is encoded behind an anchor.
        self._needs_anchor = bool(first) and str(first[0]).startswith(_WORD_STARTS)

    def _plain(self, text: str) -> list[int]:
        if len(text) <= _AT_ONCE:
            return self._in_one_call(text)
        ids, begin = list[int](), 0
        while begin < len(text):
            end = self._end_of_part(text, begin)
            ids += self._continued(text[begin:end]) if begin else self._in_one_call(text[:end])
            begin = end
        return ids

    def _in_one_call(self, text: str) -> list[int]:
        return list(tokenize(self.tokenizer, text, add_special_tokens=False))

    def _continued(self, text: str) -> list[int]:
        return self._in_context(text, self._in_one_call) if self._needs_anchor else self._in_one_call(text)

    def _end_of_part(self, text: str, begin: int) -> int:
        """Return the end of the part of a long text that begins at `begin`."""
        size = _AT_ONCE
        while len(text) - begin > size:
            for at in _places_to_cut(text, begin + size // 2, begin + size):
                if self._may_cut(text, at):
                    return at
            size *= 2
            if size > _MOST_AT_ONCE:
                raise CtxextError(
                    f"A text goes on for {_MOST_AT_ONCE} characters without a place to cut it for the tokenizer.",
                    hint="Give texts with spaces and lines, or shorter ones.",
                )
        return len(text)

    def _may_cut(self, text: str, at: int) -> bool:
        """Return whether the tokens around a place are the same if the text is cut there."""
        left, right = text[max(at - _SURROUNDINGS, 0) : at], text[at : at + _SURROUNDINGS]
        return self._continued(left + right) == self._continued(left) + self._continued(right)

    def document(self, text: str) -> list[int]:
        """Encode a document, with the begin tokens of the tokenizer."""
        return [*self.start(), *self._plain(text)]

    def start(self) -> list[int]:
        """Return the begin tokens that the tokenizer adds to every text."""
        bare = self._plain("a")
        full = list(tokenize(self.tokenizer, "a"))
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:at]

    def end(self) -> list[int]:
        """Return the end tokens that the tokenizer adds to every text: none, or the end token of encoders."""
        bare = self._plain("a")
        full = list(tokenize(self.tokenizer, "a"))
        return full[len(self.start()) + len(bare) :]

    def piece(self, text: str) -> list[int]:
        """Encode a piece from the middle of a text."""
        if text in self._known:
            return self._known[text]
        ids = self._in_context(text, self._plain) if self._needs_anchor else self._plain(text)
        # Short pieces are used again; documents are not, and would fill the memory.
        if len(text) <= _MAX_REMEMBERED_SIZE:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            self._known[text] = ids
        return ids

    def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many pieces in one call, which is faster."""
        if len(self._known) > _MAX_REMEMBERED:
            self._known.clear()
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new and not self._needs_anchor:
            encoded = tokenize(self.tokenizer, new, add_special_tokens=False)
            self._known.update((text, list(ids)) for text, ids in zip(new, encoded, strict=True))
        return [self.piece(text) for text in texts]

    def _in_context(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        for anchor in _ANCHORS:
            before, both = encode(anchor), encode(anchor + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return encode(text)

    def frame(self, opening: str, question: str) -> tuple[list[int], list[int]]:
        """Encode the text around the haystack: before it, and between it and the answer.

        With a chat template the opening, the haystack and the question are the user's turn. The question's last words,
        which lead into the answer, begin the assistant's turn, as in RULER, so that the answer's form is given.
        """
        if not self.uses_chat:
            return [*self.start(), *self._plain(opening)], self.piece(question)
        asked, lead_in = split_question(question)
        messages = [{"role": "user", "content": f"{opening}{_MARK}{asked}"}]
        text = render_chat(self.tokenizer, messages, add_generation_prompt=True, enable_thinking=False)
        head, mark, tail = text.partition(_MARK)
        if not mark:
            raise CtxextError(
                "The tokenizer's chat template does not keep the user's text.", hint="Evaluate with --no-chat-template."
            )
        return self._plain(head), [*self.piece(tail), *(self.piece(lead_in) if lead_in else [])]


def _places_to_cut(text: str, first: int, last: int) -> Iterator[int]:
    """Yield places to cut a text: after the last ends of lines, then before the last spaces."""
    yield from (at + 1 for at in islice(_find_backwards(text, "\n", first, last), _MOST_CUTS))
    yield from islice(_find_backwards(text, " ", first, last), _MOST_CUTS)


def _find_backwards(text: str, mark: str, first: int, last: int) -> Iterator[int]:
    while (last := text.rfind(mark, first, last)) >= 0:
        yield last


def split_question(question: str) -> tuple[str, str]:
    """Split a question from the words that lead into its answer: "What is it?" and "It is"."""
    ends = [question.rfind(mark) + len(mark) for mark in ("? ", "\n") if mark in question]
    ends += [question.rfind(" Answer:") + 1] * (" Answer:" in question)
    at = max(ends, default=len(question))
    return question[:at].rstrip(), question[at:]
