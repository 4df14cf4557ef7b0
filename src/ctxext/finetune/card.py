"""The model card of a fine-tuned checkpoint."""

from collections.abc import Mapping
from typing import Any

import yaml

from ctxext.checkpoint import Checkpoint
from ctxext.converters.card import card_metadata
from ctxext.recipes.recipe import describe_step
from ctxext.recipes.rotary import model_config, provenance
from ctxext.version import __version__


def render_card(base: Checkpoint, notes: Mapping[str, Any]) -> str:
    """The whole README.md.

    Args:
        base: The extended checkpoint that was trained.
        notes: What is known of the training, as config.json says it.
    """
    noted, inherited = provenance(base.config), card_metadata(base)
    rotary = model_config(base.config).rotary
    steps = noted.get("recipe", {}).get("steps", [])
    how = ", ".join(describe_step(step) for step in steps) or rotary.rope_type
    tags = [*(str(tag) for tag in inherited.get("tags") or []), "ctxext", "long-context", "finetuned"]
    own = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    relation = {"base_model": base.name, "base_model_relation": "finetune"} if base.revision else {}
    tags = [tag for tag in dict.fromkeys(tags) if tag != "config-only"]
    header = yaml.safe_dump({**inherited, **relation, **own, "tags": tags}, sort_keys=False, allow_unicode=True)
    rows = "\n".join(f"| {key.replace('_', ' ')} | {_shown(value)} |" for key, value in notes.items())
    flag = ", trust_remote_code=True" if base.config.get("auto_map") else ""
    return f"""---
{header}---

# {base.public_name}, fine-tuned

The positions of this model are extended ({how}): trained on {rotary.trained_length} tokens, it accepts
{rotary.context_length}. Its weights were then trained on long sequences. Made with ctxext {__version__}.

| training | |
|---|---|
{rows}

## Load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH_OR_ID")
model = AutoModelForCausalLM.from_pretrained("PATH_OR_ID"{flag})
```

## Measured

Nothing yet: this checkpoint **was not evaluated**. `ctxext eval` shows what it finds within its
context length and what it lost.
"""


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_shown(entry)}" for key, entry in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
