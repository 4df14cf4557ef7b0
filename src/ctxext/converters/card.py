"""The model card: what was done, the commands, how to load and serve it, what was measured and what was not."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any

import yaml

from ctxext.checkpoint import Checkpoint
from ctxext.converters.commands import RECIPE_FILE, convert_command, needs_file, recipe_yaml
from ctxext.converters.engines import MARKS, Serving
from ctxext.recipes.base import Method
from ctxext.recipes.param import limits_of
from ctxext.recipes.recipe import Recipe
from ctxext.recipes.rotary import Rotary
from ctxext.version import __version__

ANY_ID = "PATH_OR_ID"
_INHERITED = ("license", "license_name", "license_link", "language", "datasets", "extra_gated_prompt", "inference")
_NOTHING_MEASURED = """Nothing yet: this checkpoint **was not evaluated**. A longer window in the configuration is not a \
model that uses it.
`ctxext eval` shows whether it finds things anywhere in the new window and what it lost inside the old one."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a report says of a checkpoint, ready to be shown.

    Attributes:
        body: Findings, tables and pictures, as Markdown.
        command: The command that measured it.
        missing: What was not measured, one sentence each.
        results: The figures as `huggingface_hub.EvalResult`, for the front matter.
    """

    body: str
    command: str
    missing: Sequence[str]
    results: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """Everything a card says, as data.

    Attributes:
        source: The public name of the checkpoint it was made from.
        revision: The source's commit on the Hub; None where it was a folder.
        inherited: Front matter of the source's card, or of the card that stands there now.
        recipe: What was applied, resolved.
        rotary: The encoding of the result.
        serving: Which engines run it.
        cautions: What a user must know.
        training: What fine-tuning changed, in a sentence or several; empty where nothing did.
        model_id: What to load it by.
        is_adapter: Whether only a LoRA adapter is shared, which needs its base.
        measured: Results; None where there are none.
    """

    source: str
    revision: str | None
    inherited: Mapping[str, Any]
    recipe: Recipe
    rotary: Rotary
    serving: Sequence[Serving]
    cautions: Sequence[str]
    training: str = ""
    model_id: str = ANY_ID
    is_adapter: bool = False
    measured: Measured | None = field(default=None)

    @property
    def has_public_source(self) -> bool:
        """Whether the source is a repository that a reader can look up."""
        return self.revision is not None


def render_card(
    source: Checkpoint, recipe: Recipe, rotary: Rotary, serving: Sequence[Serving], cautions: Sequence[str]
) -> str:
    """The README.md of a checkpoint that was just converted.

    Args:
        source: Where it came from.
        recipe: What was applied, resolved.
        rotary: The encoding of the result.
        serving: Which engines can run it.
        cautions: What a user must know.
    """
    known = source.revision or source.name == "demo"
    return render(
        CardFacts(
            source=source.name if known else source.folder.resolve().name,
            revision=source.revision,
            inherited=card_metadata(source),
            recipe=recipe,
            rotary=rotary,
            serving=serving,
            cautions=cautions,
        )
    )


def render(facts: CardFacts) -> str:
    """The whole README.md."""
    template = resources.files("ctxext.converters").joinpath("card.md").read_text(encoding="utf-8")
    front = yaml.safe_dump(front_matter(facts), sort_keys=False, allow_unicode=True, width=1000)
    measured = facts.measured
    commands = [convert_command(facts.source, facts.revision, facts.recipe)]
    commands += [measured.command] if measured else []
    return Template(template).substitute(
        front_matter=front,
        title=f"{facts.source.rpartition('/')[2]}, extended: {facts.recipe.summary()}",
        summary=_summary(facts),
        recipe_rows="\n".join(row for step in facts.recipe.steps for row in _step_rows(step)),
        commands="\n".join(f"$ {command}" for command in commands),
        recipe_file=_recipe_file(facts.recipe),
        model_id=facts.model_id,
        flag=", trust_remote_code=True" if facts.recipe.needs_code else "",
        reason=_reason(facts),
        engines="\n".join(_engine_row(row) for row in facts.serving),
        measured=measured.body if measured else _NOTHING_MEASURED,
        not_measured=_list("Not measured", measured.missing if measured else ()),
        cautions=_list("Mind", facts.cautions),
        papers="\n".join(dict.fromkeys(f"- {step.title}: <{step.paper}>" for step in facts.recipe.steps)),
    )


def _list(title: str, sentences: Sequence[str]) -> str:
    """A section with one point per sentence; nothing where there are none."""
    points = "".join(f"- {sentence[0].upper()}{sentence[1:]}\n" for sentence in sentences)
    return f"\n## {title}\n\n{points}" if points else ""


def card_metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """The front matter of a checkpoint's own card; empty where it has none that can be read."""
    card = checkpoint.folder / "README.md"
    if not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---\n") or "\n---" not in text[4:]:
        return {}
    try:
        front = yaml.safe_load(text[4 : text.index("\n---", 4)])
    except yaml.YAMLError:
        return {}
    return front if isinstance(front, dict) else {}


