"""The model card: the changes, the commands, loading, serving, results and missing evaluations."""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ctxext.checkpoint.auto_class import auto_class, pipeline_tag
from ctxext.converters.engine_support import MARKS, Serving, exact_arguments, serving_of, source_commands
from ctxext.errors import CtxextError
from ctxext.files.strict import in_markdown, parse_yaml, read_text
from ctxext.files.templates import load_template
from ctxext.files.tensor_files import format_tensor_names
from ctxext.recipes.base import Method
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import parameter_of
from ctxext.recipes.recipe import Recipe, command_options
from ctxext.version import __version__

ANY_ID = "PATH_OR_ID"
RECIPE_FILE = "recipe.yaml"
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
EXTENDED = "EXTENDED"
"""Placeholder in commands for the extended checkpoint before its training."""

_FRONT_MATTER = re.compile(r"\s*---(?:\r\n|\r|\n)([\S\s]*?)(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|$)")
"""The front matter of a card, as in `huggingface_hub.repocard`, which is slower to import than the rest of planning."""
_INHERITED = ("license", "license_name", "license_link", "language", "datasets", "extra_gated_prompt", "inference")
_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class CardResults:
    """Results of a report for a checkpoint, as Markdown, with the figures as `huggingface_hub.EvalResult`."""

    body: str
    command: str
    missing: Sequence[str]
    results: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Content of a model card, as data.

    Attributes:
        source: Public name of the source checkpoint.
        revision: The source's commit on the Hub; None if it was a folder.
        base: Hub id of the base model of the source, if the source is a folder; empty if unknown.
        inherited: Front matter of the source's card, or of the current card.
        recipe: The applied recipe, resolved; None if ctxext did not extend the model.
        model: The configuration of the result.
        cautions: Warnings for the user.
        rewritten: The tensors that a method rewrote, by name.
        training: Record of a fine-tuning; empty if the weights are the source's.
        training_command: The command of the fine-tuning; empty if unknown.
        curve: File name of the plot of its loss; empty if there is none.
        model_id: Name to load the model by.
        is_adapter: Whether the files are a LoRA adapter, which needs its base.
        measured: Results; None if there are none.
    """

    source: str
    revision: str | None
    inherited: Mapping[str, Any]
    recipe: Recipe | None
    model: ModelConfig
    cautions: Sequence[str]
    rewritten: Sequence[str] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    training_command: str = ""
    curve: str = ""
    base: str = ""
    model_id: str = ANY_ID
    is_adapter: bool = False
    measured: CardResults | None = None

    @cached_property
    def serving(self) -> tuple[Serving, ...]:
        """The engines, and their status for the result."""
        return serving_of(self.model)

    @property
    def origin(self) -> str:
        """Name of the source for commands: a Hub id if one is known."""
        return self.source if self.is_adapter or self.model_id == ANY_ID else self.base or self.source

    @property
    def is_public(self) -> bool:
        """Whether readers of a published card can open the origin."""
        return self.revision is not None or self.origin != self.source or self.model_id == ANY_ID

    @property
    def steps(self) -> tuple[Method, ...]:
        """The steps of the recipe; empty without a recipe."""
        return self.recipe.steps if self.recipe else ()

    @property
    def is_extended(self) -> bool:
        """Whether its context was extended; fine-tuning alone does not extend it."""
        return bool(self.steps) or self.model.encoding.is_scaled

    @property
    def needs_code(self) -> bool:
        """Whether it contains modeling code."""
        return any(step.needs_code() for step in self.steps)


def declared_base(config: Mapping[str, Any]) -> str:
    """Return the Hub id in `_name_or_path`, where transformers records the origin of a model; empty if there is none.

    A path is not an id: its form is not USER/NAME, or it exists as a folder.
    """
    name = config.get("_name_or_path")
    if not isinstance(name, str) or not _HUB_ID.fullmatch(name) or re.search(r"\.\.|--|[-.](/|$)", name):
        return ""
    return "" if Path(name).exists() else name


def render(facts: CardFacts) -> str:
    """Render README.md from `card.md.jinja` and the facts."""
    origin = facts.origin
    facts = dataclasses.replace(
        facts,
        source=in_markdown(facts.source),
        cautions=[in_markdown(caution) for caution in facts.cautions],
        training={
            in_markdown(str(key)): in_markdown(value) if isinstance(value, str) else value
            for key, value in facts.training.items()
        },
    )
    filters = {"wrap_command": wrap_command, "format_value": _format_value, "capitalized": _capitalize}
    return load_template("ctxext.converters", "card.md.jinja", **filters).render(
        facts=facts,
        front_matter=yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True, width=1000),
        version=__version__,
        rewritten=", ".join(f"`{name}`" for name in format_tensor_names(facts.rewritten).split(", ")),
        rows=[row for step in facts.steps for row in _step_rows(step)],
        commands=_commands(facts),
        recipe_file=_recipe_file(facts.recipe),
        trust=", trust_remote_code=True" if facts.needs_code else "",
        auto_class=auto_class,
        marks=MARKS,
        engine_commands=_engine_commands(facts),
        unconverted=source_commands(origin, facts.model, facts.serving) if facts.is_public else {},
        lists={"Not evaluated": facts.measured.missing if facts.measured else (), "Limitations": facts.cautions},
        papers=[*dict.fromkeys(f"{step.title}: <{step.paper}>" for step in facts.steps)],
    )


def _capitalize(sentence: str) -> str:
    """Capitalize a sentence, unless it begins with a method's name and a colon."""
    return sentence if ":" in sentence.split()[0] else sentence[0].upper() + sentence[1:]


