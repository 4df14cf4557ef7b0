"""Applies recipes to a model in memory, as if converted and loaded, without copying weights."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ctxext.checkpoint.loading import forbid_downloads, quiet_transformers, without_hub
from ctxext.checkpoint.opening import Checkpoint
from ctxext.converters.calibration import head_scores, order_heads, read_text, set_head_order
from ctxext.errors import CtxextError
from ctxext.files.content import Progress
from ctxext.files.offline import forbid_network
from ctxext.files.tensor_files import TORCH_NAMES, NewTensor, read_tensor
from ctxext.models.model import LoadedModel
from ctxext.models.prefix_cache import is_static
from ctxext.recipes.code.staging import own_classes
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import Recipe

_CANNOT = (AttributeError, ImportError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of modeling code that does not fit the installed transformers; `ctxext verify` reports them too."""


class RecipeApplier:
    """Builder of models with a recipe, from one loaded model.

    For each recipe, the family's model is built without weights, from the configuration of a conversion. It then shares
    every parameter and buffer of the loaded model. Only the inverse frequencies and the code around them differ, as
    specified by the configuration. The loaded model never changes.

    Args:
        stock: The loaded, unmodified model.
        source: The checkpoint that it was loaded from.
        folder: A new folder for configurations and for the code of some methods.
    """

    def __init__(self, stock: LoadedModel, source: Checkpoint, folder: Path) -> None:
        self.stock, self.source, self.folder = stock, source, folder
        self.plain = model_config(source.config, source.original_length)
        folder.mkdir()

    def prepare(self, recipe: Recipe, progress: Progress | None = None) -> Recipe:
        """Return the recipe with all values that depend on the model, including a calibrated head order."""
        recipe = recipe.resolve(self.plain)
        if not recipe.needs_calibration:
            return recipe
        encoder = self.stock.encoder
        model = self.apply(set_head_order(recipe, "prompt")).model
        scores = head_scores(model, encoder.tokenizer, read_text(None), self.plain.rotary.trained_length, progress)
        return order_heads(recipe, scores)

    def apply(self, recipe: Recipe) -> LoadedModel:
        """Return the model with a prepared recipe."""
        edited = recipe.edit(self.plain).config
        code, rewritten = recipe.code_files(self.plain.config), recipe.new_tensors(self.source, self.plain)
        safe = own_classes(without_hub(edited), code)
        for name, text in {**code, "config.json": json.dumps(safe)}.items():
            (self.folder / name).write_text(text, encoding="utf-8")
        try:
            model = self._build(has_code=bool(code))
            self._adopt(model, rewritten)
            if code:
                with torch.inference_mode():
                    model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False)
        except _CANNOT as error:
            if not code:
                raise
            lines = str(error).splitlines() or [type(error).__name__]
            raise CtxextError(f'The recipe\'s code does not run on "{self.source.name}": {lines[0]}') from error
        can_share = self.stock.can_share and is_static(model.config.to_dict())
        return LoadedModel(recipe.summary(), model.eval(), self.stock.encoder, can_share)

    def _build(self, *, has_code: bool) -> Any:
        """Build the family's model from the configuration in the folder; its parameters take no memory."""
        with forbid_network():
            from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM

        stock = self.stock.model
        with forbid_downloads(), quiet_transformers(), init_empty_weights(include_buffers=False), _skip_init_weights():
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=has_code)
            if has_code:
                build, options = AutoModelForCausalLM.from_config, {"trust_remote_code": True}
            else:
                # The loaded model may be the text part of a larger model, and then needs the text configuration.
                build, options = type(stock)._from_config, {}
                config = config if type(config) is type(stock.config) else config.get_text_config()
            return build(config, attn_implementation=_get_attention(stock.config), dtype=stock.dtype, **options)

    def _adopt(self, model: Any, rewritten: Sequence[NewTensor]) -> None:
        """Share the loaded model's tensors with another of the same shape, except its inverse frequencies."""
        try:
            state = self.stock.model.state_dict() | self._compute_tensors(model, rewritten)
            model.load_state_dict(state, assign=True)
        except RuntimeError as error:
            raise CtxextError(
                f'Recipes cannot be applied to "{self.source.name}": its weights have unusual names or shapes.',
                hint="Use the checkpoint before it was quantized.",
            ) from error
        buffers = dict(self.stock.model.named_buffers())
        with torch.no_grad():
            for name, buffer in list(model.named_buffers()):
                place, _, buffer_name = name.rpartition(".")
                module, loaded = model.get_submodule(place), buffers.get(name)
                if buffer_name.endswith("inv_freq") or loaded is None or loaded.shape != buffer.shape:
                    module._buffers[buffer_name] = buffer.to(self.stock.device)
                else:
                    module._buffers[buffer_name] = loaded

    def _compute_tensors(self, model: Any, rewritten: Sequence[NewTensor]) -> dict[str, torch.Tensor]:
        """Compute the tensors that the recipe changes from the source's files, as a conversion does."""
        names, tensors = dict(model.named_parameters()), {}
        for new in rewritten:
            # Files contain models with or without a head, so one name may be the end of the other.
            alike = [name for name in names if f".{name}".endswith(f".{new.name}") or new.name.endswith(f".{name}")]
            alike = [name for name in alike if tuple(names[name].shape) == new.shape]
            if alike:  # Buffers count positions, and already have the right length.
                raw = b"" if new.old_shape is None else read_tensor(self.source.folder / new.path, new.name)
                content = bytearray(b"".join(new.pieces(memoryview(raw))))
                numbers = torch.frombuffer(content, dtype=getattr(torch, TORCH_NAMES[new.dtype]))
                tensors[alike[0]] = numbers.reshape(new.shape).to(self.stock.device, self.stock.model.dtype)
        return tensors


def _skip_init_weights() -> Any:
    """Skip the initialization of parameters, which have no values yet."""
    # In transformers 5 it is in a separate module.
    place = "initialization" if importlib.util.find_spec("transformers.initialization") else "modeling_utils"
    return importlib.import_module(f"transformers.{place}").no_init_weights()


def _get_attention(config: Any) -> dict[str, str]:
    """Return the attention implementation of a loaded model, under an empty name, and of each part."""
    parts = {"": config, **{name: getattr(config, name, None) for name in config.sub_configs}}
    implementations = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items()}
    return {name: attention for name, attention in implementations.items() if attention}