def front_matter(facts: CardFacts) -> dict[str, Any]:
    """What the Hub reads: the source's licence and languages, our tags, where the model comes from, its results."""
    inherited = facts.inherited
    listed = inherited.get("tags") or []
    tags = [str(tag) for tag in (listed if isinstance(listed, list) else [listed])]
    own = ["ctxext", "long-context", *(step.name for step in facts.recipe.steps)]
    if facts.recipe.needs_code:
        own.append("custom_code")
    elif not facts.training:
        own.append("config-only")
    relation = "adapter" if facts.is_adapter else "finetune"
    front = {
        **{key: inherited[key] for key in _INHERITED if key in inherited},
        **({"base_model": facts.source, "base_model_relation": relation} if facts.has_public_source else {}),
        "library_name": "peft" if facts.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys([*tags, *own])),
    }
    return _with_results(front, facts) if facts.measured and facts.measured.results else front


def _with_results(front: dict[str, Any], facts: CardFacts) -> dict[str, Any]:
    """The front matter with a model index, in the Hub's own form."""
    from huggingface_hub import ModelCardData

    assert facts.measured is not None
    name = facts.model_id.rpartition("/")[2] if facts.model_id != ANY_ID else facts.source.rpartition("/")[2]
    data = ModelCardData(model_name=name, eval_results=list(facts.measured.results), **front).to_dict()
    return {**front, "model-index": data["model-index"]}


def _summary(facts: CardFacts) -> str:
    """What was done, in one paragraph."""
    link = f"[{facts.source}](https://huggingface.co/{facts.source})" if facts.has_public_source else f"`{facts.source}`"
    factor = facts.rotary.parameters.get("factor") or 1.0 if facts.rotary.rope_type == "dynamic" else 1.0
    trained, reach = facts.rotary.trained_length, round(facts.rotary.context_length * factor)
    window = (
        f"trained on {trained} tokens, the model now accepts {reach}"
        if reach != trained
        else f"its window stays at {trained} tokens"
    )
    weights = facts.training or f"The weights are those of {link}, byte for byte."
    origin = f" It was made from {link}." if facts.training else ""
    return (
        f"{weights}{origin} What changed is how positions are encoded: {window}. "
        f"Made with ctxext {__version__}; `ctxext verify` checks that the files are what this card says."
    )


def _reason(facts: CardFacts) -> str:
    """Why the flag is needed, or that it is not."""
    if facts.recipe.needs_code:
        return (
            "It carries two small files of modeling code, because its method is more than a configuration. Without "
            "`trust_remote_code=True` loading fails on purpose: as a stock model it would be silently wrong. "
            "Nothing but transformers is needed to run it."
        )
    return "No custom code: transformers 4.57 or newer reads the configuration as it is, in either major version."


def _step_rows(step: Method) -> list[str]:
    """One row per number of a step, with the help of its option as the meaning."""
    shown = step.to_dict()
    rows = [
        f"| | {name} | {_short(shown[name])} | {limits_of(declared).help} |"
        for declared in dataclasses.fields(step)
        if (name := declared.name) in shown
    ]
    first = (rows or ["| | | | |"])[0].replace("| |", f"| **{step.name}** |", 1)
    return [first, *rows[1:]]


def _engine_row(row: Serving) -> str:
    arguments = f"`{row.arguments}`" if row.arguments else "" if row.status == "exact" else "–"
    return f"| {row.engine} | {MARKS[row.status]} {row.status} | {arguments} | {row.remark} |"


def _recipe_file(recipe: Recipe) -> str:
    """The recipe itself, where the command refers to it as a file."""
    if not needs_file(recipe):
        return ""
    return f"\n<details><summary>{RECIPE_FILE}</summary>\n\n```yaml\n{recipe_yaml(recipe)}```\n\n</details>\n"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"({len(value)} numbers)" if not isinstance(value[0], list) else f"({len(value)} × {len(value[0])} places)"
    return f"{value:.10g}" if isinstance(value, float) else str(value)
