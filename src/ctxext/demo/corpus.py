"""The training text of the demo checkpoint: documents of an exact number of tokens, full of facts and questions.

Half of the documents are evaluation prompts with one question each. The others contain many facts and questions:
most of their tokens teach retrieval. Keys and values are random, so that no answer can be memorized. Fine-tuning
uses long documents for any tokenizer.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, cycle, islice
from typing import Any

from ctxext.data import prose
from ctxext.data.encoding import Encoder, no_tokens
from ctxext.data.prompt import Pieces
from ctxext.tasks import documents, kv
from ctxext.tasks.base import RetrievalTask
from ctxext.tasks.documents import Documents, random_document
from ctxext.tasks.kv import KeyValue
from ctxext.tasks.needle import OPENING, PHRASINGS, Needle, PassKey

Encode = Callable[[str], list[int]]

TASKS: dict[str, tuple[RetrievalTask, float]] = {
    "passkey": (PassKey(), 0.05),
    "needle": (Needle(num_needles=4), 0.12),
    "needle-any": (Needle(num_needles=6, phrasing="any"), 0.08),
    "kv-number": (KeyValue(ids="number"), 0.45),
    "documents-which": (Documents(ask="which"), 0.1),
    "documents-fact": (Documents(ask="fact"), 0.1),
    "kv-uuid": (KeyValue(ids="uuid"), 0.1),
}


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether it belongs to an answer that appears earlier in the text."""

    ids: list[int]
    is_answer: list[bool]


def make_example(
    encode: Encode,
    start: list[int],
    rng: random.Random,
    length: int,
    prompt_share: float,
    variety: float = 1.0,
    first_share: float = 0.0,
) -> Example:
    """Make a training document of exactly `length` tokens.

    Args:
        encode: Encodes a text as token ids, without special tokens.
        start: The first ids of every document.
        rng: The random generator.
        length: The number of tokens, `start` included.
        prompt_share: The share of evaluation prompts, if one fits into the length.
        variety: The share of all numbers and names that facts use. A model learns recall sooner from few of them.
        first_share: The share of evaluation prompts about the first fact, the hardest one to retrieve.
    """
    if rng.random() < prompt_share:
        names = list(TASKS)
        task = TASKS[rng.choices(names, [TASKS[name][1] for name in names])[0]][0]
        depth = 0.0 if rng.random() < first_share else rng.random()
        example = make_prompt(encode, start, rng, length, task, depth)
        if example is not None:
            return example
    shares = (0.25, 0.3, 0.15, 0.25, 0.05) if length < 96 else (0.17, 0.45, 0.28, 0.02, 0.08)
    texts_of = rng.choices((_draw_facts, _draw_records, _draw_search_results, _draw_repeats, _draw_prose), shares)[0]
    ids, is_answer = list(start), [False] * len(start)
    for text, answer in texts_of(rng, length, variety):
        piece = encode(text)
        ids += piece
        is_answer += [answer] * len(piece)
        if len(ids) >= length:
            break
    return Example(ids[:length], is_answer[:length])


