"""The description of another trainer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from ctxext.finetune.trainers.run import Run

ALL_FORMATS = frozenset({"text", "chat", "sharegpt", "alpaca"})


@dataclass(frozen=True)
class Trainer:
    """A trainer, with the function that writes its configuration.

    Attributes:
        name: Its name on the command line.
        title: Its name.
        version: The release that this file was written for and checked with.
        command: The command that trains, with FILE for the configuration, and {stage} for pt (texts) or sft (answers).
        write: Returns the configuration.
        formats: The formats of records that it reads as ctxext does.
        extras: Options with an equivalent here, although most trainers have none.
        whole_alpha: Whether the scaling of the LoRA matrices must be an integer.
        mixes_formats: Whether one run may read records of several formats.
    """

    name: str
    title: str
    version: str
    command: str
    write: Callable[[Run], str]
    formats: frozenset[str] = ALL_FORMATS
    extras: frozenset[str] = frozenset()
    whole_alpha: bool = False
    mixes_formats: bool = False


def write_yaml(content: dict[str, Any]) -> str:
    """Return a configuration as YAML, without the keys that have no value."""
    used = {key: value for key, value in content.items() if value is not None}
    return yaml.safe_dump(used, sort_keys=False, allow_unicode=True)
