"""Measure every method without code in an inference engine, against transformers, and record the figures.

    python tools/measure_engines.py prepare WORK     # needs ctxext and transformers: checkpoints, references
    python tools/measure_engines.py vllm WORK        # needs vLLM: its own models, then its transformers backend
    python tools/measure_engines.py llama.cpp WORK   # needs xllamacpp; LLAMA_CPP is the sources with the converter
    python tools/measure_engines.py mlx WORK         # needs mlx-lm; does not need ctxext

Names after WORK select variants; the default is all of them. The figures are written to
src/ctxext/converters/engine_support.json, which `inspect`, cards and docs/serving.md read: for every prompt the largest
difference of a log-probability from transformers (nats, float32, CPU), and the number of equal tokens in greedy
decoding. The checkpoint is the one in the package, factor 4; the prompts are random tokens.
"""

import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = ROOT / "src/ctxext/converters/engine_support.json"
LENGTHS = (40, 400, 1300, 1900)
WINDOW = 512
NEW = 12
LONGEST = 2048
MOST_LIKELY = 100
"""Number of next tokens for which llama.cpp returns a log-probability."""
RISING = [1.0 + 3.0 * number / 15 for number in range(16)]
LONGROPE = {"long_factor": RISING, "short_factor": RISING}
STEPS: dict[str, dict[str, Any]] = {
    "pi": {},
    "ntk": {},
    "abf": {"theta": 3e5},
    "yarn": {},
    "yarn with attention_factor": {"attention_factor": 1.2},
    "ntk-by-parts": {},
    "llama3": {},
    "dynamic": {},
    "longrope": LONGROPE,
    "longrope with attention_factor": {**LONGROPE, "attention_factor": 1.2},
    "longrope with two lists": {"long_factor": RISING},
    "mrrope": {},
}
"""Options other than the factor, by variant of a method."""
REDUNDANT = ("mscale", "mscale_all_dim", "short_mscale", "long_mscale")
BARE = ("ntk-by-parts", "mrrope")
"""Methods that are also measured without their redundant keys."""
VARIANTS = ("plain", *STEPS, *(f"{name} without redundant keys" for name in BARE), "yarn in rope_parameters alone")
METADATA = {
    "yarn with attention_factor": 1.2 / 1.1386294361,
    "ntk-by-parts": 1 / 1.1386294361,
    "mrrope": 1.1386294361,
    "longrope": (1 + 2 / 9) ** 0.5,
    "longrope with attention_factor": 1.2,
}
"""llama.cpp's `rope.scaling.attn_factor`; variants with lists also need the tensor rope_freqs.weight."""