def make_prompt(
    encode: Encode, start: list[int], rng: random.Random, length: int, task: RetrievalTask, depth: float
) -> Example | None:
    """Make an evaluation prompt of `length` tokens with its answer; return None if it does not fit.

    It is slightly shorter if the tokenizer returns several tokens for the padding.
    """
    pieces = task.pieces(rng)
    needle, *distractors = [encode(needle) for needle in pieces.needles]
    opening, answer = start + encode(pieces.opening), encode(pieces.questions[0].answer)
    question = encode(pieces.questions[0].question) + answer
    room = length - len(opening) - len(needle) - sum(map(len, distractors)) - len(question)
    if room < 0:
        return None
    units = _fill(encode, pieces, room)
    for distractor in distractors:
        units.insert(rng.randint(0, len(units)), distractor)
    before, after = _split(units, depth, may_cut=not pieces.padding and rng.random() < 0.5)
    pad = encode(pieces.padding)
    padding = pad * ((room - sum(map(len, units)) + sum(map(len, distractors))) // max(1, len(pad)))
    ids = [*opening, *before, *needle, *after, *padding, *question]
    return Example(ids, [False] * (len(ids) - len(answer)) + [True] * len(answer))


def _fill(encode: Encode, pieces: Pieces, room: int) -> list[list[int]]:
    """Return filler units that fill `room` tokens, the last one cut if possible."""
    units: list[list[int]] = []
    for text in pieces.haystack:
        unit = encode(text)
        if len(unit) > room:
            if not pieces.padding:
                units.append(unit[:room])
            return units
        units.append(unit)
        room -= len(unit)
    return units


def _split(units: list[list[int]], depth: float, may_cut: bool) -> tuple[list[int], list[int]]:
    """Return the tokens of the units, split at a depth: between two units, or anywhere."""
    tokens = list(chain.from_iterable(units))
    at = round(depth * len(tokens))
    if not may_cut:
        at = min([0, *accumulate(map(len, units))], key=lambda end: abs(end - at))
    return tokens[:at], tokens[at:]


def _draw_facts(rng: random.Random, length: int, variety: float) -> Iterator[tuple[str, bool]]:
    """Yield sentences with numbers, questions about earlier ones and some filler, in random order."""
    names = _draw_names(rng, variety)
    questions: list[tuple[str, str, str]] = []
    phrasings = rng.sample(list(PHRASINGS.values()), rng.randint(1, len(PHRASINGS)))
    fact_share, filler_share = rng.uniform(0.2, 0.6), rng.uniform(0, 0.25)
    while True:
        if not questions or rng.random() < fact_share:
            key, value, phrasing = next(names), _draw_number(rng, 5, variety), rng.choice(phrasings)
            yield " " + phrasing.fact.format(key=key, value=value), False
            question = "\n" + phrasing.question if rng.random() < 0.6 else " " + phrasing.fact.split(" {value}")[0]
            questions.append((question.format(key=key), f" {value}", rng.choice([".", "\n", ".\n"])))
        elif rng.random() < filler_share:
            yield " " + prose.sentence(rng), False
        else:
            question, answer, end = rng.choice(questions)
            yield question, False
            yield answer, True
            yield end, False


def _draw_records(rng: random.Random, length: int, variety: float) -> Iterator[tuple[str, bool]]:
    """Yield JSON objects, each with many questions about its records."""
    while True:
        # A record of numbers takes about 10 tokens, a question 14; uuids are cut so that several fit.
        if rng.random() < 0.25 and length >= 96:
            num_characters = rng.choice([4, 8, 13, 18, 36] if length >= 256 else [4, 8])
            pairs = islice(KeyValue(ids="uuid").records(rng), max(2, round(length / num_characters / 3)))
            records = {key[:num_characters]: value[:num_characters] for key, value in pairs}
        else:
            count = max(2, round(length * rng.uniform(0.02, 0.07)))
            records = {_draw_number(rng, 3, variety): _draw_number(rng, 3, variety) for _ in range(count)}
        if rng.random() < 0.5 and length >= 128:
            yield kv.OPENING, False
        yield "{" + ",\n ".join(f'"{key}": "{value}"' for key, value in records.items()) + "}\n", False
        # A record repeated in another order is the shortest question: recall starts from those.
        question, end = rng.choice([('\nKey: "{}"\nCorresponding value:', '"\n'), (' "{}":', '",\n')])
        for key in rng.sample(list(records), k=len(records)):
            yield question.format(key), False
            yield f' "{records[key]}', True
            yield end, False


def _draw_search_results(rng: random.Random, length: int, variety: float) -> Iterator[tuple[str, bool]]:
    """Yield documents with numbers, and questions about them."""
    names = _draw_names(rng, variety)
    while True:
        if rng.random() < 0.5 and length >= 128:
            yield documents.OPENING, False
        all_questions: list[tuple[str, str]] = []
        # The question for a number is the hardest; bare documents without other questions are the easiest.
        bare, only_which = rng.random() < 0.5, rng.random() < 0.5
        count = max(2 if length >= 96 else 1, round(length * rng.uniform(0.006, 0.02)))
        for number in rng.sample(range(100, 1000 + 10 * count), count):
            document, questions = random_document(rng, next(names), number, bare=bare)
            yield document.unit(number), False
            all_questions += questions[:1] if only_which else questions
        for question, answer in rng.sample(all_questions, k=len(all_questions)):
            yield f"\nQuestion: {question}\nAnswer:", False
            yield answer, True
            yield "]\n" if "[" in answer else "\n", False


def _draw_repeats(rng: random.Random, length: int, variety: float) -> Iterator[tuple[str, bool]]:
    """Yield a repeated random list, from which recall is learned first."""
    while True:
        count = max(2, round(length * rng.uniform(0.1, 0.4)))
        kind = rng.randrange(4)
        if kind == 0:
            text = " " + " ".join(islice(_draw_names(rng, variety), count // 2 + 1))
        elif kind == 1:
            text = " " + "".join(_draw_number(rng, 3, variety) for _ in range(count))
        elif kind == 2:
            records = ((_draw_number(rng, 3, variety), _draw_number(rng, 3, variety)) for _ in range(count // 8 + 1))
            text = "".join(f' "{key}": "{value}",\n' for key, value in records)
        else:
            text = "".join(f" {prose.person_name(rng)}," for _ in range(count // 3 + 1))
        yield text, False
        yield "\n", False
        yield text, True
        yield "\n", False


def _draw_prose(rng: random.Random, length: int, variety: float) -> Iterator[tuple[str, bool]]:
    """Yield only prose."""
    for sentence in prose.sentences(rng):
        yield " " + sentence, False


def _draw_number(rng: random.Random, num_digits: int, variety: float) -> str:
    """Draw a number in groups of three digits, from a share of all groups."""
    head, rest = min(num_digits, 3), num_digits - 3
    first = 10 ** (head - 1)
    number = str(first + rng.randrange(max(min(30, 9 * first), round(variety * 9 * first))))
    return number + (_draw_number(rng, rest, variety) if rest > 0 else "")


def _draw_names(rng: random.Random, variety: float) -> Iterator[str]:
    """Yield names of things, all different until every name is used."""
    adjectives, objects = (
        words[: max(12, round(4 * variety * len(words)))] for words in (prose.ADJECTIVES, prose.OBJECTS)
    )
    used: set[str] = set()
    while True:
        name = f"{rng.choice(adjectives)} {rng.choice(objects)}"
        if name not in used or len(used) == len(adjectives) * len(objects):
            used.add(name)
            yield name


_FAR_SHARE = 0.4
_PROMPT_SHARE = 0.1
_TEXT_SHARE = 0.05
_MOST_FACTS = 200


def long_examples(tokenizer: Any, counts: Mapping[int, int], seed: int) -> Iterator[Example]:
    """Yield endless documents like those the demo checkpoint was trained on, of any length.

    Answers are marked, and some of the other tokens: most of those are random and teach nothing, but a model that is
    never trained on them forgets how to write.

    Args:
        tokenizer: A transformers tokenizer.
        counts: The number of documents of each length in tokens, per round of the stream.
        seed: The random seed.
    """
    encoder = Encoder(tokenizer, chat_template=False)
    start = encoder.get_start_tokens()

    @lru_cache(maxsize=20_000)
    def encode_cached(text: str) -> tuple[int, ...]:
        ids = encoder.encode_piece(text)
        if text.strip() and not ids:  # Without tokens, a document would never become long enough.
            raise no_tokens(text)
        return tuple(ids)

    def encode(text: str) -> list[int]:
        return list(encode_cached(text))

    lengths = cycle([length for length, count in sorted(counts.items()) for _ in range(count)])
    for number, length in enumerate(lengths):
        rng = random.Random(f"{seed} long document {number}")
        if rng.random() < _FAR_SHARE:
            example = _make_facts_then_questions(encode, start, rng, length)
        else:
            example = make_example(encode, start, rng, length, _PROMPT_SHARE)
        yield Example(example.ids, [is_answer or rng.random() < _TEXT_SHARE for is_answer in example.is_answer])


def _make_facts_then_questions(encode: Encode, start: list[int], rng: random.Random, length: int) -> Example:
    """Make a document of facts in prose, then only questions: most answers are far back, some at the beginning."""
    phrasing = PHRASINGS[rng.choice(list(PHRASINGS))]
    ids = [*start, *encode(OPENING)]
    facts: list[tuple[str, str]] = []
    fact_share, end = rng.uniform(0.05, 0.5), length * rng.uniform(0.5, 0.9)
    # Enough names for any document: a fact takes more than 16 tokens.
    for key in prose.object_names(rng, min(max(4, length // 16), _MOST_FACTS)):
        value = prose.random_number(rng, 5)
        ids += encode(" " + phrasing.fact.format(key=key, value=value))
        facts.append((key, value))
        while rng.random() > fact_share and len(ids) < end:
            ids += encode(" " + prose.sentence(rng))
        if len(ids) >= end:
            break
    is_answer = [False] * len(ids)
    for key, value in cycle(rng.sample(facts, k=len(facts))):
        question, answer = encode("\n" + phrasing.question.format(key=key)), encode(f" {value}")
        ids += [*question, *answer]
        is_answer += [*[False] * len(question), *[True] * len(answer)]
        if len(ids) >= length:
            return Example(ids[:length], is_answer[:length])
    raise AssertionError("a cycle has no end")
