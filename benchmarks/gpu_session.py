"""All measurements on an accelerator in one run, for a machine that is available for a few minutes.

    python benchmarks/gpu_session.py [--minutes 9] [--parts logits,methods,windows,training]
    python benchmarks/gpu_session.py --device cpu --shape tiny

Each part is a process with a time limit: its share of the remaining time. A part that fails or is stopped does not
affect the others. Its figures are in PART.jsonl, written as they are measured, and its messages in session.log.
session.jsonl has a line for each part.

The machine needs torch, transformers, peft and accelerate, but neither ctxext nor a network: ctxext is imported from
src/, and the packages that are missing are installed from wheels (`make gpu-wheels`) into a temporary folder.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Part(NamedTuple):
    """A part of the session: its script, its arguments by shape, and its share of the time."""

    script: str
    full: str
    tiny: str
    share: float


PARTS = {
    "logits": Part("logits.py", "--shape small", "--shape tiny", 1.5),
    "methods": Part("gpu.py", "--shape 8b", "--shape tiny --methods dca,mspoe", 3.5),
    "windows": Part(
        "gpu.py",
        "--shape gemma3 --piece 4096 --methods self-extend,dca,adaptive",
        "--shape tiny-gemma3 --piece 100 --methods dca",
        2,
    ),
    "training": Part(
        "finetune.py",
        "--shape 8b --dtype bf16 --lengths 8192 32768 --rounds 1 --steps 2 --sides ctxext trainer --json",
        "--shape tiny --dtype bf16 --lengths 128 --rounds 1 --steps 1 --sides ctxext --json",
        2,
    ),
}

# Imports everything that the parts need, and prints the device and the versions.
IMPORTS = """
import json, platform, sys
import accelerate, peft, torch, transformers
import ctxext.api, ctxext.finetune.loss
device = sys.argv[1]
name = platform.machine() if device == "cpu" else getattr(torch, device.split(":")[0]).get_device_name()
modules = [ctxext, torch, transformers, peft, accelerate]
versions = {module.__name__: module.__version__ for module in modules}
print(json.dumps({"device": name, "python": platform.python_version(), **versions}))
"""


def prepare(wheels: Path, folder: Path, device: str) -> tuple[dict[str, str], dict]:
    """Return an environment in which ctxext can be imported, and the versions of its packages.

    Wheels are installed into the folder if an import fails without them; nothing that is installed is changed.
    """
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *before])
    files = sorted(map(str, wheels.glob("*.whl")))
    check = [sys.executable, "-c", IMPORTS, device]
    result = subprocess.run(check, env=environment, capture_output=True, text=True, check=False)
    if result.returncode and files:
        packages = folder / "packages"
        words = "install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --target"
        subprocess.run([sys.executable, "-m", "pip", *words.split(), str(packages), *files], check=True)
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), environment["PYTHONPATH"]])
        result = subprocess.run(check, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{result.stderr}\nctxext cannot be imported. For missing packages: make gpu-wheels")
    return environment, json.loads(result.stdout.splitlines()[-1])


def run_part(command: list[str], seconds: float, figures: Path, log: Path, environment: dict[str, str]) -> dict:
    """Run a command with a time limit, its output in a file; return its state and its seconds."""
    started = time.monotonic()
    with figures.open("w") as output, log.open("a") as messages:
        # A process group, so that the processes of a part that is stopped release the accelerator too.
        process = subprocess.Popen(command, stdout=output, stderr=messages, env=environment, process_group=0)
        try:
            code = process.wait(timeout=max(seconds, 0))
            state = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            state = f"stopped at its limit of {seconds:.0f} s"
        finally:
            stop_group(process)
    lines = len(figures.read_text().splitlines())
    return {"state": state, "seconds": round(time.monotonic() - started, 1), "lines": lines}


def stop_group(process: subprocess.Popen) -> None:
    """Kill a process with its children, if any still run."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def run(names: list[str], end: float, out: Path, environment: dict[str, str], device: str, shape: str) -> list[dict]:
    """Run parts until a time of the monotonic clock; return the line of each."""
    lines = []
    log = out / "session.log"
    for i, name in enumerate(names):
        part, figures = PARTS[name], out / f"{name}.jsonl"
        shares = sum(PARTS[later].share for later in names[i:])
        limit = (end - time.monotonic()) * part.share / shares
        words = [str(ROOT / "benchmarks" / part.script), "--device", device, *getattr(part, shape).split()]
        with log.open("a") as messages:
            messages.write(f"== {name}\n")
        before = log.stat().st_size
        line = {"part": name, **run_part([sys.executable, *words], limit, figures, log, environment)}
        print(f"== {name}", figures.read_text(), sep="\n", end="", flush=True)
        if line["state"] != "done":
            print(log.read_bytes()[before:].decode(errors="replace")[-2000:])
        lines.append(line)
        append(out / "session.jsonl", line)
    return lines


def append(file: Path, line: dict) -> None:
    """Print a line of JSON and append it to a file."""
    print(json.dumps(line), flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def main() -> int:
    """Prepare the environment and run the parts; return 1 if any is not done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda or cpu.")
    parser.add_argument("--shape", choices=("full", "tiny"), default="full")
    parser.add_argument("--minutes", type=float, default=9, help="Time limit of the whole session.")
    parser.add_argument("--parts", default=",".join(PARTS), help="Parts to run, in this order.")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-out")), help="Folder for figures.")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", help="Folder with the missing packages.")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}")
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    for file in ("session.jsonl", "session.log"):
        (options.out / file).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        environment, versions = prepare(options.wheels, Path(folder), options.device)
        append(options.out / "session.jsonl", {**versions, "seconds": round(time.monotonic() - started, 1)})
        end = started + 60 * options.minutes
        lines = run(names, end, options.out, environment, options.device, options.shape)
    return int(any(line["state"] != "done" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