def card_metadata(folder: Path) -> dict[str, Any]:
    """Read the front matter of the card in a folder; empty if there is no valid one."""
    card = folder / "README.md"
    if not card.is_file():
        return {}
    try:
        block = _FRONT_MATTER.match(read_text(card).removeprefix("\ufeff"))
        front = parse_yaml(block[1], "README.md") if block else {}
    except CtxextError:
        return {}
    return front if isinstance(front, dict) else {}


def front_matter(facts: CardFacts) -> dict[str, Any]:
    """Return the metadata for the Hub: the source's licence and languages, our tags, the base model, the results."""
    inherited = facts.inherited
    listed = inherited.get("tags") or []
    tags = [str(tag) for tag in (listed if isinstance(listed, list) else [listed]) if tag != "config-only"]
    ours = ["ctxext", *(["long-context"] if facts.is_extended else []), *(step.name for step in facts.steps)]
    if facts.needs_code:
        ours.append("custom_code")
    elif not facts.training and not facts.rewritten:
        ours.append("config-only")
    if facts.training:
        ours.append("finetuned")
    if facts.is_adapter:
        ours.append("lora")
    base = facts.base or (facts.source if facts.revision is not None else "")
    # The Hub has no relation for a model with the same weights: its relations all imply changed weights.
    relation = "adapter" if facts.is_adapter else "finetune" if facts.training else ""
    front = {
        **{key: inherited[key] for key in _INHERITED if key in inherited},
        **({"base_model": base} if base else {}),
        **({"base_model_relation": relation} if base and relation else {}),
        "library_name": "peft" if facts.is_adapter else "transformers",
        "pipeline_tag": pipeline_tag(facts.model.config),
        "tags": list(dict.fromkeys([*tags, *ours])),
    }
    if not (facts.measured and facts.measured.results):
        return front
    from huggingface_hub import ModelCardData

    name = facts.model_id.rpartition("/")[2] if facts.model_id != ANY_ID else facts.source.rpartition("/")[2]
    data: Any = ModelCardData(model_name=name, eval_results=list(facts.measured.results), **front)
    return {**front, "model-index": data.to_dict()["model-index"]}


def _commands(facts: CardFacts) -> list[str]:
    """Return the known commands that create, train and evaluate the checkpoint."""
    name = EXTENDED if facts.training or facts.is_adapter else "OUT"
    converted = convert_command(facts.origin, facts.revision, facts.recipe, name) if facts.recipe else ""
    measured = facts.measured.command if facts.measured else ""
    return [command for command in (converted, facts.training_command, measured) if command]


def _engine_commands(facts: CardFacts) -> list[str]:
    """Return the commands for each engine that runs the checkpoint exactly."""
    arguments = exact_arguments(facts.serving)
    place = facts.model_id
    folder = place.rpartition("/")[2] if place != ANY_ID else "FOLDER"
    commands = []
    if "vLLM" in arguments:
        commands.append(["vllm", "serve", place, *arguments["vLLM"]])
    if "llama.cpp" in arguments:
        length = str(facts.model.encoding.usable_length)
        commands += [
            *([["hf", "download", place, "--local-dir", folder]] if place != ANY_ID else []),
            ["python", "convert_hf_to_gguf.py", folder, "--outfile", f"{folder}.gguf"],
            ["llama-server", "-m", f"{folder}.gguf", "-c", length, *arguments["llama.cpp"]],
        ]
    if "MLX" in arguments:
        commands.append(["mlx_lm.chat", "--model", place, *arguments["MLX"]])
    return [shlex.join(command) for command in commands]


def _recipe_file(recipe: Recipe | None) -> str:
    """Return the text of the recipe file if the command refers to one; else an empty string."""
    if recipe is None or not needs_file(recipe):
        return ""
    return yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def _step_rows(step: Method) -> list[str]:
    """Return one table row per parameter of a step, with the help of its option as the meaning."""
    shown = step.to_dict()
    rows = [
        f"| | {name} | {_format_value(shown[name])} | {parameter_of(declared).help} |"
        for declared in dataclasses.fields(step)
        if (name := declared.name) in shown
    ]
    first = (rows or ["| | | | |"])[0].replace("| |", f"| **{step.name}** |", 1)
    return [first, *rows[1:]]


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return (
            f"({len(value)} numbers)" if not isinstance(value[0], list) else f"({len(value)} × {len(value[0])} places)"
        )
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def convert_command(source: str, revision: str | None, recipe: Recipe, out: str = "OUT") -> str:
    """Return the `ctxext convert` line of a recipe, with its parameters as options, or as a file if needed."""
    options = command_options(recipe.to_dict()["steps"]) or ["--recipe", RECIPE_FILE]
    return shlex.join(["ctxext", "convert", source, out, *options, *(["--revision", revision] if revision else [])])


def wrap_command(command: str, width: int = 88) -> str:
    """Wrap a long command into lines that a shell reads as one; each further line begins with an option."""
    lines = [""]
    for word in shlex.split(command):
        quoted = shlex.quote(_UNSEEN.sub("?", word))
        if lines[-1] and len(lines[-1]) + len(quoted) > width and word.startswith("--"):
            lines.append("   ")
        lines[-1] += f" {quoted}" if lines[-1] else quoted
    return " \\\n".join(lines)


def needs_file(recipe: Recipe) -> bool:
    """Return whether options cannot express a recipe."""
    return not command_options(recipe.to_dict()["steps"])
