"""GGUF files, the format of llama.cpp: their schedule of positions read, checked and rewritten."""

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(source: str | Path) -> bool:
    """Whether a source names a GGUF file: by its suffix, whether it is there or not."""
    return str(source).lower().endswith(SUFFIX)
