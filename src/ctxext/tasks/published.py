"""Tasks with the authors' own texts and prompts, read from files that the user downloaded."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ctxext.errors import CtxextError
from ctxext.files.content import sha256_of
from ctxext.tasks.base import RetrievalTask


@dataclass(frozen=True, kw_only=True)
class PublishedTask(RetrievalTask):
    """A task with the authors' prompts, so their number of tokens is only near the length.

    Its first option is the folder with the authors' files.

    Attributes:
        length: The length in tokens that `fit_to_length` was called with.
    """

    download: ClassVar[str]
    """The command that downloads the folder to `DIR`."""
    accepts_file: ClassVar[bool] = False
    """Whether the option may also be a single file."""

    is_written: bool = True
    is_exact: bool = False
    length: int = 0

    def find_folder(self) -> Path:
        """Return the folder with the authors' files, or the file if the task accepts one.

        Raises:
            CtxextError: The option for it is missing, or it does not exist.
        """
        option = self.options[0]
        folder = getattr(self, option)
        if folder is None:
            raise CtxextError(
                f'The task "{self.name}" needs the files of its authors, which ctxext does not contain.',
                hint=f"{self.download} && ctxext eval … --{option.replace('_', '-')} DIR",
            )
        if not (Path(folder).is_dir() or (self.accepts_file and Path(folder).is_file())):
            kind = "file or folder" if self.accepts_file else "folder"
            raise CtxextError(f'There is no {kind} "{folder}".', hint=self.download)
        return Path(folder)

    def find(self, *patterns: str) -> list[Path]:
        """Return the files of the folder that match the first possible pattern, in order, or the single file.

        Raises:
            CtxextError: There is none.
        """
        folder = self.find_folder()
        if folder.is_file():
            return [folder]
        for pattern in patterns:
            if files := _list_files(folder, pattern):
                return files
        raise CtxextError(f'"{folder}" contains no file {patterns[-1]}.', hint=self.download)


@functools.lru_cache(maxsize=32)
def _list_files(folder: Path, pattern: str) -> list[Path]:
    found = ((path, path.relative_to(folder).parts) for path in folder.rglob(pattern))
    # `hf download` leaves files in .cache.
    return sorted(path for path, parts in found if not any(part.startswith(".") for part in parts))


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of the data files in a folder."""
    if folder.is_file():
        return sha256_of(folder)
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if (
            path.is_file()
            and path.suffix in (".json", ".jsonl", ".parquet", ".arrow", ".txt", ".py")
            and name.parts[0][0] != "."
        ):
            digest.update(f"{name.as_posix()}\0{sha256_of(path)}\n".encode())
    return digest.hexdigest()