def prepare(work: Path) -> None:
    """Convert the model, and record the log-probabilities of the prompts in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from ctxext.checkpoint.opening import open_checkpoint
    from ctxext.converters.convert import convert
    from ctxext.recipes.recipe import recipe_from_dict

    shutil.copytree(open_checkpoint("demo").folder, work / "plain", dirs_exist_ok=True)
    for name, numbers in STEPS.items():
        step = {"method": name.partition(" with ")[0], "factor": 4, **numbers}
        convert("demo", work / name, recipe_from_dict({"steps": [step]}, name), check=False, overwrite=True)
    for name in BARE:
        _edit_copy(work / name, work / f"{name} without redundant keys", _bare)
    _edit_copy(work / "yarn", work / "yarn in rope_parameters alone", _new_dialect)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 3000, (length,), generator=generator).tolist() for length in LENGTHS]
    for name in VARIANTS:
        model = AutoModelForCausalLM.from_pretrained(work / name, dtype=torch.float32).eval()
        rows = []
        for ids in prompts:
            batch = torch.tensor([ids])
            with torch.no_grad():
                scores = model(batch).logits[0].log_softmax(-1)
                written = model.generate(
                    batch, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None
                )
            given = scores[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
            rows.append(
                {"ids": ids, "given": given, "next": scores[-1].tolist(), "greedy": written[0, len(ids) :].tolist()}
            )
        (work / f"{name}.json").write_text(json.dumps(rows))
        print(name, flush=True)
    _keep_versions("transformers", "torch")


def _edit_copy(source: Path, out: Path, edit: Any) -> None:
    shutil.copytree(source, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    edit(config)
    (out / "config.json").write_text(json.dumps(config))


def _bare(config: dict[str, Any]) -> None:
    for part in ("rope_parameters", "rope_scaling"):
        for key in REDUNDANT:
            config[part].pop(key, None)


def _new_dialect(config: dict[str, Any]) -> None:
    """Remove the keys that transformers 5 does not save."""
    config.pop("rope_scaling")
    config.pop("rope_theta")


def vllm(work: Path, names: list[str]) -> None:
    """Measure each checkpoint in vLLM's own model, then in its transformers backend, all in one process."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    sys.path.insert(0, str(ROOT / "tests/engines"))
    from offline_vllm import Engine

    for name in names:
        for engine, backend in {"vLLM": "auto", "vLLM's transformers backend": "transformers"}.items():
            rows = json.loads((work / f"{name}.json").read_text())
            prompts = [row["ids"] for row in rows]
            arguments = {"gpu_memory_utilization": 0.3, "enforce_eager": True, "model_impl": backend}
            if name == "plain":
                arguments["hf_overrides"] = {"max_position_embeddings": LONGEST}
            try:
                served = Engine(work / name, length=LONGEST, dtype="float32", arguments=arguments)
            except Exception as error:
                _keep(name, engine, {"refused": _line(error)})
                continue
            try:
                with closing(served):
                    scores = served.log_probabilities(prompts)
                    written = served.write(prompts, [NEW] * len(prompts))
            except ValueError as error:
                _keep(name, engine, {"refused": _line(error)})
                continue
            differences = [_max_difference(found, row["given"]) for found, row in zip(scores, rows, strict=True)]
            _keep(name, engine, _cell(differences, written, rows))
            gc.collect()
    _keep_versions("vllm-cpu")


def llama_cpp(work: Path, names: list[str]) -> None:
    """Measure the output of llama.cpp's own converter, then with the metadata and the tensor that correct it."""
    for name in names:
        _in_llama_cpp(work, name, "llama.cpp", {}, None)
        if name not in METADATA:
            continue
        config = json.loads((work / name / "config.json").read_text())
        lists = config["rope_parameters"].get("long_factor")
        metadata = {"llama.rope.scaling.attn_factor": f"float:{METADATA[name]:.8g}"}
        if lists:
            metadata["llama.rope.scaling.type"] = "str:none"
        _in_llama_cpp(work, name, "llama.cpp with metadata", metadata, lists)
    _keep_versions("xllamacpp")


def _in_llama_cpp(work: Path, name: str, engine: str, metadata: dict[str, str], lists: list[float] | None) -> None:
    import xllamacpp

    rows = json.loads((work / f"{name}.json").read_text())
    out = work / "model.gguf"
    out.unlink(missing_ok=True)
    metadata = {"llama.context_length": f"int:{LONGEST}", **metadata}
    extra = json.dumps({"metadata": metadata, "rope_freqs": lists})
    script = [sys.executable, ROOT / "tests/engines/to_gguf.py", os.environ["LLAMA_CPP"], work / name, out, extra]
    result = subprocess.run([str(word) for word in script], capture_output=True, text=True, check=False)
    if result.returncode:
        _keep(name, engine, {"refused": _line(result.stderr)})
        return
    common = xllamacpp.CommonParams()
    common.model.path, common.n_parallel, common.cpuparams.n_threads, common.warmup = str(out), 1, 1, False
    common.cache_type_k = common.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    common.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    common.n_ctx = LONGEST
    server = xllamacpp.Server(common)
    differences, written = [], []
    for row in rows:
        asked = {"prompt": row["ids"], "n_predict": NEW, "temperature": 0.0, "n_probs": MOST_LIKELY, "ignore_eos": True}
        answer = server.handle_completions(asked)
        answer = answer if isinstance(answer, dict) else json.loads(answer)
        tokens = answer["choices"][0]["logprobs"]["content"]
        first = tokens[0]["top_logprobs"]
        differences.append(max(abs(one["logprob"] - row["next"][one["id"]]) for one in first))
        written.append([token["id"] for token in tokens])
    _keep(name, engine, _cell(differences, written, rows))


