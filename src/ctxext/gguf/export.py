"""Write a checkpoint as a GGUF file: llama.cpp's own converter for the weights, ctxext for the schedule.

The converter omits attention factors and lists (docs/serving.md). So it converts the checkpoint without its recipe,
and ctxext applies the recipe to the written file.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from ctxext.checkpoint.families import text_config
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.files.isolated import SETTINGS
from ctxext.files.output_directory import OverwriteOptions, explain_disk_errors
from ctxext.gguf import is_gguf
from ctxext.gguf.convert import check_file, convert_gguf, measure_rotation
from ctxext.gguf.model import LOG_MULTIPLIER, open_gguf
from ctxext.options import accepts_options
from ctxext.recipes.code.staging import write_stage
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.encodings.rotary import attention_scaling
from ctxext.recipes.methods.yarn import Yarn
from ctxext.recipes.model_config import ModelConfig, model_config
from ctxext.recipes.recipe import Recipe, plain_config, recipe_from_dict

TYPES = ("auto", "f32", "f16", "bf16", "q8_0")
"""Weight types of llama.cpp's converter."""
_CONVERTER = "convert_hf_to_gguf.py"
_ENVIRONMENT = "LLAMA_CPP"


@dataclass(frozen=True)
class Export:
    """An exported checkpoint.

    Attributes:
        out: The file.
        methods: The applied methods in a few words; empty if the checkpoint had none.
        difference: The largest relative difference of a frequency from the checkpoint's; None if the architecture is
            unknown and the checkpoint had no recipe.
    """

    out: Path
    methods: str
    difference: float | None


@accepts_options(OverwriteOptions)
def export_gguf(
    source: str,
    out: str | Path,
    *,
    options: OverwriteOptions,
    llama_cpp: str | Path | None = None,
    outtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
) -> Export:
    """Write a checkpoint as a GGUF file.

    Args:
        source: A folder, a Hub id, or `demo`.
        out: The file to create.
        options: Which files may be replaced. Each field is also a keyword argument.
        llama_cpp: A folder with llama.cpp's source code; by default the environment variable LLAMA_CPP.
        outtype: The type of the weights, one of `TYPES`.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token; the usual places are read if None.
    """
    sources, target = llama_cpp or os.environ.get(_ENVIRONMENT), Path(out)
    if not sources:
        raise CtxextError(
            "Exporting a GGUF file needs llama.cpp's converter.",
            hint="git clone https://github.com/ggml-org/llama.cpp, then add --llama-cpp FOLDER.",
        )
    converter = Path(sources) / _CONVERTER
    if not converter.is_file():
        raise CtxextError(f'"{sources}" has no {_CONVERTER}.', hint="Specify the folder of llama.cpp's source code.")
    if outtype not in TYPES:
        raise CtxextError(f'Unknown weight type "{outtype}".', hint=f"Choose {', '.join(TYPES)}.")
    if not is_gguf(target):
        raise CtxextError(f'OUT "{target}" is not a GGUF file name.', hint=f"Name it {target}.gguf.")
    check_file(target, (), options)
    checkpoint = open_checkpoint(source, revision=revision, token=token)
    model = model_config(checkpoint.config, checkpoint.original_length)
    if model.code:
        raise CtxextError(
            f'"{checkpoint.name}" contains modeling code, which llama.cpp does not run.',
            hint="Convert its source with a method without code, such as yarn.",
        )
    content = provenance(checkpoint.config).get("recipe")
    recipe = recipe_from_dict(content, "config.json") if content else None
    plain = plain_config(model) if recipe is not None else model
    with explain_disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.resolve().parent, prefix=".ctxext-export-") as place:
            folder, file = Path(place) / "checkpoint", Path(place) / "plain.gguf"
            if recipe is not None:
                _satisfy_converter(plain)
            write_stage(folder, checkpoint, plain.config, {})
            # The folder contains no code and names none, as the converter would trust it.
            command: list[str | Path] = [sys.executable, converter.resolve(), folder, "--outfile", file]
            command += ["--outtype", outtype]
            environment = {**os.environ, **SETTINGS, "HF_MODULES_CACHE": place}
            result = subprocess.run(
                command, capture_output=True, input="", text=True, check=False, cwd=place, env=environment
            )
            if result.returncode or not file.is_file():
                errors = [line for line in result.stderr.splitlines() if line.strip()]
                raise CtxextError(
                    f"llama.cpp's converter failed: {errors[-1] if errors else f'exit code {result.returncode}'}.",
                    hint="Install llama.cpp's requirements/requirements-convert_hf_to_gguf.txt.",
                )
            if recipe is None:
                difference = _difference(file, model)
                check_file(target, (), options)
                file.replace(target)
                return Export(target, "", difference)
            if LOG_MULTIPLIER in open_gguf(file).architecture.reads:
                recipe = _with_temperature(recipe, model)
            length = model.encoding.trained_length
            done = convert_gguf(
                file,
                target,
                recipe,
                original_length=length,
                allow_shorter=True,
                replace_scaling=True,
                overwrite=options.overwrite,
                overwrite_anything=options.overwrite_anything,
            )
    return Export(target, recipe.summary(), done.difference)


def _satisfy_converter(plain: ModelConfig) -> None:
    """Give a plain Ministral 3 a YaRN schedule without effect, which llama.cpp's converter requires."""
    text = text_config(plain.config, plain.family)
    for schedule in (text.get("rope_parameters") or {}, text.get("rope_scaling") or {}):
        if "llama_4_scaling_beta" in schedule:
            schedule.update(rope_type="yarn", factor=1.0, mscale_all_dim=1.0)


def _with_temperature(recipe: Recipe, model: ModelConfig) -> Recipe:
    """Return a recipe with the checkpoint's temperature in each yarn step, because the file has other defaults."""

    def fill(step: Yarn) -> Yarn:
        all_dim = step.mscale_all_dim or 0.0
        return replace(step, attention_factor=attention_scaling(model.rotary), mscale=None, mscale_all_dim=all_dim)

    return replace(recipe, steps=tuple(fill(step) if isinstance(step, Yarn) else step for step in recipe.steps))


def _difference(file: Path, model: ModelConfig) -> float | None:
    """Return the largest relative difference between llama.cpp's and the checkpoint's schedule; None if unknown."""
    try:
        opened = open_gguf(file)
    except CtxextError:
        return None
    return measure_rotation(opened.files, opened.architecture, model)
