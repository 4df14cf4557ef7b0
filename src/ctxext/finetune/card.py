"""The model card of a fine-tuned checkpoint: the one card, with what is known of the training."""

from collections.abc import Mapping
from typing import Any

from ctxext.checkpoint import Checkpoint
from ctxext.converters.card import CardFacts, card_metadata, render
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