def mlx(work: Path, names: list[str]) -> None:
    """Measure in mlx-lm, on the CPU."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    for name in names:
        rows = json.loads((work / f"{name}.json").read_text())
        try:
            model, _ = load_model(work / name)
        except Exception as error:
            _keep(name, "MLX", {"refused": _line(error)})
            continue
        model.set_dtype(mx.float32)
        differences, written = [], []
        for row in rows:
            given, scores = score_in_mlx(model, row["ids"])
            differences.append(max(_max_difference(given, row["given"]), _max_difference(scores, row["next"])))
            steps = generate_step(mx.array(row["ids"]), model, max_tokens=NEW)
            written.append([int(token) for token, _ in steps])
        _keep(name, "MLX", _cell(differences, written, rows))
    _keep_versions("mlx-lm", "mlx")


def score_in_mlx(model: Any, ids: list[int]) -> tuple[list[float], list[float]]:
    """Return the log-probability of every token except the first, and those of all tokens after the last."""
    import mlx.core as mx

    logits = model(mx.array([ids]))[0].astype(mx.float32)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [scores[at, token].item() for at, token in enumerate(ids[1:])], scores[-1].tolist()


def _max_difference(scores: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(scores, wanted, strict=True))


def _cell(differences: list[float], written: list[list[int]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    pairs = [pair for ids, row in zip(written, rows, strict=True) for pair in zip(ids, row["greedy"], strict=True)]
    same = sum(one == other for one, other in pairs)
    return {"differences": [float(f"{number:.2g}") for number in differences], "greedy": same}


def _line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:200].rstrip(".") if lines else type(error).__name__


def _read() -> dict[str, Any]:
    empty = {
        "prompts": LENGTHS,
        "window": WINDOW,
        "greedy_of": NEW * len(LENGTHS),
        "versions": {},
        "cells": {},
        "families": {},
    }
    return {**empty, **(json.loads(DATA.read_text()) if DATA.exists() else {})}


def _write(data: dict[str, Any]) -> None:
    lines = [f'"{key}": {json.dumps(data[key])}' for key in ("prompts", "window", "greedy_of", "versions")]
    order = [name for name in VARIANTS if name in data["cells"]]
    variants = []
    for name in order:
        cells = ",\n   ".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in data["cells"][name].items())
        variants.append(f"{json.dumps(name)}: {{\n   {cells}\n  }}")
    families = []
    for name, methods in sorted(data["families"].items()):
        rows = ",\n   ".join(f"{json.dumps(method)}: {json.dumps(row)}" for method, row in methods.items())
        families.append(f"{json.dumps(name)}: {{\n   {rows}\n  }}")
    parts = {"cells": variants, "families": families}
    lines += [f'"{part}": {{\n  ' + ",\n  ".join(entries) + "\n }" for part, entries in parts.items()]
    DATA.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


@contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock, as several engines may be measured at the same time."""
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep(name: str, engine: str, cell: dict[str, Any]) -> None:
    with _alone():
        data = _read()
        data["cells"].setdefault(name, {})[engine] = cell
        _write(data)
    print(f"{name:<40} {engine:<28} {cell}", flush=True)


def _keep_versions(*packages: str) -> None:
    with _alone():
        data = _read()
        data["versions"].update({package: version(package) for package in packages})
        _write(data)


def main() -> None:
    """Prepare the checkpoints or measure an engine."""
    engine, work, *names = sys.argv[1:]
    Path(work).mkdir(parents=True, exist_ok=True)
    if engine == "prepare":
        prepare(Path(work))
    else:
        {"vllm": vllm, "llama.cpp": llama_cpp, "mlx": mlx}[engine](Path(work), names or list(VARIANTS))


if __name__ == "__main__":
    main()
