"""Processor time and memory of `ctxext eval` beside lm-evaluation-harness, on the same prompts.

    python benchmarks/beside_lm_eval.py MODEL [--length 4096] [--samples 20] [--task niah-single-1]

The prompts are those of `ctxext eval`. The harness reads them from a file and writes up to 128 tokens for each, as its
RULER tasks do. Each program is a whole process in its default options, except for the dtype; both run in turn.
Needs lm_eval (`pip install "ctxext[harness]"`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ctxext.data.encoding import Encoder
from ctxext.models.checkpoint_info import open_infos
from ctxext.models.loading import Loading
from ctxext.models.model import load_tokenizer
from ctxext.tasks.registry import TASKS
from ctxext.tasks.retrieval import make_questions
from ctxext.tasks.settings import Settings, even_depths

DEPTHS = 5
NUM_GENERATED = 128
"""Maximum number of generated tokens in the harness's RULER tasks."""

TASK = f"""
task: same_prompts
dataset_path: json
dataset_kwargs: {{data_files: {{test: %s}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{input}}}}"
doc_to_target: "{{{{output}}}}"
generation_kwargs: {{do_sample: false, temperature: 0.0, max_gen_toks: {NUM_GENERATED}, until: []}}
process_results: !function found.found
metric_list: [{{metric: found, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""

FOUND = """
def found(doc, results):
    return {"found": float(doc["output"] in results[0])}
"""


def write_task(folder: Path, model: str, task: str, length: int, texts: int) -> None:
    """Write the prompts and a task of the harness that reads them."""
    (info,) = open_infos([model])
    encoder = Encoder(load_tokenizer(info, Loading()))
    settings = Settings(tasks=(task,), lengths=(length,), depths=even_depths(DEPTHS), samples=texts)
    tokenizer, rows = encoder.tokenizer, []
    for question in make_questions(TASKS[task], encoder, length, range(texts), settings):
        for prompt in question:
            text = tokenizer.decode(prompt.ids[: -prompt.num_answer])
            rows.append({"input": text.removeprefix(tokenizer.bos_token or ""), "output": prompt.answers[0].strip()})
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK % (folder / "prompts.jsonl"))
    (folder / "found.py").write_text(FOUND)


def measure(command: list[str], log: Path) -> dict[str, float]:
    """Run a command and return its processor time and time in seconds, and its peak memory in GB."""
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{log.read_text()[-2000:]}")
    return {
        "processor s": usage.ru_utime + usage.ru_stime,
        "s": time.monotonic() - began,
        "GB": usage.ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    """Measure both programs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--task", default="niah-single-1")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=20, help="Prompts: texts × depths.")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    texts = max(1, options.samples // DEPTHS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, options.model, options.task, options.length, texts)
        ours = [
            *(sys.executable, "-m", "ctxext", "eval", options.model, "--task", options.task),
            *("--lengths", str(options.length), "--samples", str(texts), "--depths", str(DEPTHS)),
            *("--dtype", {"float32": "fp32", "bfloat16": "bf16"}[options.dtype], "--out", str(folder / "report")),
        ]
        arguments = f"pretrained={options.model},dtype={options.dtype},max_length={2 * options.length}"
        theirs = [
            *(sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--device", "cpu"),
            *("--tasks", "same_prompts", "--include_path", name, "--output_path", str(folder / "harness")),
        ]
        print(f"{options.task} at {options.length} tokens, {texts} texts × {DEPTHS} depths, {options.dtype}")
        found = {}
        for program, command in (("ctxext eval", ours), ("lm_eval hf", theirs)):
            found[program] = measure(command, folder / "log")
            print(f"{program:>12}", *(f"{value:9.1f} {unit}" for unit, value in found[program].items()))
            print((folder / "log").read_text()[-600:])
        first, second = found.values()
        print(f"{'ratio':>12}", *(f"{first[unit] / second[unit]:9.2f} {unit}" for unit in first))


if __name__ == "__main__":
    main()
