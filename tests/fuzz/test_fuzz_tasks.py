"""Malformed files of tasks, drawn with a seed: one clear line each, in seconds and with little memory."""

import gzip
import json
import os
import random
import resource
import sys
import time
from pathlib import Path

import pytest

from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.tasks.longppl import _read_file
from ctxext.tasks.retrieval import check_fits, make_questions
from ctxext.tasks.settings import Settings
from hand_made import make_tokenizer

SECONDS, BYTES = 5, 300 << 20
BOOK = "\n".join(f"Sentence {number} follows the other one." for number in range(400))
DOCUMENT = {"title": "t", "text": "Ann has a key.", "isgold": True}
CONTENTS = {
    "documents": {"question": "Who?", "answers": ["Ann"], "ctxs": [DOCUMENT, {"title": "u", "text": "Bob."}]},
    "squad": {
        "data": [{"paragraphs": [{"context": "Ann.", "qas": [{"question": "Who?", "answers": [{"text": "Ann"}]}]}]}]
    },
    "hotpot": [{"question": "Who?", "answer": "Ann", "supporting_facts": [["a", 0]], "context": [["a", ["Ann."]]]}],
    "words": [f"word{number}" for number in range(60)],
    "essays": {"text": BOOK},
    "nolima": [
        {
            **{"id": "0401", "needle": "Then {CHAR} saw {1}.", "questions": {"onehop": "Who saw {1}?"}},
            **{"character_set": ["Ann"], "task_template": "{haystack} {question}"},
            "tests": {"T1": {"input_args": ["it"], "gold_answers": ["Ann"]}},
        }
    ],
    "babilong": [{"input": "Ann is here.", "question": "Where?", "target": "kitchen"}],
    "longbench_v2": [
        {
            **{"difficulty": "easy", "length": "short", "question": "Who?", "context": "Ann is here.", "answer": "B"},
            **{f"choice_{letter}": letter for letter in "ABCD"},
        }
    ],
    "prompts": {"qa1": {"instruction": "Do.", "examples": "One.", "post_prompt": "Now."}},
    "key_tokens": {
        **{"sha256": "0" * 64, "characters": 9, "evaluator": "e", "tokens": 9, "window": 1, "step": 1, "first": 0},
        "spans": [[0, 2], [3, 4]],
    },
}
LINES = ("documents", "key_tokens")
VALUES = [
    *(None, True, 0, -1, 1.5, float("nan"), float("inf"), 10**300, "", " ", "text", "\u2028", "{haystack:>2000000000}"),
    *("{haystack.__class__} {question}", "{0}", "{", "{haystack!r:>99} {question}", "a" * 3_000_000, "a. " * 300_000),
    *([], {}, [[]], [1], [""], {"a": 1}, [None], "Paris", ["Paris"], [["a"]], {"text": []}, "\x00", "The"),
]


def mutate(content, rng):
    """Replace, remove or rename one value at a random place."""
    if isinstance(content, dict | list) and content and rng.random() < 0.95:
        copy = content.copy()
        key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
        chosen = rng.random()
        if chosen < 0.1:
            del copy[key]
        elif chosen < 0.15 and isinstance(copy, dict):
            copy[f"{key}s"] = copy.pop(key)
        else:
            copy[key] = mutate(copy[key], rng)
        return copy
    return rng.choice(VALUES)


def change_bytes(data, rng):
    """Return bytes that no JSON parser or only a careless one accepts."""
    cut = rng.randrange(len(data))
    return rng.choice(
        [
            b"",
            data[:cut],
            data[:cut] + b"\xff" + data[cut:],
            data.decode().encode("utf-16"),
            data.decode().encode("utf-32"),
            gzip.compress(data),
            b"\xef\xbb\xbf\xef\xbb\xbf" + data,
            b"[" * 200_000,
            b'{"a":' * 100_000,
            b"[" + data + b"]",
            data + b"\n" + data + b"]",
            b'{"a": 1, "a": 2}',
            b"9" * 10_000,
            b'{"answers": ' + b"9" * 5000 + b"}",
            b"[" + b"{}," * 2_000_000 + b"{}]",
            b'["' + b"\\ud800" + b'"]',
            b"\x00" * 1000,
            b'"' + b"a" * 9_000_000 + b'"',
        ]
    )


