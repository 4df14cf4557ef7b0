"""The model card of a converted checkpoint: what was done, how to load it, what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ctxext.checkpoint import Checkpoint
from ctxext.converters.engines import MARKS, Serving
from ctxext.recipes.recipe import Recipe
from ctxext.recipes.rotary import Rotary
from ctxext.version import __version__

_KEPT = ("license", "license_name", "license_link", "language", "datasets", "extra_gated_prompt", "inference")


def source_metadata(source: Checkpoint) -> dict[str, Any]:
    """The front matter of the source's own card; empty where it has none that can be read."""
    card = source.folder / "README.md"
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


def front_matter(source: Checkpoint, recipe: Recipe) -> dict[str, Any]:
    """What the Hub reads: the source's licence and languages, our tags, and where the model comes from."""
    inherited = source_metadata(source)
    tags = [str(tag) for tag in inherited.get("tags") or []]
    own = ["ctxext", "long-context", *(step.name for step in recipe.steps)]
    if not recipe.needs_code:
        own.append("config-only")
    return {
        **{key: inherited[key] for key in _KEPT if key in inherited},
        **({"base_model": source.name} if source.revision else {}),
        **({"base_model_relation": "finetune"} if source.revision else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys([*tags, *own])),
    }


def render_card(
    source: Checkpoint, recipe: Recipe, rotary: Rotary, serving: Sequence[Serving], cautions: Sequence[str]
) -> str:
    """The whole README.md of a converted checkpoint.

    Args:
        source: Where it came from.
        recipe: What was applied, resolved.
        rotary: The encoding of the result.
        serving: Which engines can run it.
        cautions: What a user must know.
    """
    name = source.name if source.revision or source.name == "demo" else source.folder.resolve().name
    rows = "\n".join(_step_row(step.to_dict(), step.paper) for step in recipe.steps)
    engines = "\n".join(f"| {row.engine} | {MARKS[row.status]} {row.status} | {row.note} |" for row in serving)
    warned = "\n".join(f"- {caution[0].upper()}{caution[1:]}" for caution in cautions)
    flag = ", trust_remote_code=True" if recipe.needs_code else ""
    reason = (
        "It carries a small modeling file, because its method is more than a configuration; without "
        "`trust_remote_code=True` loading fails on purpose."
        if recipe.needs_code
        else "No custom code: only the configuration changed."
    )
    header = yaml.safe_dump(front_matter(source, recipe), sort_keys=False, allow_unicode=True)
    return f"""---
{header}---

# {name}, extended: {recipe.summary()}

The weights are those of `{name}`, byte for byte. What changed is how positions are encoded: trained on
{rotary.trained_length} tokens, the model now accepts {rotary.context_length}. Made with ctxext {__version__}.

| step | settings | paper |
|---|---|---|
{rows}

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")
model = AutoModelForCausalLM.from_pretrained("PATH_OR_ID"{flag})
```

{reason}

| engine | runs it | how |
|---|---|---|
{engines}

## Measured

Nothing yet: this checkpoint **was not evaluated**. A longer window in the configuration is not a model that uses it.
`ctxext eval` shows whether it finds things anywhere in the new window and what it lost inside the old one.
{f"{chr(10)}## Mind{chr(10)}{chr(10)}{warned}{chr(10)}" if warned else ""}"""


def _step_row(step: Mapping[str, Any], paper: str) -> str:
    shown = {key: value for key, value in step.items() if key != "method"}
    settings = ", ".join(f"{key} {_short(value)}" for key, value in shown.items())
    return f"| {step['method']} | {settings} | {paper} |"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"({len(value)} numbers)"
    return f"{value:g}" if isinstance(value, float) else str(value)
