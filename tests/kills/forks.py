"""The other end of `fork_server.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


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
