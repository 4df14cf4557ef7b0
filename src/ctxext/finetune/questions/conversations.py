"""Conversations about texts: facts at random places of a text, questions about them, and continuations of passages.

A stream: only some texts are open at a time, and some conversations wait in a buffer, from which they are drawn at
random. The same texts in the same order, tokenizer, lengths and seed give the same conversations.
"""

import random
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ctxext.data.chat_template import render_chat
from ctxext.errors import CtxextError
from ctxext.finetune.chats import MESSAGES, BadRecord
from ctxext.finetune.questions.languages import FactForm, Language, read_languages, recognise_language
from ctxext.finetune.record_encoder import PARTS, Document, RecordEncoder

Texts = Iterable[tuple[str, str] | None]
"""Texts with their places for error messages; None ends a pass over all of them."""

_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE_END = re.compile(r"(?<=[.!?:…])\s+|(?<=[。！？])")
_PIECE = re.compile(r".{1,600}(?:\s|$)|.{1,600}", re.DOTALL)
"""Part of a text without ends of sentences."""
_BLOCK, _BLOCK_LENGTHS, _CHARACTERS = 1 << 16, 8, 4
"""Characters per block of a long text; the minimum in conversations, and the characters per token of one."""
_NUM_OPEN = 16
"""Number of open texts, from which the next part is drawn."""
_NUM_WAITING, _TOKENS_WAITING = 256, 1 << 20
"""Maximum number of conversations in the buffer, and of their tokens."""
_NUM_SAMPLED = 32
"""Number of sentences from which the tokens of a question are estimated."""
_MOST_UNKNOWN = 10_000
"""Number of texts in unknown languages, without any other, that end the stream."""


@dataclass(frozen=True)
class Conversation:
    """A conversation about a text.

    Attributes:
        messages: Its messages; the first contains the text.
        document: Its tokens.
        language: Name of the language.
        num_questions: Number of questions.
    """

    messages: list[dict[str, str]]
    document: Document
    language: str
    num_questions: int


@dataclass
class QuestionCounts:
    """Counts of a stream.

    Attributes:
        num_texts: Texts.
        num_unknown: Texts in unknown languages, without questions.
        num_conversations: Conversations.
        num_questions: Questions in them.
        num_tokens: Tokens in them.
    """

    num_texts: int = 0
    num_unknown: int = 0
    num_conversations: int = 0
    num_questions: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class _Unit:
    """A sentence, the space after it, and the number of their tokens."""

    text: str
    gap: str
    num_tokens: int


@dataclass
class _Queue:
    """Sentences of a language that wait for a conversation."""

    language: Language
    units: deque[_Unit] = field(default_factory=deque)
    num_tokens: int = 0

    def pop(self) -> _Unit:
        unit = self.units.popleft()
        self.num_tokens -= unit.num_tokens
        return unit

    def push_back(self, unit: _Unit) -> None:
        self.units.appendleft(unit)
        self.num_tokens += unit.num_tokens

    def extend(self, units: Iterable[_Unit]) -> None:
        for unit in units:
            self.units.append(unit)
            self.num_tokens += unit.num_tokens


@dataclass(frozen=True)
class _Draft:
    """A conversation before it is rendered: the text with its facts, and questions with their answers."""

    language: Language
    length: int
    opening: str
    text: str
    closing: str
    turns: list[tuple[str, str]]


