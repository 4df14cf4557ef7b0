"""The lines that serve a checkpoint as a recipe would have it, without converting it: overrides on the command line.

Only for recipes that configuration carries, and only for engines that serve their result. vLLM's lines and llama.cpp's
are run by `make engines`; SGLang's is as its users write it.
"""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from ctxext.checkpoint.families import text_config
from ctxext.converters.engines import BY_SOURCE, EXACT, PARTLY, UNTRIED, Serving, attn_factor, gguf_name
from ctxext.recipes.encodings.rotary import ModelConfig, native_type

_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def unconverted_lines(source: str, model: ModelConfig, serving: Sequence[Serving]) -> dict[str, str]:
    """By engine the command that serves a source as it would be once converted.

    Args:
        source: A Hub id or a folder; `demo` is neither, and called SOURCE, as are names that would not stay one word
            of a command on a page.
        model: The configuration of the result.
        serving: Which engines run the result.
    """
    if model.code or model.family.positions != "rotary":  # Neither code nor rows can be said in a line.
        return {}
    source = source if source != "demo" and source.isprintable() and not set(source) & set("<>`") else "SOURCE"
    run = {row.engine for row in serving if row.status in (EXACT, PARTLY) or BY_SOURCE in row.remark}
    # vLLM takes the same line for any family, and for a multimodal one a nested override.
    run |= {row.engine for row in serving if row.engine == "vLLM" and row.remark.startswith(UNTRIED)}
    flags = {"vLLM": _vllm(model), "SGLang": _sglang(model), "llama.cpp": _llama_cpp(model)}
    programs = {
        "vLLM": ["vllm", "serve", source],
        "SGLang": ["python", "-m", "sglang.launch_server", "--model-path", source],
        "llama.cpp": ["llama-server", "-m", f"{source.rpartition('/')[2]}.gguf"],
    }
    return {engine: shlex.join([*programs[engine], *own]) for engine, own in flags.items() if own and engine in run}


def overrides(model: ModelConfig) -> dict[str, Any]:
    """What config.json must say otherwise than the source's, in transformers 5's dialect, whole dicts at a time."""
    text, family = text_config(model.config, model.family), model.family
    keys = ("rope_parameters", family.length_key, "original_max_position_embeddings")
    changed = {key: text[key] for key in keys if key in text}
    return changed if text is model.config or family.text_config is None else {family.text_config: changed}


def _vllm(model: ModelConfig) -> list[str]:
    return ["--hf-overrides", json.dumps(overrides(model)), "--max-model-len", str(model.rotary.context_length)]


def _sglang(model: ModelConfig) -> list[str]:
    length = str(model.rotary.context_length)
    return ["--json-model-override-args", json.dumps(overrides(model)), "--context-length", length]


def _llama_cpp(model: ModelConfig) -> list[str]:
    """Flags of llama-server; none where it has no flag for the schedule."""
    rotary, numbers = model.rotary, model.rotary.parameters
    length = str(rotary.context_length)
    # A server goes no further than the length that it takes the model to be trained on.
    reach = ["--override-kv", f"{gguf_name(model)}.context_length=int:{length}", "-c", length]
    kind = native_type(model.family, rotary.rope_type)
    if kind == "default" or (kind == "linear" and rotary.rope_type == "default"):  # Mistral 4's plain schedule.
        return ["--rope-freq-base", f"{rotary.theta:.10g}", *reach]
    if kind == "linear":
        return ["--rope-scaling", "linear", "--rope-scale", f"{numbers['factor']:g}", *reach]
    if kind != "yarn":
        return []
    flags = ["--rope-scaling", "yarn", "--rope-scale", f"{numbers['factor']:g}"]
    flags += ["--yarn-orig-ctx", str(rotary.trained_length)]
    for key, usual in _BETAS.items():
        if numbers.get(key, usual) != usual:
            flags += [f"--yarn-{key.replace('_', '-')}", f"{numbers[key]:g}"]
    if (factor := attn_factor(model)) is not None:
        flags += ["--override-kv", f"{gguf_name(model)}.rope.scaling.attn_factor=float:{factor:.6g}"]
    return [*flags, *reach]
