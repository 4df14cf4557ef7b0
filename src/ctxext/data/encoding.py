"""Text to token ids, piece by piece, the way the tokenizer would see the pieces inside one long text."""

from collections.abc import Sequence
from typing import Any

from ctxext.data.chat_template import rendered
from ctxext.errors import CtxextError

_ANCHORS = ("\n", ":", "a")
_MAX_REMEMBERED, _MAX_REMEMBERED_SIZE = 20_000, 1000
_MARK = "\x00haystack\x00"
_WORD_STARTS = ("▁", "Ġ")


def tokenized(tokenizer: Any, text: str | list[str], **more: Any) -> Any:
    """What a tokenizer makes of a text or of several, under `input_ids`.

    Raises:
        CtxextError: it fails, as one without a token for what it does not know; its files are a stranger's.
    """
    try:
        return tokenizer(text, verbose=False, **more)["input_ids"]
    except Exception as error:  # The tokenizers library has no class of its own for what it raises.
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise CtxextError(
            f"The tokenizer fails: {said}",
            hint="Are its files whole, and those of this model?",
        ) from error


def no_tokens(text: str) -> CtxextError:
    """The refusal of a tokenizer that makes nothing of a text: no prompt can be written with it."""
    return CtxextError(f'The tokenizer makes no token of "{text[:40]}".', hint="Are its files those of this model?")


class Encoder:
    """Turns the pieces of a prompt into token ids.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Whether to use the tokenizer's chat template, where it has one.
    """

    def __init__(self, tokenizer: Any, *, chat_template: bool = True) -> None:
        self.tokenizer = tokenizer
        self.uses_chat = chat_template and bool(getattr(tokenizer, "chat_template", None))
        self._known: dict[str, list[int]] = {}
        first = tokenizer.convert_ids_to_tokens(self._plain("a")[:1])
        # Such a tokenizer puts a word start before every text it is given, so a piece is encoded behind an anchor.
        self._needs_anchor = bool(first) and str(first[0]).startswith(_WORD_STARTS)

    def _plain(self, text: str) -> list[int]:
        return list(tokenized(self.tokenizer, text, add_special_tokens=False))

    def document(self, text: str) -> list[int]:
        """A whole document with the begin token that the tokenizer adds."""
        return [*self.start(), *self._plain(text)]

    def start(self) -> list[int]:
        """What the tokenizer puts before every text."""
        bare = self._plain("a")
        full = list(tokenized(self.tokenizer, "a"))
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return full[:at]

    def end(self) -> list[int]:
        """What the tokenizer puts behind every text: nothing, or the end token of encoders."""
        bare = self._plain("a")
        full = list(tokenized(self.tokenizer, "a"))
        return full[len(self.start()) + len(bare) :]

    def piece(self, text: str) -> list[int]:
        """A piece that stands in the middle of a text."""
        if text in self._known:
            return self._known[text]
        ids = self._in_context(text) if self._needs_anchor else self._plain(text)
        # Short pieces come again; a document does not, and all of them would fill the memory.
        if len(text) <= _MAX_REMEMBERED_SIZE:
            if len(self._known) >= _MAX_REMEMBERED:
                self._known.clear()
            self._known[text] = ids
        return ids

    def pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Many pieces in one call, which is faster."""
        if len(self._known) > _MAX_REMEMBERED:
            self._known.clear()
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new and not self._needs_anchor:
            found = tokenized(self.tokenizer, new, add_special_tokens=False)
            self._known.update((text, list(ids)) for text, ids in zip(new, found, strict=True))
        return [self.piece(text) for text in texts]

    def _in_context(self, text: str) -> list[int]:
        for anchor in _ANCHORS:
            before, both = self._plain(anchor), self._plain(anchor + text)
            if both[: len(before)] == before:
                return both[len(before) :]
        return self._plain(text)

    def frame(self, opening: str, question: str) -> tuple[list[int], list[int]]:
        """What stands before the haystack and what stands between it and the answer.

        With a chat template the opening, the haystack and the question are the user's turn. The question's last words,
        which lead into the answer, begin the assistant's turn, as in RULER: no model has to guess how an answer starts.

        Raises:
            CtxextError: the chat template fails, or drops part of the user's turn.
        """
        if not self.uses_chat:
            return [*self.start(), *self._plain(opening)], self.piece(question)
        asked, lead_in = split_question(question)
        message = [{"role": "user", "content": f"{opening}{_MARK}{asked}"}]
        text = rendered(self.tokenizer, message, add_generation_prompt=True, enable_thinking=False)
        head, mark, tail = text.partition(_MARK)
        if not mark:
            raise CtxextError(
                "The tokenizer's chat template does not keep the user's text.", hint="Evaluate with --no-chat-template."
            )
        return self._plain(head), [*self.piece(tail), *(self.piece(lead_in) if lead_in else [])]


def split_question(question: str) -> tuple[str, str]:
    """A question and the words that lead into its answer: "What is it?" and "It is"."""
    ends = [question.rfind(mark) + len(mark) for mark in ("? ", "\n") if mark in question]
    at = max(ends, default=len(question))
    return question[:at].rstrip(), question[at:]
