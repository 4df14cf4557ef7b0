"""The cards of a fine-tune: the checkpoint's, with what is known of the training, and that of the adapter alone."""

from collections.abc import Mapping
from typing import Any

import yaml

from ctxext.checkpoint import Checkpoint
from ctxext.converters.card import CardFacts, card_metadata, render
from ctxext.converters.commands import RECIPE_FILE, convert_command, needs_file, wrapped
from ctxext.converters.engines import serving_of
from ctxext.converters.plan import cautions_of
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.recipes.rotary import model_config, provenance


def render_card(base: Checkpoint, notes: Mapping[str, Any]) -> str:
    """The whole README.md.

    Args:
        base: The extended checkpoint that was trained.
        notes: What is known of the training, as config.json says it.
    """
    noted, model = provenance(base.config), model_config(base.config)
    recipe = recipe_from_dict(noted["recipe"], "config.json") if noted.get("recipe") else None
    return render(
        CardFacts(
            source=str(noted.get("source") or base.public_name),
            revision=noted.get("revision") if recipe else base.revision,
            inherited=card_metadata(base),
            recipe=recipe,
            encoding=model.encoding,
            config=model.config,
            serving=serving_of(model),
            cautions=cautions_of(base, recipe, model) if recipe else (),
            training=notes,
        )
    )


def adapter_card(base: Checkpoint) -> str:
    """The README.md of an adapter alone: what it belongs to, and how that was made.

    Args:
        base: The extended checkpoint that it was trained on.
    """
    name, noted = base.public_name, provenance(base.config)
    lines = ["---", "library_name: peft", "tags: [lora, ctxext]", f'base_model: "{name}"', "---", ""]
    lines += [f"A LoRA adapter of `{name}`. It does not carry what was changed to extend it: load it on that very"]
    lines += ["checkpoint, or merge the two with `ctxext merge`."]
    if noted.get("recipe") and noted.get("source"):
        recipe = recipe_from_dict(noted["recipe"], "config.json")
        command = wrapped(convert_command(str(noted["source"]), noted.get("revision"), recipe, name.split("/")[-1]))
        lines += ["", f"That checkpoint is `{noted['source']}` with {recipe.summary()}:", "", "```", command, "```"]
        if needs_file(recipe):
            text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, width=100).rstrip()
            lines += ["", f"where `{RECIPE_FILE}` is", "", "```yaml", text, "```"]
    return "\n".join(lines) + "\n"