def draw(seed, folder):
    """Write a file of a task that is probably malformed; return the name of its kind."""
    rng = random.Random(seed)
    name = rng.choice(list(CONTENTS))
    content = CONTENTS[name]
    is_mutated = rng.random() < 0.8
    if is_mutated:
        content = mutate(content, rng)
    text = repr(content) if name == "prompts" else json.dumps(content)
    data = (f"DEFAULT_PROMPTS = {text}" if name == "prompts" else text).encode()
    if not is_mutated:
        data = change_bytes(data, rng)
    files = {
        "nolima": "nolima/needle_set.json",
        "babilong": "babilong/qa1/0k.json",
        "prompts": "babilong/prompts.py",
    }
    for kind, path in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        good = json.dumps(CONTENTS[kind]) if kind != "prompts" else f"DEFAULT_PROMPTS = {CONTENTS[kind]!r}"
        (folder / path).write_text(good)
    (folder / "nolima" / "rand_shuffle").mkdir()
    (folder / "nolima" / "rand_shuffle" / "b.txt").write_text(BOOK)
    path = folder / files.get(name, f"{name}.json{'l' * (name in LINES)}")
    if rng.random() < 0.05:
        path.unlink(missing_ok=True)
        rng.choice([os.mkfifo, Path.mkdir])(path)
    else:
        path.write_bytes(data)
    return name, path


TASKS = {
    **{"squad": "ruler-qa-1", "hotpot": "ruler-qa-2", "words": "niah-single-2", "essays": "niah-single-2"},
    **{"prompts": "babilong-qa1", "babilong": "babilong-qa1", "longbench_v2": "longbench-v2"},
}


def _use(name, path):
    """Read a file as an evaluation does, and make and score a prompt."""
    if name == "key_tokens":
        _read_file(path)
        return
    folder = next((parent for parent in path.parents if parent.name in ("nolima", "babilong")), path)
    option = {"prompts": "babilong"}.get(name, name)
    settings = Settings(tasks=(TASKS.get(name, name),), samples=1, depths=(0.5,), **{option: folder})
    settings.to_dict()
    (task,) = settings.retrieval_tasks()
    encoder = Encoder(make_tokenizer())
    check_fits(task, encoder, [600], settings)
    for prompt in make_questions(task, encoder, 600, [0], settings)[0]:
        assert not task.grade("Zyx.", prompt), "an answer without any word of the file is right"


def use(name, path):
    """Return the error of a file; None if it is accepted."""
    try:
        _use(name, path)
    except CtxextError as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(120))
def test_a_malformed_file_is_one_clear_line(seed, tmp_path):
    name, path = draw(seed, tmp_path)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if error := use(name, path):
        assert "\n" not in error.message
        assert len(error.message) < 500
    assert time.process_time() - began < SECONDS
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < BYTES


@pytest.mark.thorough
def test_most_files_are_refused(tmp_path):
    """The files are malformed, and not only changed."""
    refused = 0
    for seed in range(60):
        (tmp_path / str(seed)).mkdir()
        name, path = draw(seed, tmp_path / str(seed))
        refused += use(name, path) is not None
    assert refused > 40


def test_unchanged_files_are_read(tmp_path):
    for name, content in CONTENTS.items():
        folder = tmp_path / name
        folder.mkdir()
        for seed in range(2000):
            if random.Random(seed).choice(list(CONTENTS)) == name:
                _, path = draw(seed, folder)
                break
        if path.is_dir():
            path.rmdir()
        text = repr(content) if name == "prompts" else json.dumps(content)
        path.write_text(f"DEFAULT_PROMPTS = {text}" if name == "prompts" else text)
        assert use(name, path) is None, name


def test_questions_of_one_article_share_their_related_documents(tmp_path):
    """An article of n paragraphs and questions takes memory in proportion to n, not to n²."""
    paragraphs = [
        {"context": f"Ann {n}.", "qas": [{"question": "Who?", "answers": [{"text": "Ann"}]}]} for n in range(3000)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    settings = Settings(tasks=("ruler-qa-1",), squad=path)
    began = time.process_time()
    (task,) = settings.retrieval_tasks()
    assert time.process_time() - began < SECONDS
    assert len({id(question.related) for question in task.question_set.questions}) == 1
