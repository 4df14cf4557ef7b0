"""The recipe file that a search writes: an ordinary one, with the figures in a comment above it."""

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from ctxext.errors import CtxextError
from ctxext.recipes.recipe import Recipe


def recipe_text(recipe: Recipe, lines: Sequence[str]) -> str:
    """The file's text.

    Args:
        recipe: The recipe.
        lines: The comment lines above it.
    """
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True, width=120)


def check_recipe_place(out: Path, *, overwrite: bool) -> None:
    """Refuse a path for the recipe file that cannot or must not be written.

    Raises:
        CtxextError: it is a folder, is there already, or its folder is not or cannot be written to.
    """
    folder = out.resolve().parent
    if out.is_dir():
        raise CtxextError(f'"{out}" is a folder, not a place for a recipe file.', hint=f"Name a file: {out}/best.yaml")
    if out.exists() and not overwrite:
        raise CtxextError(f'There is a file "{out}" already.', hint="Replace it with --overwrite, or choose another.")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CtxextError(f'"{folder}" is not there or cannot be written to.', hint="Choose another place.")
