"""One training step at 8192 tokens and a vocabulary of 128 256: ctxext against the plain Trainer and peft.

Each side runs in a separate process, which separates their peak memory. Prints a table for each length.

    python benchmarks/finetune.py [--lengths 8192] [--vocabulary 128256] [--steps 3] [--dtype fp32]
    python benchmarks/finetune.py --shape 135m --lengths 1024 2048 4096 8192
    python benchmarks/finetune.py --shape 8b --dtype bf16 --device cuda --lengths 8192 32768 --json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Width, inner width, layers, heads, KV heads, vocabulary: two toys, the shape of a model of 135M parameters, and four
# layers of Llama 3.1 8B.
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 1024),
    "toy": (64, 128, 2, 8, 4, 128256),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "8b": (4096, 14336, 4, 32, 8, 128256),
}
SIDES = ("trainer", "ctxext")


def make_model(options):
    """Return a random Llama of the chosen shape."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    width, inner, layers, heads, kv_heads, _ = SHAPES[options.shape]
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def run_side(options):
    """Train a few steps and print seconds per step and the memory that training added, as JSON."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ctxext.files.processes import forget_peak, peak_memory
    from ctxext.finetune.loss import use_chunked_loss

    ours = options.side != "trainer"
    model = make_model(options)
    if ours:
        use_chunked_loss(model)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(0, options.vocabulary, (options.steps + 1, options.length))
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]
    times, losses = [], []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            times.append((time.perf_counter(), time.process_time()))

        def on_log(self, args, state, control, logs=None, **kwargs):
            losses.extend([logs["loss"]] if "loss" in logs else [])

    forget_peak(adapted.device)
    before = peak_memory(adapted.device) if options.device == "cpu" else torch.cuda.memory_allocated()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=options.steps + 1,
            per_device_train_batch_size=1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=options.device == "cpu",
        )
        trainer = Trainer(model=adapted, args=arguments, train_dataset=rows, callbacks=[Clock()])
        trainer.train()
    seconds, cpu = ((last - first) / (len(times) - 1) for first, last in zip(times[0], times[-1], strict=True))
    found = {
        "seconds": seconds,
        "cpu": cpu,
        "memory": peak_memory(adapted.device) - before,
        "peak": peak_memory(adapted.device),
        "loss": losses[0],
    }
    sys.stderr.write(json.dumps(found) + "\n")


def main():
    """Run the sides in every round and print a table for each length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="toy")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    parser.add_argument("--vocabulary", type=int, help="vocabulary size; default: that of the shape")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one warmup step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each side instead of a table")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.vocabulary = options.vocabulary or SHAPES[options.shape][-1]
    if options.side:
        run_side(options)
        return
    for length in options.lengths:
        options.length = length
        if options.json:
            print_lines(options)
        else:
            print_table(options)


class SideError(SystemExit):
    """The process of a side failed; the message is its stderr."""


def measure_side(options, side: str) -> dict:
    """Return the figures of a side's process."""
    script = str(Path(__file__))
    command = [sys.executable, script, *sys.argv[1:], "--side", side, "--length", str(options.length)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SideError(result.stderr.strip() or f"exit code {result.returncode}")
    return json.loads(result.stderr.strip().splitlines()[-1])


def print_lines(options):
    """Print the best of the rounds of each side at one length, or its error."""
    for side in options.sides:
        line = {"side": side, "length": options.length, "shape": options.shape, "dtype": options.dtype}
        try:
            runs = [measure_side(options, side) for _ in range(options.rounds)]
            best = {key: min(run[key] for run in runs) for key in ("seconds", "memory", "peak")}
            line |= {"tokens_per_s": options.length / best["seconds"], "loss": runs[0]["loss"], **best}
        except SideError as error:
            sys.stderr.write(f"{error}\n")
            line["error"] = str(error).splitlines()[-1]
        print(json.dumps(line), flush=True)


def print_table(options):
    """Run all sides at one length and print their table."""
    found = {side: [] for side in options.sides}
    for _ in range(options.rounds):  # The sides alternate, so that a busy machine slows both equally.
        for side in options.sides:
            found[side].append(measure_side(options, side))
    print(f"{options.length} tokens, vocabulary {options.vocabulary}, shape {options.shape}, "
          f"{options.dtype} on {options.device}; best of {options.rounds}")  # fmt: skip
    print(f"{'':16}{'s/step':>9}{'CPU s':>8}{'tokens/s':>10}{'peak GiB':>10}{'step GiB':>10}{'loss':>9}")
    first = None
    for side, runs in found.items():
        seconds, cpu, memory, peak = (min(run[key] for run in runs) for key in ("seconds", "cpu", "memory", "peak"))
        line = f"{side:16}{seconds:9.2f}{cpu:8.2f}{options.length / seconds:10,.0f}"
        line += f"{peak / 2**30:10.2f}{memory / 2**30:10.2f}"
        first = first or (seconds, cpu, memory, peak)
        ratio = f"   speed × {first[0] / seconds:.2f} (CPU time: {first[1] / cpu:.2f}), "
        ratio += f"peak × {peak / first[3]:.2f}, step × {memory / first[2]:.2f}"
        print(line + f"{runs[0]['loss']:9.4f}" + ratio)


if __name__ == "__main__":
    main()
