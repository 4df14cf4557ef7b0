"""GGUF files, the format of llama.cpp: their schedule of positions read, checked and rewritten."""

from pathlib import Path

SUFFIX = ".gguf"


def part_paths(path: Path, count: int) -> tuple[Path, ...]:
    """The files of a split model in order, from the name of its first or the name that the whole would have."""
    stem = path.name[: -len(SUFFIX)].removesuffix(f"-00001-of-{count:05d}")
    return tuple(path.with_name(f"{stem}-{part:05d}-of-{count:05d}{SUFFIX}") for part in range(1, count + 1))


def is_gguf(source: str | Path) -> bool:
    """Whether a source names a GGUF file: by its suffix, whether it is there or not."""
    return str(source).lower().endswith(SUFFIX)
