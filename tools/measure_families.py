"""Measure whether vLLM's CPU build and MLX read schedules as transformers does, family by family.

    python tools/measure_families.py prepare WORK    # needs ctxext and transformers: checkpoints, references
    python tools/measure_families.py vllm WORK       # needs vLLM: its own models
    python tools/measure_families.py mlx WORK        # needs mlx-lm

Names after WORK select families; the default is all of them, for MLX those of `IN_MLX`. The models are random, with two
layers, heads of 64 dimensions (supported by vLLM's kernels) and a context length of 256; each is converted by one
method per rope type that its class reads, factor 4, or by `declare`. Qwen's linear attention is computed in float32,
for which vLLM has no CPU kernel. For every prompt of random tokens, "families" of
src/ctxext/converters/engine_support.json receives the largest difference of a log-probability, and for scale `moved`,
the largest change of one by the schedule.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

from ctxext.converters.engine_support import TOLERANCE
from measure_engines import ROOT, _alone, _line, _max_difference, _read, _write, score_in_mlx

LENGTHS = (40, 200, 400, 900)
METHODS = ("plain", "yarn", "pi", "ntk", "llama3", "longrope", "declare")
FAMILIES = ("smollm3", "granite", "mistral", "olmo3", "ministral3", "hunyuan_v1_dense", "qwen3_moe", "glm4_moe")
FAMILIES += ("gpt_oss", "gemma3_text", "gemma4_text", "deepseek_v3", "granitemoehybrid")
FAMILIES += ("qwen3_next", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")
IN_MLX = ("smollm3", "olmo3", "deepseek_v3", "glm4_moe", "hunyuan_v1_dense")
"""Families whose files mlx-lm loads as transformers 5 saves them, and whose layers it has."""
WHOLE = ("qwen3_5", "qwen3_5_moe")
"""Multimodal models, measured with text. Others have the cells of their text part."""
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings", "out_hidden_size"), 256),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 64),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "sliding_window"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **{
        "original_max_position_embeddings": 256,
        "qk_head_dim": 128,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "rotary_dim": 32,
    },
    "vocab_size": 512,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
GRANITE = {"hidden_size": 256, "mamba_d_head": 128}
SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3_next": {"head_dim": 64},
    **{
        name: {"head_dim": 64, "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.25}}
        for name in ("qwen3_5_text", "qwen3_5_moe_text")
    },
    "gemma4_text": {"global_head_dim": 128, "num_experts": None},
    "granitemoehybrid": {**GRANITE, "layer_types": ["attention", "attention"]},
}
WITHOUT_POSITIONS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {**GRANITE, "position_embedding_type": "nope"},
}
"""The form of a family that `declare` accepts."""


def spread(name: str) -> float:
    """Return the standard deviation of a weight, small enough that float32's rounding stays below a ten-thousandth."""
    if re.search(r"embed|wte|emb\b", name):
        return 0.5
    return 0.13 if re.search(r"q_|k_|qkv|query|key|attn|attention", name) else 0.07


def prepare(work: Path, names: list[str]) -> None:
    """Create and convert the models, and record the log-probabilities of the prompts in transformers."""
    import torch

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 500, (1, length), generator=generator) for length in LENGTHS]
    for name in names:
        for method, folder, plain in _converted(work / name, name):
            scores = [_score(one, prompts, whole=name in WHOLE) for one in (folder, plain)]
            rows = [
                {"ids": ids[0].tolist(), "given": given, "moved": _max_difference(given, other)}
                for ids, given, other in zip(prompts, *scores, strict=True)
            ]
            folder.with_suffix(".json").write_text(json.dumps(rows))
            print(name, method, flush=True)


def _converted(work: Path, name: str) -> Iterator[tuple[str, Path, Path]]:
    """Convert a tiny model by each method that its family takes: the method, the checkpoint, and its source."""
    from ctxext.api import convert
    from ctxext.checkpoint.opening import open_checkpoint
    from ctxext.errors import CtxextError
    from ctxext.recipes.encodings.no_positions import NoPositions
    from ctxext.recipes.encodings.rotary import Rotary
    from ctxext.recipes.model_config import model_config
    from ctxext.recipes.recipe import recipe_from_dict

    for form in (SPECIAL, *([WITHOUT_POSITIONS] if name in WITHOUT_POSITIONS else [])):
        plain = _plain(work / ("plain" if form is SPECIAL else "without positions"), name, form)
        if form is SPECIAL:
            yield "plain", plain, plain
        encoding = model_config(open_checkpoint(str(plain)).config).encoding
        for method in METHODS:
            if method == "plain" or isinstance(encoding, NoPositions) != (method == "declare"):
                continue
            step = {"method": method, "factor": 4}
            if method == "longrope":
                assert isinstance(encoding, Rotary)
                pairs = encoding.dim // 2
                rising = [1 + 3 * number / (pairs - 1) for number in range(pairs)]
                step |= {"long_factor": rising, "short_factor": rising}
            try:
                recipe = recipe_from_dict({"steps": [step]}, method)
                convert(str(plain), work / method, recipe, check=False, overwrite=True)
            except CtxextError as error:
                print(f"{name} {method}: {error}", flush=True)
                continue
            yield method, work / method, plain


