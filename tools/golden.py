"""Record the output of ctxext, so that a change of the code shows its effect for users.

    python tools/golden.py --check            # compare with tests/resources/golden.json; list what differs and fail
    python tools/golden.py                    # record
    python tools/golden.py --only errors,help # some parts

Figures that depend on the processor are rounded, and times, sizes and versions are masked. The file belongs to the
tested versions of transformers and torch (constraints.txt).
"""

import argparse
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "120"}

import torch
import typer
from safetensors.torch import save_file

import tiny_base
import tiny_encodings
import tiny_models
from ctxext.api import METHODS, Recipe, convert, merge
from ctxext.cli.app import app
from ctxext.errors import CtxextError
from forked_processes import Processes
from small_llama import make_llama
from test_golden import FROZEN, options_by_command

FAMILIES = {
    **dict.fromkeys(
        ("llama", "qwen3", "phi3", "gemma3", "gemma3_text", "gpt_neox", "deepseek_v3", "glm4", "modernbert"),
        tiny_models,
    ),
    **dict.fromkeys(("bloom", "gpt2", "t5"), tiny_encodings),
}
"""Families whose converted configurations are recorded, and where they are built."""

ROTARY = ("pi", "abf", "yarn", "dynamic", "self-extend")
OTHERS = ("ntk-alibi", "table", "buckets", "window", "declare")
"""Methods whose configurations are recorded, for families with and without rotary embeddings."""

VOLATILE = re.compile(r"second|time|memory|version|date|created|processor|device|stamp|path|folder|machine|hours|rate")
"""Keys of reports with values that differ between two runs or two machines."""

Parts = Iterator[tuple[str, Any]]


