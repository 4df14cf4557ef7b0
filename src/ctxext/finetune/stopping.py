"""Ctrl-C and SIGTERM during training: save, then stop."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from ctxext.files.offline import forbid_network
from ctxext.files.processes import Terminated, raise_terminated

with forbid_network():
    from transformers import TrainerCallback


class StopAfterStep(TrainerCallback):  # type: ignore[misc]
    """Context in which Ctrl-C and SIGTERM stop the training after the current sequences, with a save.

    If the step has more sequences, it is abandoned, as a grace period may be shorter than a step: the last complete
    step is saved, with its final random state, and a resumed run repeats the abandoned one.

    A second Ctrl-C ends it at once. A second SIGTERM has no effect: launchers forward the signal that the scheduler
    also sends to every process, and SIGKILL follows after the grace period.
    """

    def __init__(self) -> None:
        self.received = 0  # The number of the signal that stops the training; 0 before.
        self._before: dict[int, Any] = {}
        self._saved_step = 0
        self._random: dict[str, torch.Tensor] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, replaceable in _REPLACEABLE.items():
            if signal.getsignal(number) in replaceable:
                self._before[number] = signal.signal(number, self._request_stop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in list(self._before):
            self._restore(number)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        self.received = max(self.received, number)
        self._restore(signal.SIGINT)

    def _restore(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step that the run resumes from: it is already saved."""
        self._saved_step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the random state, for a save of the step before."""
        self._random = {"cpu": torch.get_rng_state()}
        if args.device.type != "cpu":
            self._random["device"] = torch.get_device_module(args.device).get_rng_state()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Abandon the step if a signal was received, and save the one before."""
        if not self._is_stopping(args):
            return
        torch.set_rng_state(self._random["cpu"])
        if "device" in self._random:
            torch.get_device_module(args.device).set_rng_state(self._random["device"])
        control.should_training_stop = True
        control.should_save = state.global_step > self._saved_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save and stop if a signal was received."""
        if self._is_stopping(args):
            control.should_save = control.should_training_stop = True

    def _is_stopping(self, args: Any) -> bool:
        """Return whether any process received a signal: it may reach one before the others."""
        self.received = largest_of_processes(self.received, args)
        return bool(self.received)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the saved step."""
        self._saved_step = state.global_step

    def check(self, *, is_complete: bool) -> None:
        """Raise if the run was stopped; after SIGTERM there is no time for the work after the last step."""
        if self.received == signal.SIGTERM:
            raise Terminated
        if self.received and not is_complete:
            raise KeyboardInterrupt


def largest_of_processes(number: int, args: Any) -> int:
    """Return the largest of the numbers of all processes of a training, the same in each."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return number
    largest = torch.tensor(number, device=args.device)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return int(largest)


_REPLACEABLE: dict[int, tuple[Any, ...]] = {
    signal.SIGINT: (signal.default_int_handler,),
    signal.SIGTERM: (signal.SIG_DFL, raise_terminated),
}
"""Signals and their replaceable handlers; other handlers belong to the calling program."""
