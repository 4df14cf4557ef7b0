"""Measure whether vLLM's CPU build computes yarn as transformers does, family by family.

    python tools/measure_families.py prepare WORK    # needs ctxext and transformers: checkpoints, references
    python tools/measure_families.py vllm WORK       # needs vLLM: its own models

Names after WORK select families; the default is all of them. The models are random, with two layers, heads of 64
dimensions (supported by vLLM's kernels) and a context length of 256; they are converted by yarn, factor 4. For every
prompt of random tokens, "families" of src/ctxext/converters/engines.json receives the largest difference of a
log-probability, and for scale `moved`, the largest change of one by the schedule.
"""

import gc
import json
import os
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

from measure_engines import ROOT, _alone, _line, _read, _worst, _write

LENGTHS = (40, 200, 400, 900)
FAMILIES = ("smollm3", "granite", "mistral", "olmo3", "ministral3", "hunyuan_v1_dense", "qwen3_moe", "glm4_moe")
FAMILIES += ("gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_next", "qwen3_5_text")
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 256),
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


def spread(name: str) -> float:
    """Return the standard deviation of a weight, small enough that float32's rounding stays below a ten-thousandth."""
    if re.search(r"embed|wte|emb\b", name):
        return 0.5
    return 0.13 if re.search(r"q_|k_|qkv|query|key|attn|attention", name) else 0.07


def prepare(work: Path, names: list[str]) -> None:
    """Create and convert the models, and record the log-probabilities of the prompts in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from ctxext import convert
    from ctxext.methods import Yarn

    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_models

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 500, (1, length), generator=generator) for length in LENGTHS]
    special: dict[str, dict[str, Any]] = {name: {"head_dim": 64} for name in ("qwen3_next", "qwen3_5_text")}
    own = {**tiny_models.OVERRIDES["ministral3"]["rope_parameters"], "original_max_position_embeddings": 256}
    special["ministral3"] = {"rope_parameters": own}
    sizes, wide = {**tiny_models.SIZES, **SIZES}, {**tiny_models.WIDE, "hidden_size": 256}
    patched = {"SIZES": sizes, "WIDE": wide, "OVERRIDES": {**tiny_models.OVERRIDES, **special}, "_spread": spread}
    for name in names:
        with mock.patch.multiple(tiny_models, **patched):
            plain = tiny_models.save(name, work / name / "plain")
        if name == "deepseek_v3":  # As published; transformers' class writes neither, and vLLM has other defaults.
            config = json.loads((plain / "config.json").read_text())
            published = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
            (plain / "config.json").write_text(json.dumps({**config, **published}))
        convert(str(plain), work / name / "yarn", Yarn(factor=4), check=False, overwrite=True)
        scores = []
        for folder in (work / name / "yarn", plain):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                logits = [model(ids, use_cache=False).logits[0, :-1] for ids in prompts]
            scores.append(
                [
                    row.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                    for row, ids in zip(logits, prompts, strict=True)
                ]
            )
        rows = [
            {"ids": ids[0].tolist(), "given": given.tolist(), "moved": (given - other).abs().max().item()}
            for ids, given, other in zip(prompts, *scores, strict=True)
        ]
        (work / name / "rows.json").write_text(json.dumps(rows))
        print(name, flush=True)


def vllm(work: Path, names: list[str]) -> None:
    """Measure the families in vLLM, all in one process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from ctxext.engines.vllm import Engine
    from ctxext.errors import CtxextError

    for name in names:
        rows = json.loads((work / name / "rows.json").read_text())
        arguments = {"gpu_memory_utilization": 0.2, "enforce_eager": True, "model_impl": "vllm"}
        try:
            served = Engine(work / name / "yarn", length=1000, dtype="float32", arguments=arguments)
            with closing(served):
                scores = served.log_probabilities([row["ids"] for row in rows])
        except (CtxextError, RuntimeError, ValueError, AttributeError, KeyError, AssertionError) as error:
            cell: dict[str, Any] = {"refused": _line(error)}
        else:
            worst = [_worst(given, row["given"]) for given, row in zip(scores, rows, strict=True)]
            cell = {"differences": [float(f"{number:.2g}") for number in worst]}
        keep(name, {**cell, "moved": [float(f"{row['moved']:.2g}") for row in rows]})
        gc.collect()


def keep(name: str, cell: dict[str, Any]) -> None:
    """Write a family's cell into the data file."""
    with _alone():
        data = _read()
        data["families"].setdefault(name, {})["vLLM"] = cell
        _write(data)
    print(f"{name:<20} {cell}", flush=True)


if __name__ == "__main__":
    command, folder, *chosen = sys.argv[1:]
    {"prepare": prepare, "vllm": vllm}[command](Path(folder), chosen or list(FAMILIES))
