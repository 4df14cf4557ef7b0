"""Several processes, as `accelerate launch` starts them: who am I, and wait for the others."""

import datetime
import os


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