class QuestionStream:
    """Maker of conversations about texts.

    Args:
        encoder: Encoder of the model.
        lengths: Maximum lengths of conversations in tokens, with how often each is made.
        seed: The random seed.

    Attributes:
        counts: Counts, which grow during the stream.
    """

    def __init__(self, encoder: RecordEncoder, lengths: Mapping[int, int], seed: int) -> None:
        self.counts = QuestionCounts()
        self._encoder, self._lengths = encoder, dict(sorted(lengths.items()))
        self._rng = random.Random(f"{seed} questions")
        self._overheads: dict[str, tuple[int, int]] = {}
        self._first_unknown = ""

    def make(self, texts: Texts) -> Iterator[Conversation | None]:
        """Yield conversations, and None after each pass over the texts.

        Raises:
            CtxextError: No text of a pass is in a known language, or no question fits into the length.
        """
        waiting: list[_Draft] = []
        most, num_before = max(1, min(_NUM_WAITING, _TOKENS_WAITING // max(self._lengths))), 0
        for draft in self._draft_all(texts):
            if draft is not None:
                waiting.append(draft)
            while waiting and (draft is None or len(waiting) > most):
                yield from self._finish(self._take(waiting))
            if draft is None:
                if self.counts.num_conversations == num_before:
                    raise self._make_empty_error()
                num_before = self.counts.num_conversations
                yield None

    def _take(self, entries: list[Any]) -> Any:
        """Remove a random entry."""
        at = self._rng.randrange(len(entries))
        entries[at], entries[-1] = entries[-1], entries[at]
        return entries.pop()

    def _make_empty_error(self) -> CtxextError:
        names = ", ".join(language.name for language in read_languages().values())
        if self.counts.num_texts == self.counts.num_unknown and self._first_unknown:
            place = self._first_unknown[:1].lower() + self._first_unknown[1:]
            return CtxextError(
                f"The language of {place} is not one of {names}.", hint="Use texts in one of these languages."
            )
        if not self.counts.num_texts:
            return CtxextError("The data contains no text.", hint="Pass a file with text.")
        return CtxextError(
            f"No question about the texts fits into {max(self._lengths)} tokens.", hint="Use a longer --length."
        )

    def _draft_all(self, texts: Texts) -> Iterator[_Draft | None]:
        """Yield drafts in the order of the texts, and None after each pass."""
        queues: dict[str, _Queue] = {}
        for block in self._read_blocks(texts):
            if block is None:
                for queue in queues.values():
                    while queue.units:
                        yield from self._draft(queue)
                yield None
                continue
            language, text = block
            queue = queues.setdefault(language.name, _Queue(language))
            queue.extend(self._cut_units(language, text))
            while queue.num_tokens >= max(self._lengths):
                yield from self._draft(queue)

    def _read_blocks(self, texts: Texts) -> Iterator[tuple[Language, str] | None]:
        """Yield parts of texts, drawn from several open texts, and None after each pass and at the end."""
        texts_open: list[tuple[Language, list[str]]] = []

        def take() -> tuple[Language, str]:
            at = self._rng.randrange(len(texts_open))
            language, blocks = texts_open[at]
            block = blocks.pop()
            if not blocks:
                del texts_open[at]
            return language, block

        has_more = True
        for entry in texts:
            has_more = entry is not None
            if entry is not None and (language := self._recognise(*entry)) is not None:
                texts_open.append((language, self._cut_blocks(entry[1])))
            while texts_open and (entry is None or len(texts_open) >= _NUM_OPEN):
                yield take()
            if entry is None or (self.counts.num_unknown == self.counts.num_texts == _MOST_UNKNOWN):
                yield None
        while texts_open:
            yield take()
        if has_more:
            yield None

    def _recognise(self, place: str, text: str) -> Language | None:
        language = recognise_language(text)
        self.counts.num_texts += 1
        if language is None:
            self.counts.num_unknown += 1
            self._first_unknown = self._first_unknown or place
        return language

    def _cut_blocks(self, text: str) -> list[str]:
        """Cut a text to parts at ends of paragraphs or sentences, in random order."""
        size = max(_BLOCK, _BLOCK_LENGTHS * _CHARACTERS * max(self._lengths))
        blocks, begin = [], 0
        while begin < len(text):
            near = begin + size
            match = _PARAGRAPH.search(text, near, near + size) or _SENTENCE_END.search(text, near, near + size)
            end = match.end() if match else near
            blocks.append(text[begin:end])
            begin = end
        self._rng.shuffle(blocks)
        return blocks

    def _cut_units(self, language: Language, text: str) -> Iterator[_Unit]:
        """Cut a text to sentences with their numbers of tokens; long ones are divided."""
        units = []
        for paragraph in _PARAGRAPH.split(text):
            in_line = paragraph.replace("\n", language.space)
            sentences = (" ".join(sentence.split()) for sentence in _SENTENCE_END.split(in_line))
            pieces = [piece.strip() for sentence in sentences for piece in _PIECE.findall(sentence)]
            pieces = [piece for piece in pieces if piece]
            units += [(piece, language.space) for piece in pieces[:-1]] + [(piece, "\n\n") for piece in pieces[-1:]]
        counts = self._encoder.count_tokens([language.space + text for text, _ in units])
        for (piece, gap), num_tokens in zip(units, counts, strict=True):
            yield _Unit(piece, gap, num_tokens + (gap == "\n\n"))

    def _draft(self, queue: _Queue) -> Iterator[_Draft]:
        """Take sentences for one conversation of a queue; no draft if none fits."""
        rng, language = self._rng, queue.language
        (length,) = rng.choices([*self._lengths], [*self._lengths.values()])
        frame, per_turn = self._measure_overhead(language)
        num_turns = max(1, min(8 + length // 200, length // 75, language.most_facts))
        facts = language.draw_facts(rng, num_turns)
        opening, closing = rng.choice(language.openings), rng.choice(language.closings)
        counts = self._encoder.count_tokens(
            [text for fact in facts for text in (fact.fact, fact.question, fact.answer)]
        )
        costs = [tuple(counts[3 * number : 3 * number + 3]) for number in range(num_turns)]
        room = length - frame - sum(self._encoder.count_tokens([opening, closing])) - 2
        # Short conversations have fewer facts, so that at least a third of them is text.
        quote_cost = per_turn + self._estimate_quote(queue)
        while num_turns > 1 and room - _count_cost(costs[:num_turns], per_turn, quote_cost) < length // 3:
            num_turns -= 1
        facts, num_asked = facts[:num_turns], _count_asked(num_turns)
        room -= _count_cost(costs[:num_turns], per_turn, 0)
        units, quotes = self._take_units(queue, room, num_turns - num_asked, per_turn)
        if units:
            turns = [*((fact.question, fact.answer) for fact in facts[:num_asked]), *quotes]
            rng.shuffle(turns)
            yield _Draft(language, length, opening, self._hide(facts, units, language), closing, turns)

    def _estimate_quote(self, queue: _Queue) -> int:
        """Estimate the number of tokens of a question about a continuation with its answer, from the next sentences."""
        language, units = queue.language, list(islice(queue.units, _NUM_SAMPLED))
        num_words = sum(len(unit.text.split(" ") if language.space else unit.text) for unit in units)
        per_word = sum(unit.num_tokens for unit in units) / max(1, num_words)
        (form,) = self._encoder.count_tokens(language.quotes[:1])
        # Most sentences end before the longest continuation.
        return form + round(per_word * (language.before + 0.75 * language.after))

    def _take_units(
        self, queue: _Queue, room: int, num_quotes: int, per_turn: int
    ) -> tuple[list[_Unit], list[tuple[str, str]]]:
        """Take sentences up to a number of tokens, less those of the questions about their continuation."""
        units: list[_Unit] = []
        while queue.units and room - queue.units[0].num_tokens >= 0:
            units.append(queue.pop())
            room -= units[-1].num_tokens
        if not units:
            queue.pop()  # A sentence longer than a conversation.
            return [], []
        text = queue.language.space.join(unit.text for unit in units)
        forms, quotes = queue.language.quotes, dict[int, tuple[str, str]]()
        for number in self._rng.sample(range(len(units)), len(units)):
            split = queue.language.split_quote(units[number].text) if len(quotes) < num_quotes else None
            if split is not None and text.count(split[0]) == 1:
                quotes[number] = self._rng.choice(forms).format(before=split[0]), split[1]
        counts = iter(self._encoder.count_tokens([text for quote in quotes.values() for text in quote]))
        costs = {number: next(counts) + next(counts) + per_turn for number in quotes}
        room -= sum(costs.values())
        while room < 0 and len(units) > 1:
            unit = units.pop()
            queue.push_back(unit)
            room += unit.num_tokens + costs.get(len(units), 0)
            quotes.pop(len(units), None)
        return units, list(quotes.values())

    def _hide(self, facts: Sequence[FactForm], units: Sequence[_Unit], language: Language) -> str:
        """Put facts at random places between sentences."""
        pieces = [(unit.text, unit.gap) for unit in units]
        for fact in facts:
            pieces.insert(self._rng.randint(0, len(pieces)), (fact.fact, language.space))
        return "".join(f"{text}{gap}" for text, gap in pieces).strip()

    def _finish(self, draft: _Draft) -> Iterator[Conversation]:
        """Render a draft, without the last questions if it is too long; nothing if no question fits."""
        turns = draft.turns
        # The whole text is much faster to encode than the parts with their marks.
        while turns and self._encoder.has_template and self._estimate_length(draft, turns) > draft.length:
            turns = turns[:-1]
        while turns:
            document = self._encode(draft, turns)
            if len(document.ids) <= draft.length:
                self.counts.num_conversations += 1
                self.counts.num_questions += len(turns)
                self.counts.num_tokens += len(document.ids)
                yield Conversation(_make_messages(draft, turns), document, draft.language.name, len(turns))
                return
            turns = turns[:-1]

    def _estimate_length(self, draft: _Draft, turns: Sequence[tuple[str, str]]) -> int:
        text = render_chat(self._encoder.tokenizer, _make_messages(draft, turns))
        return self._encoder.count_tokens([text])[0]

    def _encode(self, draft: _Draft, turns: Sequence[tuple[str, str]]) -> Document:
        has_template = self._encoder.has_template
        record = {MESSAGES: _make_messages(draft, turns)} if has_template else {PARTS: _make_parts(draft, turns)}
        try:
            return self._encoder.encode(record)
        except BadRecord as error:
            raise CtxextError(
                f"A conversation about the data {error}.", hint="Use a model with another chat template."
            ) from error

    def _measure_overhead(self, language: Language) -> tuple[int, int]:
        """Return the number of tokens around a conversation and around each question with its answer."""
        if language.name not in self._overheads:
            word = language.answer
            (num_tokens,) = self._encoder.count_tokens([word])
            draft = _Draft(language, 0, "", word, "", [])
            first, second = (len(self._encode(draft, [(word, word)] * count).ids) for count in (1, 2))
            per_turn = second - first - 2 * num_tokens
            self._overheads[language.name] = first - per_turn - 3 * num_tokens, per_turn
        return self._overheads[language.name]


def _count_asked(num_turns: int) -> int:
    """Return the number of facts with a question: three in five turns."""
    return max(1, num_turns * 3 // 5)


def _count_cost(costs: Sequence[tuple[int, ...]], per_turn: int, quote_cost: int) -> int:
    """Return the number of tokens of facts, of the questions about some of them, and of other questions."""
    num_asked = _count_asked(len(costs))
    of_facts = sum(cost[0] + 1 for cost in costs)
    of_questions = sum(cost[1] + cost[2] + per_turn for cost in costs[:num_asked])
    return of_facts + of_questions + (len(costs) - num_asked) * quote_cost


def _make_messages(draft: _Draft, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Return the messages of a conversation; the first one contains the text."""
    closing = f"{draft.closing}{draft.language.space}" if draft.closing else ""
    head = "\n\n".join([*([draft.opening] if draft.opening else []), draft.text, closing])
    messages = []
    for question, answer in turns:
        messages += [{"role": "user", "content": head + question}, {"role": "assistant", "content": answer}]
        head = ""
    return messages


def _make_parts(draft: _Draft, turns: Sequence[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Return the parts of a conversation as plain text, for models without a chat template."""
    language, parts = draft.language, list[tuple[str, bool]]()
    head = "\n\n".join([*([draft.opening] if draft.opening else []), draft.text, ""])
    for question, answer in turns:
        parts.append((f"{head}{language.question}{language.space}{question}\n{language.answer}", False))
        parts.append((f"{language.space}{answer}\n", True))
        head = ""
    return parts
