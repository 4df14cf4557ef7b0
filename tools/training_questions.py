"""Create training data with questions: conversations about real text with hidden facts, as JSON lines.

    python tools/training_questions.py smollm2 manuals questions.jsonl --sizes 1k:240,2k:120

Each record is one conversation: a stretch of a manual with made-up facts in it, and questions about it. Three in five
ask for a fact, among others of the same form; the others ask how a passage of the manual goes on. Neither phrasings
nor names are those of `ctxext eval`, whose text, the prose of a grammar, is not used either.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ctxext.files.length import parse_length


def words_of(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


FIRST = words_of("""
Aino Bela Chidi Dilnoza Esteban Fumiko Gudrun Hamid Ilse Jomo Kavita Lars Mircea Noor Omar Priya Quentin Rashid
Sana Tariq
""")
LAST = words_of("""
Abe Barros Castillo Demir Eriksen Farah Gupta Haugen Ito Jovanovic Kowalski Lindqvist Moreau Novak Okafor Petrov
""")
THINGS = words_of("""
pump boiler printer elevator turbine freezer scanner generator conveyor antenna furnace telescope crane router
centrifuge loom
""")
KINDS = words_of("""
northern southern upper lower main spare second third rear front
""")
TOPICS = words_of("""
beekeeping volcanoes railways sonnets glaciers taxes orchids chess tides alchemy bread comets ferns opera dyes
sundials
""")
WORDS = words_of("""
otter maple cobalt falcon walnut saffron badger juniper topaz heron thistle amber-fox quartz lynx poppy cedar
""")

FACTS = [
    (
        "Note that the locker of {person} has the combination {number}.",
        "Which combination does the locker of {person} have?",
        "The locker of {person} has the combination {number}.",
    ),
    (
        "By the way, {person} lives in house {number}.",
        "In which house does {person} live?",
        "{person} lives in house {number}.",
    ),
    (
        "In case of a fault of the {thing}, call extension {number}.",
        "Which extension is to be called if the {thing} fails?",
        "If the {thing} fails, call extension {number}.",
    ),
    (
        "The serial number of the {thing} ends in {number}.",
        "What does the serial number of the {thing} end in?",
        "It ends in {number}.",
    ),
    (
        "The book on {topic} stands on shelf {number}.",
        "On which shelf does the book on {topic} stand?",
        "The book on {topic} stands on shelf {number}.",
    ),
    ("The course in {topic} costs {number} crowns.", "How much does the course in {topic} cost?", "{number} crowns."),
    (
        "The password of {person} was changed to {word}-{number}.",
        "What was the password of {person} changed to?",
        "The password of {person} was changed to {word}-{number}.",
    ),
    (
        "{person} keeps the key of the {thing} under the {word} sign.",
        "Under which sign does {person} keep the key of the {thing}?",
        "Under the {word} sign.",
    ),
    (
        "The visitor who asked about {topic} was {person}.",
        "Who was the visitor who asked about {topic}?",
        "The visitor who asked about {topic} was {person}.",
    ),
    (
        "Parcel {number} was sent to {person}.",
        "Which parcel was sent to {person}?",
        "Parcel {number} was sent to {person}.",
    ),
]
OPENINGS = [
    "",
    "Read the following text.\n\n",
    "Here is a document. I will ask about it.\n\n",
    "Text:\n",
    "Keep what this text says in mind.\n\n",
]
CLOSINGS = ["\n\n", "\n\nQuestion: ", "\n\nThat was the text. ", "\n"]
QUOTES = [
    "Which words follow “{before}” in the text?",
    "How does the passage go on that begins with “{before}”?",
    "Continue this quotation from the text: “{before}”",
]
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n\s*\n")


def facts_of(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Return facts with their questions and answers, in one to three forms; no two facts share a name."""
    forms = rng.sample(FACTS, rng.randint(1, 3))
    people = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], count)
    things = rng.sample([f"{kind} {thing}" for kind in KINDS for thing in THINGS], count)
    topics = rng.sample(
        [topic + more for topic in TOPICS for more in ("", " for beginners", " at night", " in winter")], count
    )
    facts = []
    for person, thing, topic in zip(people, things, topics, strict=True):
        number = str(rng.randrange(10 ** rng.choice([2, 3, 4, 4, 5])) + 10)
        words = {"person": person, "thing": thing, "topic": topic, "number": number, "word": rng.choice(WORDS)}
        fact, question, answer = (text.format(**words) for text in rng.choice(forms))
        facts.append((fact, question, answer))
    return facts


def conversation(rng: random.Random, texts: Sequence[list[str]], tokenizer: Any, length: int) -> dict[str, Any]:
    """Return a conversation of about `length` tokens, and at most that many."""
    num_turns = 8 + length // 200
    facts = facts_of(rng, num_turns)
    asked = facts[: num_turns * 3 // 5]
    text = rng.choice(texts)
    at = rng.randrange(max(1, len(text) - length // 20))
    room = length - 54 * num_turns - 60
    units: list[str] = []
    for unit in text[at:]:
        room -= len(tokenizer(unit)["input_ids"]) + 1
        if room < 0:
            break
        units.append(unit)
    long_units = [unit for unit in units if len(unit.split()) > 13]
    quotes = []
    for unit in rng.sample(long_units, min(len(long_units), num_turns - len(asked))):
        words = unit.split()
        quotes.append((rng.choice(QUOTES).format(before=" ".join(words[:7])), " ".join(words[7:25])))
    turns = [*((question, answer) for _, question, answer in asked), *quotes]
    rng.shuffle(turns)
    for fact, _, _ in facts:
        units.insert(rng.randint(0, len(units)), fact)
    messages: list[dict[str, str]] = []
    head = rng.choice(OPENINGS) + " ".join(units) + rng.choice(CLOSINGS)
    for question, answer in turns:
        messages += [{"role": "user", "content": head + question}, {"role": "assistant", "content": answer}]
        head = ""
    while len(tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]) > length:
        messages = messages[:-2]
    return {"messages": messages}


def main() -> None:
    """Write the conversations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder with the tokenizer")
    parser.add_argument("texts", type=Path, help="a folder of manuals")
    parser.add_argument("out", type=Path, help="the JSON lines to write")
    parser.add_argument("--sizes", default="1k:900,2k:300,4k:100", help="tokens of conversations, and how many of them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    files = sorted(file for file in arguments.texts.rglob("*") if file.is_file())
    texts = [
        [" ".join(unit.split()) for unit in _SENTENCE_END.split(file.read_text("utf-8")) if unit.strip()]
        for file in files
    ]
    records = []
    for size in arguments.sizes.split(","):
        length, count = size.split(":")
        records += [conversation(rng, texts, tokenizer, parse_length(length)) for _ in range(int(count))]
    with arguments.out.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    main()
