"""GGUF files, the format of llama.cpp: reading, checking and rewriting their RoPE schedule."""

from pathlib import Path

SUFFIX = ".gguf"


def part_paths(path: Path, count: int) -> tuple[Path, ...]:
    """Return the files of a split model in order, from the name of its first or the name of the whole model."""
    stem = path.name[: -len(SUFFIX)].removesuffix(f"-00001-of-{count:05d}")
    return tuple(path.with_name(f"{stem}-{part:05d}-of-{count:05d}{SUFFIX}") for part in range(1, count + 1))


def is_gguf(source: str | Path) -> bool:
    """Return whether a source names a GGUF file, by its suffix alone; the file need not exist."""
    return str(source).lower().endswith(SUFFIX)
