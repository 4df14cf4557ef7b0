"""Startup time of light commands, against importing typer and rich.

    python benchmarks/startup.py [--rounds 7]

Each runs in a separate process, in turn; the least CPU time of each counts. The exit code is 1 if a command takes
longer than its bound, a multiple of `import typer, rich`.
"""

import argparse
import resource
import subprocess
import sys

BASE = ("-c", "import typer, rich")
BOUNDS = {("--help",): 3.0, ("methods",): 4.0, ("inspect", "demo"): 5.0}


def seconds(*words: str) -> float:
    """Return the CPU seconds of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure, print a table, and return 1 if a command exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    calls = {BASE: BASE, **{words: ("-m", "ctxext", *words) for words in BOUNDS}}
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, words in calls.items():
            least[name] = min(least[name], seconds(*words))
    print(f"import typer, rich    {least[BASE]:.3f} s")
    for words, bound in BOUNDS.items():
        print(
            f"{'ctxext ' + ' '.join(words):20}  {least[words]:.3f} s  {least[words] / least[BASE]:.2f} x of {bound:g}"
        )
    return int(any(least[words] > bound * least[BASE] for words, bound in BOUNDS.items()))


if __name__ == "__main__":
    sys.exit(main())
