"""Loading a tokenizer from untrusted files: it is tried once, and any failure of its library becomes a CtxextError."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError

_PANIC = "PanicException"
"""The class that Rust libraries raise instead of an Exception; it cannot be imported."""

_TRIAL = "A word, 1 é\n\n  two"
_HINT = "Are its files whole, and those of this model?"


def open_tokenizer(folder: Path | str, **more: Any) -> Any:
    """Load the tokenizer of a checkpoint and try it on a few words.

    Args:
        folder: The checkpoint.
        more: Further arguments of transformers' from_pretrained.

    Raises:
        CtxextError: Its library panics while it loads, or cannot tokenize. What transformers raises is passed through.
    """
    from transformers import AutoTokenizer

    with _panics_silenced():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **more)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise _failed("The tokenizer cannot be loaded", error) from error
        with failures_in_one_line("The tokenizer fails"):
            tokenizer(_TRIAL, verbose=False)
    return tokenizer


@contextlib.contextmanager
def failures_in_one_line(what: str) -> Iterator[None]:
    """Turn any failure of a tokenizer into a CtxextError: its library panics, and has no class for its errors.

    Raises:
        CtxextError: Anything but an exception that ends the process is raised in the context.
    """
    try:
        yield
    except CtxextError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise _failed(what, error) from error


def _failed(what: str, error: BaseException) -> CtxextError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CtxextError(f"{what}: {lines[0]}", hint=_HINT)


@contextlib.contextmanager
def _panics_silenced() -> Iterator[None]:
    """Suppress the backtrace of a Rust library, which bypasses sys.stderr."""
    try:
        sys.stderr.flush()
        stderr = os.dup(2)
    except (OSError, ValueError, AttributeError):  # Standard error is closed.
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  Its descriptor is all that is wanted.
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
