"""Processes that share the work of a run, under `--num-processes`, `accelerate launch` or torchrun."""

import datetime
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.loading import choose_device
from ctxext.errors import CtxextError
from ctxext.files import processes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PAUSE = 0.1
"""Seconds between two looks at whether others have finished."""
_CONNECTING = datetime.timedelta(minutes=5)
"""Time for all processes to start."""
_GRACE = 1.0
"""Seconds for a process to print its error."""

_runs = itertools.count()


@dataclass
class Team:
    """The processes of a run; all create it at the same point. A single process takes all work and never waits.

    The processes exchange counts and short values through torch's key-value store. There is no process group: only at
    the end, the first process waits for the others.

    Attributes:
        rank: The number of this process.
        size: The number of processes.
    """

    rank: int = field(default_factory=processes.rank)
    size: int = field(default_factory=processes.num_processes)

    def __post_init__(self) -> None:
        self._run, self._counts = next(_runs) if self.size > 1 else 0, dict[str, int]()

    @property
    def is_first(self) -> bool:
        """Whether this process starts the log, shows progress and writes the report."""
        return self.rank == 0

    def add(self, name: str, number: int = 0) -> int:
        """Add to a common count, and return the new count."""
        if self.size == 1:
            self._counts[name] = self._counts.get(name, 0) + number
            return self._counts[name]
        with _explain_lost_connection():
            return int(_connect().add(f"ctxext {self._run} {name}", number))

    def takes(self, work: str) -> bool:
        """Return whether this process is the first to take some work, which it then does."""
        return self.add(f"work {work}", 1) == 1

    def share(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value that the first process makes, as JSON; all raise its error if there is one."""
        if self.size == 1:
            return make()
        key = f"ctxext {self._run} value {name}"
        if self.is_first:
            try:
                content = {"value": make()}
            except CtxextError as error:
                content = {"message": error.message, "hint": error.hint}
            with _explain_lost_connection():
                _connect().set(key, json.dumps(content))
            self.add(f"made {name}", 1)
        else:
            self.wait(f"made {name}", 1)
            with _explain_lost_connection():
                content = json.loads(_connect().get(key))
        if "message" in content:
            raise CtxextError(content["message"], content["hint"])
        return content["value"]

    def agree(self, name: str, number: int) -> int:
        """Return the number of the process that calls this function first: the free memory may differ."""
        if self.size == 1:
            return number
        with _explain_lost_connection():
            return int(_connect().compare_set(f"ctxext {self._run} number {name}", "", str(number)))

    def wait(self, name: str, count: int, watch: Callable[[], None] | None = None) -> None:
        """Wait until a common count reaches a number, which may take hours; call `watch` meanwhile."""
        while self.add(name) < count:
            if watch is not None:
                watch()
            time.sleep(_PAUSE)


def take_device(device: str) -> None:
    """Make the device of this process the current one of torch; raise if there are fewer devices than processes."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if count == 1 or (chosen := choose_device(device)).type == "cpu":
        return
    import torch

    module = torch.get_device_module(chosen.type)
    if ":" in device:
        raise CtxextError(f'{count} processes cannot share the device "{device}".', hint=f"Use --device {chosen.type}.")
    if count > (number := module.device_count()):
        raise CtxextError(
            f"This machine has fewer devices of type {chosen.type} ({number}) than processes ({count}).",
            hint=f"Start at most {number}, or use --device cpu.",
        )
    module.set_device(chosen)


def is_first_error() -> bool:
    """Return whether this process reports an error: several processes often fail alike, for example without memory.

    Another process waits until the error is printed, because the launcher ends all processes when one has failed.
    """
    if processes.num_processes() == 1:
        return True
    try:
        is_first = _connect().add("ctxext errors", 1) == 1
    except (CtxextError, RuntimeError):
        return True
    if not is_first:
        time.sleep(_GRACE)
    return is_first


@functools.cache
def _connect() -> "Store":
    with _explain_lost_connection():
        from torch.distributed.rendezvous import rendezvous

        store: Store = next(rendezvous("env://", timeout=_CONNECTING))[0]
        return store


@contextmanager
def _explain_lost_connection() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CtxextError(
            f"Lost the connection to the other processes: {first}",
            hint="See their errors. Start all with --num-processes, accelerate launch or torchrun.",
        ) from error
