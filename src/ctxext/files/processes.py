"""Several processes, as `accelerate launch` starts them: who am I, and wait for the others."""

import contextlib
import datetime
import os
from collections.abc import Iterator


def rank() -> int:
    """This process's number."""
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    """How many processes share the work."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait_for_everyone(device: str) -> None:
    """Return once every process has come here; a process may be hours behind."""
    if num_processes() > 1:
        from accelerate import PartialState

        PartialState(cpu=device == "cpu", timeout=datetime.timedelta(days=30)).wait_for_everyone()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside this context the process shares its work with no other, whatever started it."""
    before = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