def _plain(folder: Path, name: str, form: dict[str, dict[str, Any]]) -> Path:
    """Write the tiny model of a family in a form of `SPECIAL` or `WITHOUT_POSITIONS`."""
    sys.path.insert(0, str(ROOT / "tests"))
    from transformers import AutoModelForImageTextToText

    import tiny_models

    own = {**tiny_models.OVERRIDES["ministral3"]["rope_parameters"], "original_max_position_embeddings": 256}
    special = {**tiny_models.OVERRIDES, "ministral3": {"rope_parameters": own}}
    for model_type, values in form.items():
        special[model_type] = {**special.get(model_type, {}), **values}
    sizes, wide = {**tiny_models.SIZES, **SIZES}, {**tiny_models.WIDE, "hidden_size": 256}
    with mock.patch.multiple(tiny_models, SIZES=sizes, WIDE=wide, OVERRIDES=special, _spread=spread):
        if name in WHOLE:
            tiny_models.build(name, auto=AutoModelForImageTextToText).save_pretrained(folder)
        else:
            tiny_models.save(name, folder)
    if name == "deepseek_v3":  # As published; transformers' class writes neither, and vLLM has other defaults.
        config = json.loads((folder / "config.json").read_text())
        published = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        (folder / "config.json").write_text(json.dumps({**config, **published}))
    return folder


def _score(folder: Path, prompts: list[Any], *, whole: bool) -> list[list[float]]:
    """Compute the log-probability of every token except the first, in transformers and float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    for ids in prompts:
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1]
        scores.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist())
    return scores


def vllm(work: Path, names: list[str]) -> None:
    """Measure the families in vLLM, each cell in a process of its own, because an engine may crash.

    Its transformers backend is measured as well if its own model is wrong; it has no linear attention.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    sys.path.insert(0, str(ROOT / "tests/engines"))
    import float32_linear_attention

    float32_linear_attention.install()
    for name in names:
        for method in METHODS:
            if not (work / name / f"{method}.json").exists():
                continue
            rows = json.loads((work / name / f"{method}.json").read_text())
            for engine, backend in {"vLLM": "auto", "vLLM's transformers backend": "transformers"}.items():
                if not (process := os.fork()):
                    cell = _cell(work / name / method, rows, name, backend)
                    keep(name, method, engine, cell, rows)
                    os._exit(max(cell.get("differences", [1])) > TOLERANCE)
                status = os.waitpid(process, 0)[1]
                if os.WIFSIGNALED(status):
                    word = signal.Signals(os.WTERMSIG(status)).name
                    keep(name, method, engine, {"refused": f"vLLM crashes ({word})"}, rows)
                if status == 0 or method == "plain" or name in WHOLE:
                    break


def _cell(folder: Path, rows: list[dict[str, Any]], name: str, backend: str) -> dict[str, Any]:
    from offline_vllm import Engine

    arguments: dict[str, Any] = {"gpu_memory_utilization": 0.2, "enforce_eager": True, "enable_prefix_caching": False}
    arguments["model_impl"] = backend
    if folder.name == "plain":
        longer = {"max_position_embeddings": 1024}
        arguments["hf_overrides"] = {"text_config": longer} if name in WHOLE else longer
    try:
        with closing(Engine(folder, length=1000, dtype="float32", arguments=arguments)) as served:
            scores = served.log_probabilities([row["ids"] for row in rows])
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {_line(error)}"}
    return _compare(scores, rows)


def mlx(work: Path, names: list[str]) -> None:
    """Measure the families in mlx-lm, on the CPU."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    for name in names:
        for method in METHODS[1:]:  # A plain file of transformers 5 lacks keys that mlx-lm's classes read.
            if not (work / name / f"{method}.json").exists():
                continue
            rows = json.loads((work / name / f"{method}.json").read_text())
            try:
                model, _ = load_model(work / name / method)
                model.set_dtype(mx.float32)
                cell = _compare([score_in_mlx(model, row["ids"])[0] for row in rows], rows)
            except TypeError as error:  # The same.
                print(f"{name} {method}: {error}", flush=True)
                continue
            except Exception as error:
                cell = {"refused": f"{type(error).__name__}: {_line(error)}"}
            keep(name, method, "MLX", cell, rows)


def _compare(scores: list[list[float]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    worst = [_max_difference(given, row["given"]) for given, row in zip(scores, rows, strict=True)]
    return {"differences": [float(f"{number:.2g}") for number in worst]}


def keep(name: str, method: str, engine: str, cell: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write a cell of a family into the data file."""
    cell = {**cell, "moved": [float(f"{row['moved']:.2g}") for row in rows]}
    with _alone():
        data = _read()
        data["families"].setdefault(name, {}).setdefault(method, {})[engine] = cell
        _write(data)
    print(f"{name:<20} {method:<10} {engine:<28} {cell}", flush=True)


if __name__ == "__main__":
    command, folder, *chosen = sys.argv[1:]
    {"prepare": prepare, "vllm": vllm, "mlx": mlx}[command](
        Path(folder), chosen or list(IN_MLX if command == "mlx" else FAMILIES)
    )
