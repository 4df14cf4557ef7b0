"""Published recipes of training: options by name, with their source."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ctxext.files.strict import parse_yaml


@dataclass(frozen=True)
class Preset:
    """A recipe of training.

    Attributes:
        description: What it trains, in a sentence or two.
        source: Where it was published.
        memory: What it needs.
        options: Options of `ctxext finetune` by their words.
        convert: The command that makes the model it starts from; empty for a model as it is.
        after: What follows the training; empty where nothing does.
    """

    description: str
    source: str
    memory: str
    options: Mapping[str, Any]
    convert: str = ""
    after: str = ""

    def lines(self) -> list[str]:
        """What it is and needs, for people; its source comes first."""
        words = [f"--{word}" if value is True else f"--{word} {value}" for word, value in self.options.items()]
        after = [f"then     {self.after}"] if self.after else []
        return [
            self.description,
            f"source   {self.source}",
            *([f"first    {self.convert}"] if self.convert else []),
            f"options  {' '.join(words)}",
            *after,
            f"memory   {self.memory}",
        ]


def presets() -> dict[str, Preset]:
    """The recipes of the package by name."""
    folder = resources.files("ctxext.finetune") / "presets"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return {
        file.name.removesuffix(".yaml"): Preset(**parse_yaml(file.read_text(encoding="utf-8"), file.name))
        for file in files
    }