def digest(content: str | bytes) -> str:
    """Shorten a text to eight characters."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:8]


def mask_numbers(text: str) -> str:
    """Replace every number, pictures and the widths that numbers pad."""
    text = re.sub(r"data:image/[^\"')]+", "IMAGE", text)
    return re.sub(r"[ ─━]{2,}", " ", re.sub(r"\d+([.,:]\d+)*", "0", text))


def round_figures(value: Any, key: str = "") -> Any:
    """Round figures to three digits and omit the keys that match VOLATILE."""
    if isinstance(value, dict):
        return {name: round_figures(one, name) for name, one in sorted(value.items()) if not VOLATILE.search(name)}
    if isinstance(value, list):
        return [round_figures(one, key) for one in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def build(name: str) -> Recipe:
    """Build a recipe of one method, with factor 2 and a base of 50,000 if it has these parameters."""
    method = next(method for method in METHODS if method.name == name)
    names = inspect.signature(method).parameters
    return Recipe([method(**{key: value for key, value in (("factor", 2.0), ("theta", 5e4)) if key in names})])


def changed_keys(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Parts:
    """Yield each key of `after` whose value differs, with dots in nested names, and each key that is gone."""
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(new, dict):
            yield from changed_keys(old if isinstance(old, dict) else {}, new, f"{prefix}{key}.")
        elif old != new and key != "version":
            yield f"{prefix}{key}", new


class Golden:
    """Compute each recorded part in an empty folder.

    Args:
        place: The folder.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.clean = Processes("clean")
        self.ours = Processes("ours", clean=self.clean)

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run a command in the folder; return its exit code and both outputs without the folder's name."""
        command = [sys.executable, "-m", "ctxext", *words]
        env = {**os.environ, "CTXEXT_CLEAN": self.clean.listening(), "HF_HOME": str(self.place / "hub")}
        done = self.ours.run(command, capture_output=True, text=True, cwd=self.place, env=env, check=False)
        return done.returncode, *(text.replace(str(self.place), "TMP") for text in (done.stdout, done.stderr))

    def succeed(self, *words: str) -> str:
        """Run a command that must succeed; return its standard output."""
        code, output, errors = self.run(*words)
        if code:
            raise SystemExit(f"ctxext {' '.join(words)}: {errors}")
        return output

    def configurations(self) -> Parts:
        """Record what each of five methods changes in config.json of twelve families, or why it refuses."""
        for family, room in FAMILIES.items():
            source = room.save(family, self.place / family)
            before = json.loads((source / "config.json").read_text())
            for name in OTHERS if room is tiny_encodings else ROTARY:
                try:
                    convert(str(source), self.place / "converted", build(name), check=False, overwrite=True)
                except CtxextError as error:
                    yield f"{family} {name}", str(error).replace(str(self.place), "TMP")
                    continue
                after = json.loads((self.place / "converted" / "config.json").read_text())
                yield f"{family} {name}", dict(changed_keys(before, after))

    def help(self) -> Parts:
        """Digest the help of every command."""
        for command in ("", *typer.main.get_command(app).commands):
            for flag in ("--help", "--help-all")[: 2 if command else 1]:
                yield f"{command} {flag}".strip(), digest(self.run(*command.split(), flag)[1])

    def options(self) -> Parts:
        """List the options of each command."""
        yield from options_by_command().items()

    def errors(self) -> Parts:
        """Record the errors for wrong values of every option and for wrong files."""
        tiny_base.make_base(self.place / "tiny")
        tiny_base.write_jsonl(self.place / "texts.jsonl")
        for words in wrong_lines(self.place):
            code, output, errors = self.run(*words)
            yield " ".join(words), f"{code} {errors.strip() or digest(mask_numbers(output))}" if code else "0"

    def evaluations(self) -> Parts:
        """Digest two reports and their printed form."""
        asked = (
            (
                "needles",
                "demo",
                "--task",
                "needle,kv,passkey",
                "--lengths",
                "256,512",
                "--depths",
                "2",
                "--samples",
                "2",
            ),
            ("losses", "demo", "--task", "short,perplexity", "--lengths", "512", "--samples", "2"),
        )
        for name, *words in asked:
            output = self.succeed("eval", *words, "--seed", "3", "--device", "cpu", "--dtype", "fp32", "--out", name)
            yield f"{name} output", digest(mask_numbers(output))
            yield from self.report(name)

    def report(self, name: str) -> Parts:
        """Digest a folder with a report."""
        folder = self.place / name
        yield f"{name} files", sorted(path.name for path in folder.iterdir())
        report = round_figures(json.loads((folder / "report.json").read_text()))
        yield f"{name} report.json", {key: digest(json.dumps(value, sort_keys=True)) for key, value in report.items()}
        yield f"{name} report.html", digest(mask_numbers((folder / "report.html").read_text()))

    def comparison(self) -> Parts:
        """List the files of a comparison of two methods on the demo; its text depends on the run time."""
        words = ("demo", "--target-length", "1k", "--methods", "yarn,self-extend", "--task", "needle", "--samples", "2")
        self.succeed("compare", *words, "--depths", "2", "--device", "cpu", "--dtype", "fp32", "--out", "compared")
        folder = self.place / "compared"
        yield "files", sorted(path.name for path in folder.iterdir())
        report = json.loads((folder / "report.json").read_text())
        yield "models", digest(json.dumps(round_figures(report["models"]), sort_keys=True))

    def training(self) -> Parts:
        """Record the losses of four steps, a dry run, and the digests of a merged checkpoint."""
        base = tiny_base.make_base(self.place / "trained")
        options = tiny_base.dataclasses.replace(tiny_base.QUICK, steps=4, save_every=4)
        tuned = tiny_base.tune(base, self.place / "tuned", options)
        yield "losses", [f"{loss:.4f}" for _, loss in tuned.losses]
        yield "training files", sorted(path.name for path in tuned.folder.rglob("*"))
        tiny_base.write_jsonl(self.place / "texts.jsonl")
        words = (
            "finetune",
            "trained/base",
            "dry",
            "--data",
            "texts.jsonl",
            "--length",
            "64",
            "--steps",
            "4",
            "--device",
            "cpu",
        )
        yield "dry run", digest(mask_numbers(self.succeed(*words, "--dry-run")))
        adapter = exact_adapter(self.place / "adapter", base)
        merge(base, adapter, self.place / "merged")
        for path in sorted((self.place / "merged").iterdir()):
            if path.suffix in (".safetensors", ".md") or path.name == "config.json":
                yield f"merged {path.name}", digest(path.read_bytes().replace(str(self.place).encode(), b"TMP"))


