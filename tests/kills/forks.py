"""The other end of `fork_server.py`, and what commands that it runs work on."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hand_made import make_tokenizer, tiny_llama
from hub_server import hub
from tiny_base import make_base, write_jsonl

TOKEN = "hf_goodgoodgood"
MSPOE = ("-m", "mspoe", "--head-order", "fixed", "--first-layer", "0")


class Server:
    """Runs command lines in forks of one process."""

    def __init__(self, environment: dict[str, str] | None = None, *, light: bool = False) -> None:
        words = [sys.executable, str(Path(__file__).with_name("fork_server.py")), *(["light"] * light)]
        piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(words, env={**os.environ, **(environment or {})}, **piped)

    def __call__(self, words: list[object], **asked: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"words": [str(word) for word in words], **asked}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Let it go."""
        self.process.stdin.close()
        self.process.wait()


def lay_models(place: Path) -> Path:
    """Make a source and a converted base, data to train it on, and a model with a tokenizer for questions."""
    make_base(place)
    write_jsonl(place / "numbers.jsonl")
    tiny_llama(max_position_embeddings=320).save_pretrained(place / "tiny")
    make_tokenizer().save_pretrained(place / "tiny")
    return place


@contextlib.contextmanager
def server_with_hub(place: Path) -> Iterator[Server]:
    """Start a server with its own Hub for the commands."""
    (place / "hub").mkdir()
    with hub({}, place / "hub") as running:
        running.tokens = {TOKEN: "me"}
        started = Server({**running.settings(place / "cache"), "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"})
        started.hub = running
        yield started
        started.end()
