"""Tokenization piece by piece, with the same tokens as in one long text."""

import contextlib
import copy
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ctxext.data.chat_template import render_chat
from ctxext.data.estimated_tokens import EstimatedTokenizer
from ctxext.data.thoughts import (
    Thoughts,
    find_open_thought,
    has_thoughts,
    read_thoughts,
    remove_thoughts,
    switch_thoughts,
)
from ctxext.data.turns import PLAIN_TURNS, TurnLayout, read_turn_layout
from ctxext.errors import CtxextError
from ctxext.redaction import shorten

_PANIC = "PanicException"
"""Name of the class that Rust libraries raise instead of an Exception; it cannot be imported."""

_TRIAL = "A word, 1 é\n\n  two"
_HINT = "Check that its files are complete and belong to this model."


def open_tokenizer(folder: Path | str, **more: Any) -> Any:
    """Load the tokenizer of a checkpoint, as `from_pretrained` of transformers does, and test it on a few words."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    with _silence_panics():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **more)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise _tokenizer_error("The tokenizer cannot be loaded", error) from error
        if not isinstance(tokenizer, PreTrainedTokenizerBase):  # RagTokenizer has two tokenizers.
            raise CtxextError(f'"{type(tokenizer).__name__}" is not the tokenizer of one model.', hint=_HINT)
        with explain_tokenizer_errors("The tokenizer fails"):
            tokenizer(_TRIAL, verbose=False)
    return tokenizer


@contextlib.contextmanager
def explain_tokenizer_errors(message: str) -> Iterator[None]:
    """Raise any failure of a tokenizer as a CtxextError; the Rust library may panic and has no error class."""
    try:
        yield
    except CtxextError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise _tokenizer_error(message, error) from error


def _tokenizer_error(message: str, error: BaseException) -> CtxextError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CtxextError(f"{message}: {lines[0]}", hint=_HINT)


@contextlib.contextmanager
def _silence_panics() -> Iterator[None]:
    """Suppress the backtrace of the Rust library, which bypasses sys.stderr."""
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
_ANSWER = re.compile(r"(?<!\nFinal) Answer:")
"""The beginning of an answer on the line of its question; "Final Answer:" begins a line."""

_WORD_STARTS = ("▁", "Ġ")
_AT_ONCE, _MOST_AT_ONCE = 1 << 20, 1 << 23
"""Characters per call, and their maximum without a place to cut; the tokenizer takes 200 to 400 bytes for each."""

_SURROUNDINGS = 1000
"""Number of characters on either side of a cut that must have the same tokens with and without the cut."""

_MOST_CUTS = 16
"""Maximum number of line ends, and of word ends, to try before lengthening the part."""


def tokenize(tokenizer: Any, text: str | list[str], **more: Any) -> Any:
    """Return the `input_ids` of a text or of several texts."""
    with explain_tokenizer_errors("The tokenizer fails"):
        return tokenizer(text, verbose=False, **more)["input_ids"]


def no_tokens(text: str) -> CtxextError:
    """Return the error for a tokenizer that returns no token for a text."""
    return CtxextError(f'The tokenizer returns no tokens for "{shorten(text, 40)}".', hint=_HINT)


@dataclass(frozen=True)
class PromptForm:
    """The form of prompts and answers.

    Attributes:
        is_chat: Whether a prompt is the user's message alone. If not, it ends with the first words of the answer.
        thinks: Whether the model thinks before its answer; None for the default of its chat template.
        room: Minimum of the maximum number of generated tokens, thoughts included.
        reasons: Whether the user requested reasoning.
        estimate: Stand-in for the tokenizer of a server, fitted to its counts; None with a tokenizer.
    """

    is_chat: bool = False
    thinks: bool | None = False
    room: int = 0
    reasons: bool = False
    estimate: EstimatedTokenizer | None = None


BASE_FORM = PromptForm()


class Encoder:
    """Encodes the pieces of a prompt as token ids.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Whether to use the tokenizer's chat template, if it has one.
    """

    def __init__(self, tokenizer: Any, *, chat_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self.uses_chat = chat_template and bool(getattr(tokenizer, "chat_template", None))
        self.form = BASE_FORM
        self._known: dict[str, list[int]] = {}
        self._forms: dict[PromptForm, Encoder] = {self.form: self}
        first = tokenizer.convert_ids_to_tokens(self._encode("a")[:1])
        # Such a tokenizer adds a word start to every text, so a piece is encoded after an anchor.
        self._needs_anchor = bool(first) and str(first[0]).startswith(_WORD_STARTS)

    def _encode(self, text: str) -> list[int]:
        if len(text) <= _AT_ONCE:
            return self._encode_once(text)
        ids, begin = list[int](), 0
        while begin < len(text):
            end = self._find_end_of_part(text, begin)
            ids += self._encode_rest(text[begin:end]) if begin else self._encode_once(text[:end])
            begin = end
        return ids

    def _encode_once(self, text: str) -> list[int]:
        return list(tokenize(self.tokenizer, text, add_special_tokens=False))

    def _encode_rest(self, text: str) -> list[int]:
        return self._encode_after_anchor(text, self._encode_once) if self._needs_anchor else self._encode_once(text)

    def _find_end_of_part(self, text: str, begin: int) -> int:
        """Return the end of the part of a long text that begins at `begin`."""
        size = _AT_ONCE
        while len(text) - begin > size:
            for at in _find_places_to_cut(text, begin + size // 2, begin + size):
                if self._can_cut(text, at):
                    return at
            size *= 2
            if size > _MOST_AT_ONCE:
                raise CtxextError(
                    f"A text cannot be split for the tokenizer: {_MOST_AT_ONCE} characters have no safe boundary.",
                    hint="Use shorter texts, or texts with spaces and line ends.",
                )
        return len(text)

    def _can_cut(self, text: str, at: int) -> bool:
        """Return whether the tokens around a place are the same if the text is cut there."""
        left, right = text[max(at - _SURROUNDINGS, 0) : at], text[at : at + _SURROUNDINGS]
        return self._encode_rest(left + right) == self._encode_rest(left) + self._encode_rest(right)

    def encode_document(self, text: str) -> list[int]:
        """Encode a document, with the tokenizer's start tokens."""
        return [*self.get_start_tokens(), *self._encode(text)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a document, and return the start and end of each token in it, in characters.

        Begin tokens are at (0, 0).

        Raises:
            CtxextError: The tokenizer is not a fast one, and has no offsets.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            raise CtxextError(
                "The tokenizer does not return the places of tokens in a text.",
                hint="Use a model with a fast tokenizer, in tokenizer.json.",
            )
        with explain_tokenizer_errors("The tokenizer fails"):
            encoded = self.tokenizer(text, verbose=False, add_special_tokens=False, return_offsets_mapping=True)
        start = self.get_start_tokens()
        return [*start, *encoded["input_ids"]], [*[(0, 0)] * len(start), *encoded["offset_mapping"]]

    def encode_message(self, text: str, *, system: str = "") -> list[int]:
        """Encode a whole prompt: as the user's turn, after a system message, or without a chat template as plain text.

        Only the chat template has a place for the system message.
        """
        if not self.uses_chat:
            return self.encode_document(text)
        turns = [("system", system)] * bool(system) + [("user", text)]
        return self._encode(self._render([{"role": role, "content": content} for role, content in turns]))

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        """Render a conversation up to the answer to generate."""
        return render_chat(self.tokenizer, messages, add_generation_prompt=True, **switch_thoughts(self.form.thinks))

    def use_form(self, form: PromptForm) -> "Encoder":
        """Return an encoder of the same tokenizer for prompts in a form, always the same one."""
        if form not in self._forms:
            other = self._forms[form] = copy.copy(self)
            other.form = form
            for name in ("open_thought", "turn_layout"):  # They depend on the form.
                vars(other).pop(name, None)
            if form.estimate is not None:
                other.tokenizer, other._known = form.estimate, {}
        return self._forms[form]

    def get_start_tokens(self) -> list[int]:
        """Return the start tokens that the tokenizer adds to every text."""
        bare = self._encode("a")
        full = list(tokenize(self.tokenizer, "a"))
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:at]

    def get_end_tokens(self) -> list[int]:
        """Return the end tokens that the tokenizer adds to every text; usually only encoders have one."""
        bare = self._encode("a")
        full = list(tokenize(self.tokenizer, "a"))
        return full[len(self.get_start_tokens()) + len(bare) :]

    def encode_piece(self, text: str) -> list[int]:
        """Encode a piece from the middle of a text."""
        if text in self._known:
            return self._known[text]
        ids = self._encode_after_anchor(text, self._encode) if self._needs_anchor else self._encode(text)
        # Short pieces are reused; documents are not, and would fill the memory.
        if len(text) <= _MAX_REMEMBERED_SIZE:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            self._known[text] = ids
        return ids

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many pieces in one call, which is faster."""
        if len(self._known) > _MAX_REMEMBERED:
            self._known.clear()
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new and not self._needs_anchor:
            encoded = tokenize(self.tokenizer, new, add_special_tokens=False)
            self._known.update((text, list(ids)) for text, ids in zip(new, encoded, strict=True))
        return [self.encode_piece(text) for text in texts]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of many texts in one call; a tokenizer that adds a word start to each counts it too."""
        return [len(ids) for ids in tokenize(self.tokenizer, list(texts), add_special_tokens=False)] if texts else []

    def _encode_after_anchor(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        for anchor in _ANCHORS:
            before, both = encode(anchor), encode(anchor + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return encode(text)

    @functools.cached_property
    def thoughts(self) -> Thoughts:
        """How the chat template marks and switches thoughts."""
        return read_thoughts(self.tokenizer)

    @functools.cached_property
    def open_thought(self) -> str:
        """The mark of a thought within which prompts end, although thinking may be disabled; empty if there is none."""
        if not self.uses_chat:
            return ""
        return find_open_thought(self._render([{"role": "user", "content": _MARK}]).rpartition(_MARK)[2])

    def read_answer(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens, in chat without thoughts."""
        if not (self.form.is_chat and self.uses_chat):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return self.clean_answer(self.tokenizer.decode(ids))  # Marks of thoughts may be special tokens.

    def clean_answer(self, text: str, *, is_separate: bool = False) -> str:
        """Return a generated text without thoughts and without the names of special tokens.

        Args:
            text: The text.
            is_separate: Whether a server returned the thoughts separately, so that the text does not begin within one.
        """
        text = self._remove_thoughts(text, is_separate)
        for name in self._special_tokens:
            text = text.replace(name, "")
        return text

    def has_thoughts(self, text: str, *, is_separate: bool = False) -> bool:
        """Return whether a generated text has thoughts; arguments of `clean_answer`."""
        return has_thoughts(text, self._remove_thoughts(text, is_separate), self.thoughts.marks)

    def _remove_thoughts(self, text: str, is_separate: bool) -> str:
        return remove_thoughts(text, self.thoughts.marks, "" if is_separate else self.open_thought)

    @functools.cached_property
    def _special_tokens(self) -> set[str]:
        """The names of special tokens."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        return {*getattr(self.tokenizer, "all_special_tokens", ()), *(each.content for each in added if each.special)}

    @property
    def needs_special_tokens(self) -> bool:
        """Whether marks of thoughts are special tokens, which the text of an answer must contain."""
        return self.uses_chat and not self._special_tokens.isdisjoint(self.thoughts.marks)

    def facts(self) -> dict[str, str]:
        """Return whether prompts use the chat template, and the open thought in which they end, for the report."""
        used = {"chat_template": "yes" if self.uses_chat else "no"}
        return {**used, "open_thought": self.open_thought} if self.open_thought else used

    @functools.cached_property
    def turn_layout(self) -> TurnLayout:
        """The text around the messages of a conversation."""
        return read_turn_layout(self._render) if self.uses_chat else PLAIN_TURNS

    def encode_beginning(self, text: str) -> list[int]:
        """Encode the beginning of a prompt; the text of a chat template includes the begin tokens."""
        return self._encode(text) if self.uses_chat else self.encode_document(text)

    def encode_frame(self, opening: str, question: str) -> tuple[list[int], list[int]]:
        """Encode the text around the haystack: before it, and between it and the answer.

        With a chat template the opening, the haystack and the question are the user's turn. The question's last words,
        which lead into the answer, begin the assistant's turn, as in RULER, to fix the form of the answer; in chat they
        are omitted, as in NVIDIA's later pipeline (NeMo-Skills, `--data_format chat`).
        """
        if not self.uses_chat:
            return self.encode_beginning(opening), self.encode_piece(question)
        user_question, lead_in = split_question(question)
        lead_in = "" if self.form.is_chat else lead_in
        text = self._render([{"role": "user", "content": f"{opening}{_MARK}{user_question}"}])
        head, mark, tail = text.partition(_MARK)
        if not mark:
            raise CtxextError(
                "The tokenizer's chat template omits the user's text.", hint="Evaluate with --no-chat-template."
            )
        return self.encode_beginning(head), [*self.encode_piece(tail), *(self.encode_piece(lead_in) if lead_in else [])]


def _find_places_to_cut(text: str, first: int, last: int) -> Iterator[int]:
    """Yield places to cut a text: after the last ends of lines, then before the last spaces."""
    yield from (at + 1 for at in islice(_find_backwards(text, "\n", first, last), _MOST_CUTS))
    yield from islice(_find_backwards(text, " ", first, last), _MOST_CUTS)


def _find_backwards(text: str, mark: str, first: int, last: int) -> Iterator[int]:
    while (last := text.rfind(mark, first, last)) >= 0:
        yield last


def split_question(question: str) -> tuple[str, str]:
    """Split a question from the words that lead into its answer: "What is it?" and "It is"."""
    ends = [question.rfind(mark) + len(mark) for mark in ("? ", "\n") if mark in question]
    ends += [match.start() + 1 for match in _ANSWER.finditer(question)]
    at = max(ends, default=len(question))
    return question[:at].rstrip(), question[at:]