def exact_adapter(folder: Path, base: Path) -> Path:
    """Write a LoRA adapter that is exact in float32 when multiplied with the weights, on every processor."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(2):
        for name, rows in (("q_proj", 32), ("v_proj", 16)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{prefix}A.weight"] = (torch.arange(64) % 7 - 3.0).reshape(2, 32) / 64
            tensors[f"{prefix}B.weight"] = (torch.arange(2 * rows) % 5 - 2.0).reshape(rows, 2) / 64
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("inspect", "eval", "verify"), ("nowhere",)),
    **{"compare": ("nowhere", "--target-length", "1k"), "search": ("nowhere", "out.yaml", "--target-length", "1k")},
    **{
        "convert": ("nowhere", "out", "--method", "pi"),
        "merge": ("nowhere", "none", "out"),
        "questions": ("nowhere", "texts.jsonl", "out.jsonl"),
        "export": ("gguf", "nowhere"),
    },
    **{"push": ("nowhere", "me/name"), "finetune": ("nowhere", "out", "--data", "texts.jsonl")},
}
"""Arguments of each command in the calls with one wrong option."""


def wrong_lines(place: Path) -> Iterator[tuple[str, ...]]:
    """Yield command lines that must fail: wrong values of every option, wrong parameters, wrong files."""
    for name, command in typer.main.get_command(app).commands.items():
        yield (name, "--no-such-option")
        for one in command.params if name in ARGUMENTS else ():
            if one.param_type_name == "option" and not one.is_flag:
                yield name, *ARGUMENTS[name], one.opts[0], "wrong"
    for name in sorted({name for method in METHODS for name in inspect.signature(method).parameters}):
        for value in ("-1", "nan"):
            owner = next(method for method in METHODS if name in inspect.signature(method).parameters)
            recipe = place / f"{name}{value}.yaml"
            recipe.write_text(f"steps:\n- method: {owner.name}\n  {name}: {value}\n")
            yield "convert", "demo", "--dry-run", "--recipe", recipe.name
    yield from wrong_files(place)


def wrong_files(place: Path) -> Iterator[tuple[str, ...]]:
    """Yield command lines on checkpoints and files with one defect."""
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        **{
            f"no-{key}": lambda config, key=key: config.pop(key)
            for key in ("model_type", "max_position_embeddings", "hidden_size")
        },
        **{
            f"{key}-{value}": lambda config, key=key, value=value: config.update({key: value})
            for key in ("max_position_embeddings", "num_attention_heads", "rope_parameters", "rope_scaling", "head_dim")
            for value in ("x", -1, 0)
        },
        "unknown-model": lambda config: config.update(model_type="unknown"),
        "quantized": lambda config: config.update(quantization_config={"quant_method": "gptq", "bits": 4}),
    }
    for name, change in changes.items():
        source = make_llama(place / f"wrong-{name}")
        config = json.loads((source / "config.json").read_text())
        change(config)
        (source / "config.json").write_text(json.dumps(config))
        for command in ("inspect", "convert"):
            yield command, source.name, *(("out", "--method", "yarn", "--factor", "2") if command == "convert" else ())
    contents = {
        "empty": "",
        "list": "[]",
        "half": '{"model_type": "llama"',
        "twice": '{"a": 1, "a": 2}',
        "null": "null",
    }
    for name, text in contents.items():
        source = make_llama(place / f"config-{name}")
        (source / "config.json").write_text(text)
        yield "inspect", source.name
        (place / f"{name}.yaml").write_text(text)
        yield "convert", "demo", "--dry-run", "--recipe", f"{name}.yaml"
        (place / f"report-{name}").mkdir()
        (place / f"report-{name}" / "report.json").write_text(text)
        yield "push", "tiny/base", "me/name", "--no-verify", "--report", f"report-{name}"
        (place / f"data-{name}.jsonl").write_text(text)
        yield "finetune", "demo", "out", "--data", f"data-{name}.jsonl", "--dry-run"
    source = make_llama(place / "cut")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    yield "inspect", "cut"
    yield "convert", "cut", "out", "--method", "pi", "--factor", "2"
    yield "verify", "cut"
    (place / "a-file").write_text("text")
    for words in (
        ("inspect", "a-file"),
        ("verify", "a-file"),
        ("merge", "demo", "a-file", "out"),
        ("convert", "a-file", "out", "--method", "pi"),
    ):
        yield words
    for words in (
        "convert demo a-file --method pi --factor 2",
        "convert demo out",
        "convert demo out --method nope",
        "eval demo --task nope",
    ):
        yield tuple(words.split())


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """List the entries that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{name}: {key}" if name else key)
    elif before != now:
        yield f"{name}\n  frozen: {before}\n  now:    {now}"


def compact(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Format each entry on one line, so that a change is one line of a diff."""
    entry = ",\n".join
    texts = (
        f"{json.dumps(name)}: {{\n"
        + entry(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(part.items()))
        + "\n}"
        for name, part in sorted(parts.items())
    )
    return "{" + entry(texts) + "}"


def main() -> None:
    """Record or compare."""
    parts = ("options", "help", "errors", "configurations", "training", "evaluations", "comparison")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default=",".join(parts))
    asked = parser.parse_args()
    frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        golden = Golden(Path(place).resolve())
        os.chdir(place)
        try:
            now = {name: json.loads(json.dumps(dict(getattr(golden, name)()))) for name in asked.only.split(",")}
        finally:
            golden.clean.end()
            os.chdir(ROOT)
    if not asked.check:
        FROZEN.write_text(compact(frozen | now) + "\n")
        return
    found = [line for name, part in now.items() for line in differences(frozen.get(name), part, name)]
    print("\n".join(found) or "Nothing changed.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
