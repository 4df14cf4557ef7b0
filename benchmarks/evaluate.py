"""Time of `ctxext eval` against a plain implementation, and memory of a loss over a long text.

    python benchmarks/evaluate.py [MODEL]

Time (CPU time without a GPU): a needle grid of 5 lengths × 11 depths × 5 samples. The plain way runs one whole prompt
and `generate` for each sample.
Memory: a loss over 16k tokens with a vocabulary of 128k words, each way in a separate process: the peak of the resident
set, and its growth after the model was loaded.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from ctxext.errors import CtxextError
from ctxext.models.answers import generate_exact, score_depths
from ctxext.models.checkpoint_info import open_infos
from ctxext.models.model import LoadedModel, Loading, load_model
from ctxext.models.token_losses import token_losses
from ctxext.recipes.code.layout import depends_on_prompt
from ctxext.tasks.needle import Needle
from ctxext.tasks.retrieval import make_questions
from ctxext.tasks.settings import Settings, even_depths

LENGTHS = (320, 512, 1024, 1536, 2048)
DEPTHS = even_depths(11)
SAMPLES = 5
clock = time.perf_counter if torch.cuda.is_available() else time.process_time
LONG, VOCABULARY = 16 * 1024, 128 * 1024


def time_grid(model: str, lengths: tuple[int, ...]) -> None:
    """Run both ways in turn for every length, so that a busy machine slows both equally."""
    (info,) = open_infos([model])
    loaded = load_model(info, Loading())
    settings = Settings(depths=DEPTHS, samples=SAMPLES)
    totals = {"plain": 0.0, "ctxext": 0.0}
    same, right = True, 0
    print(f"needle, {len(lengths)} lengths × {len(DEPTHS)} depths × {SAMPLES} samples, {model}, {loaded.facts()}")
    print(f"{'length':>8} {'plain s':>9} {'ctxext s':>9} {'ratio':>6}")
    warm = make_questions(Needle(), loaded.encoder, lengths[0], [0], settings)
    list(score_depths(loaded, warm, [0])), list(generate_exact(loaded, warm, [0]))
    for length in lengths:
        questions = make_questions(Needle(), loaded.encoder, length, range(SAMPLES), settings)
        started = clock()
        ours = dict(score_depths(loaded, questions, range(len(DEPTHS))))
        middle = clock()
        plain = {depth: [] for depth in range(len(DEPTHS))}
        for question in questions:
            for depth, (correct,) in generate_exact(loaded, [question], range(len(DEPTHS))):
                plain[depth].append(correct)
        ended = clock()
        totals["ctxext"] += middle - started
        totals["plain"] += ended - middle
        same &= ours == plain
        right += sum(map(sum, ours.values()))
        print(
            f"{length:>8} {ended - middle:>9.2f} {middle - started:>9.2f} {(middle - started) / (ended - middle):>6.2f}"
        )
    ratio = totals["ctxext"] / totals["plain"]
    target = 0.6 if depends_on_prompt(loaded.model.config.to_dict()) else 0.35
    print(f"{'all':>8} {totals['plain']:>9.2f} {totals['ctxext']:>9.2f} {ratio:>6.2f}   target ≤ {target}")
    print(f"same cells: {'yes' if same else 'NO'} ({right} of {len(lengths) * len(DEPTHS) * SAMPLES} right)\n")


def peak_mib() -> float:
    """Return the peak resident set of this process in MiB since the last reset."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1024


def reset_peak() -> float:
    """Reset the peak (Linux only) and return the current resident set in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


def measure_memory(way: str) -> None:
    """Measure one way in this process and print its figures as JSON."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONG,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, VOCABULARY, (1, LONG))
    with torch.inference_mode():
        model(input_ids=ids[:, :8], logits_to_keep=1)
    before = reset_peak()
    started = clock()
    if way == "forward without logits":
        with torch.inference_mode():
            model.model(input_ids=ids, use_cache=False)
    else:
        token_losses(LoadedModel("tiny", model, None, can_share=False), ids)
    print(json.dumps({"peak": peak_mib(), "added": max(0.1, peak_mib() - before), "seconds": clock() - started}))


def compare_memory() -> None:
    """Measure each way in a fresh process and print the table."""
    print(
        f"peak memory at {LONG} tokens with {VOCABULARY} words (full logits alone: {LONG * VOCABULARY * 4 >> 30} GiB)"
    )
    print(f"{'':>24} {'peak MiB':>9} {'added MiB':>10} {'seconds':>8}")
    found = {}
    for way in ("forward without logits", "loss of every token"):
        result = subprocess.run(
            [sys.executable, __file__, "--memory", way], capture_output=True, text=True, check=True
        ).stdout
        found[way] = json.loads(result.splitlines()[-1])
        figures = found[way]
        print(f"{way:>24} {figures['peak']:>9.0f} {figures['added']:>10.1f} {figures['seconds']:>8.1f}")
    without, loss = found["forward without logits"], found["loss of every token"]
    print(
        f"{'ratio':>24} {loss['peak'] / without['peak']:>9.2f} {loss['added'] / without['added']:>10.2f}   target ≤ 1.2"
    )


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        measure_memory(options.memory)
        return
    time_grid(options.model, tuple(int(length) for length in options.lengths.split(",")))
    compare_memory()


if __name__ == "__main__":
    try:
        main()
    except CtxextError as error:
        sys.exit(f"{error.message} {error.hint}")
