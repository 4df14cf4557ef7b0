"""Questions are decided by --seed alone, whatever order Python gives to sets in a process."""

import os
import subprocess
import sys

import pytest

from ctxext.tasks.published import PublishedTask
from ctxext.tasks.registry import RETRIEVAL_TASKS

DRAWN = [name for name, task in RETRIEVAL_TASKS.items() if not isinstance(task, PublishedTask)]

PIECES = """
import hashlib, random, sys
from ctxext.tasks.settings import Settings
for task in Settings(tasks=tuple(sys.argv[1:])).retrieval_tasks():
    for seed in range(6):
        pieces = task.pieces(random.Random(seed))
        haystack = [text for text, _ in zip(pieces.haystack, range(50))]
        said = repr((pieces.opening, haystack, pieces.needles, pieces.questions)).encode()
        print(task.name, seed, hashlib.sha256(said).hexdigest())
"""


def pieces(seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-c", PIECES, *DRAWN]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return result.stdout.splitlines()


@pytest.mark.thorough
def test_no_question_depends_on_the_hash_seed():
    first, second = pieces("1"), pieces("2")
    assert len(first) >= 6 * len(DRAWN)
    assert [line for line in first if line not in second] == []
