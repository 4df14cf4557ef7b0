"""Cost of measuring a recipe: applied to the model in memory, against converting, loading and evaluating it.

    python benchmarks/search.py [--rounds 3]

The same recipes are measured on the same questions in three ways, in turn: (1) as a search does, on the loaded model;
(2) converted to a folder, loaded and asked, in one process; (3) by the commands a user would type, `ctxext convert` and
`ctxext eval` with as many prompts and documents. Processor time of the process and its children; the answers of (1) and
(2) must be the same to the last bit. The last row is what a trial costs on average, given up early or not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ctxext.api import Recipe, SearchOptions, convert, search
from ctxext.methods import MsPoE, Ntk, Yarn
from ctxext.models.checkpoint_info import open_infos
from ctxext.models.model import Loading, load_model
from ctxext.models.recipe_applier import RecipeApplier
from ctxext.search.measurement import EvalSet, Measurement, make_eval_sets, measure

RECIPES = {
    "ntk ×4": Recipe([Ntk(factor=4)]),
    "yarn ×4": Recipe([Yarn(factor=4)]),
    "mspoe by parts, fixed order": Recipe([MsPoE(schedule="by-parts", ratio_min=2, ratio_max=4, head_order="fixed")]),
}
OPTIONS = SearchOptions(target_length=2048)
TRIALS = 24


def clock() -> float:
    """Return the CPU time of this process and of its finished children, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def in_place(applier: RecipeApplier, eval_set: EvalSet, recipe: Recipe) -> Measurement:
    """Measure a recipe as a search does, on the loaded model."""
    return measure(applier.apply(applier.prepare(recipe)), eval_set)


def measure_converted(eval_set: EvalSet, recipe: Recipe, place: Path) -> Measurement:
    """Convert the demo, load the result and measure it, in this process."""
    convert("demo", place, recipe, check=False)
    (info,) = open_infos([str(place)])
    return measure(load_model(info, Loading()), eval_set)


def by_commands(recipe: Recipe, place: Path) -> None:
    """Convert and evaluate with the commands that a user would type."""
    place.mkdir()
    (place / "recipe.yaml").write_text(json.dumps(recipe.to_dict()))
    words = ["convert", "demo", place / "out", "--recipe", place / "recipe.yaml", "--no-verify", "-q"]
    run(*words)
    lengths = ",".join(map(str, OPTIONS.list_lengths(512)))
    asked = ["--samples", OPTIONS.samples, "--lengths", lengths, "--allow-beyond"]
    run("eval", place / "out", "--task", "needle,short", *asked, "--out", place / "report", "-q")


def run(*words: Any) -> None:
    """Run one command in a separate process."""
    subprocess.run([sys.executable, "-m", "ctxext", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def time_all(rounds: int) -> dict[str, float]:
    """Return the mean seconds of each way, over all recipes and rounds."""
    (info,) = open_infos(["demo"])
    stock = load_model(info, Loading())
    eval_set = make_eval_sets(stock.encoder, OPTIONS, 512)[0]
    spent = dict.fromkeys(("in place", "convert, load, ask", "ctxext convert, ctxext eval"), 0.0)
    with tempfile.TemporaryDirectory() as folder:
        applier = RecipeApplier(stock, info.checkpoint, Path(folder) / "bench")
        in_place(applier, eval_set, next(iter(RECIPES.values())))
        for number in range(rounds):
            for name, recipe in RECIPES.items():
                place = Path(folder) / f"{number}{name}".replace(" ", "-")
                started = clock()
                ours = in_place(applier, eval_set, recipe)
                applied = clock()
                theirs = measure_converted(eval_set, recipe, place)
                loaded = clock()
                by_commands(recipe, place.with_name(f"{place.name}-commands"))
                ended = clock()
                assert ours == theirs, f"{name}: not the same answers"
                for way, seconds in zip(spent, (applied - started, loaded - applied, ended - loaded), strict=True):
                    spent[way] += seconds
    return {way: seconds / (rounds * len(RECIPES)) for way, seconds in spent.items()}


def average_trial() -> tuple[float, int]:
    """Return the CPU seconds per recipe of a search without its last checks, and the number of trials stopped early."""
    begun: list[float] = []

    def watch(state: Any) -> None:
        is_first = state.stage == "trying recipes" and not begun
        if is_first or state.stage == "measuring the best on more prompts":
            begun.append(clock())

    options = SearchOptions(target_length=2048, trials=TRIALS, checked=2)
    found = search("demo", options, watch=watch)
    early = len(found.state.trials) - len(found.state.points)
    return (begun[1] - begun[0]) / len(found.state.trials), early


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    spent = time_all(parser.parse_args().rounds)
    average, early = average_trial()
    commands = spent["ctxext convert, ctxext eval"]
    asked = f"{OPTIONS.samples} questions at each of 5 depths and 3 lengths, {2 * OPTIONS.samples} documents"
    print(f"demo, 512 to 2048 tokens, {asked}; {stamp()}")
    print(f"{'':46}{'seconds':>9}{'of in-process':>15}{'of commands':>13}")
    for way, seconds in spent.items():
        print(f"{way:46}{seconds:>9.2f}{seconds / spent['convert, load, ask']:>15.2f}{seconds / commands:>13.2f}")
    label = f"average of {TRIALS} trials, {early} given up early"
    print(f"{label:46}{average:>9.2f}{average / spent['convert, load, ask']:>15.2f}{average / commands:>13.2f}")


def stamp() -> str:
    """Return the versions and the date."""
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}"


if __name__ == "__main__":
    main()
