"""A tokenizer from a stranger's files: loaded and tried once, and whatever its library does then is one line."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ctxext.errors import CtxextError

_PANIC = "PanicException"
"""The class that Rust libraries raise instead of an Exception; none of them hands it out."""

_TRIAL = "A word, 1 é\n\n  two"
_HINT = "Are its files whole, and those of this model?"


def open_tokenizer(folder: Path | str, **more: Any) -> Any:
    """The tokenizer of a checkpoint, which has tokenized a few words.

    Args:
        folder: The checkpoint.
        more: What transformers' from_pretrained takes beside.

    Raises:
        CtxextError: its library panics while it loads, or cannot tokenize. What transformers raises is passed through.
    """
    from transformers import AutoTokenizer

    with _panics_silenced():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **more)
        except BaseException as error:
            if type(error).__name__ != _PANIC:
                raise
            raise _failed("The tokenizer cannot be loaded", error) from error
        with failures_told("The tokenizer fails"):
            tokenizer(_TRIAL, verbose=False)
    return tokenizer


@contextlib.contextmanager
def failures_told(what: str) -> Iterator[None]:
    """Say in one line that a tokenizer fails: its library has no class of its own for what it raises, and panics.

    Raises:
        CtxextError: whatever is raised in here, but for what ends the process.
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
    """No backtrace of a Rust library, which writes it past sys.stderr, until this is over."""
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):  # There is no such stream.
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  Its descriptor is all that is wanted.
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
