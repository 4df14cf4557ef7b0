"""Tasks with the authors' own texts and prompts, read from a folder that the user downloaded."""

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

    Its only option is the folder with the authors' files.

    Attributes:
        length: The length in tokens that `fit_to_length` was called with.
    """

    download: ClassVar[str]
    """The command that downloads the folder to `DIR`."""

    is_written: bool = True
    is_exact: bool = False
    length: int = 0

    def find_folder(self) -> Path:
        """Return the folder with the authors' files.

        Raises:
            CtxextError: The option for it is missing, or it is not a folder.
        """
        (option,) = self.options
        folder = getattr(self, option)
        if folder is None:
            raise CtxextError(
                f'The task "{self.name}" needs the files of its authors, which ctxext does not contain.',
                hint=f"{self.download} && ctxext eval … --{option} DIR",
            )
        if not Path(folder).is_dir():
            raise CtxextError(f'There is no folder "{folder}".', hint=self.download)
        return Path(folder)

    def find(self, pattern: str) -> list[Path]:
        """Return the files of the folder that match a pattern, in order.

        Raises:
            CtxextError: There is none.
        """
        if files := _list_files(self.find_folder(), pattern):
            return files
        raise CtxextError(f'"{self.find_folder()}" contains no file {pattern}.', hint=self.download)


@functools.lru_cache(maxsize=32)
def _list_files(folder: Path, pattern: str) -> list[Path]:
    found = ((path, path.relative_to(folder).parts) for path in folder.rglob(pattern))
    # `hf download` leaves files in .cache.
    return sorted(path for path, parts in found if not any(part.startswith(".") for part in parts))


def digest_of(folder: Path) -> str:
    """Return the SHA-256 of the names and contents of the data files in a folder."""
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
