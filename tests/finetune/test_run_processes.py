"""Training in several processes on a machine gives the result of a single process."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from tiny_base import PARALLEL, load, logits, tune

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples" / "accelerate"


# accelerate shards only on accelerators; this enables it on a CPU, where torch supports it. For a save it
# requests whole tensors from torch, which returns shards on a CPU: they are gathered here.
ALLOW_FSDP = """
import accelerate.state as state
begin = state.AcceleratorState.__init__
def also_on_cpu(self, *args, fsdp_plugin=None, **kwargs):
    begin(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, fsdp_plugin
state.AcceleratorState.__init__ = also_on_cpu
import accelerate
gather = accelerate.Accelerator.get_state_dict
def gathered(self, *args, **kwargs):
    found = gather(self, *args, **kwargs)
    sharded = sum(hasattr(tensor, "full_tensor") for tensor in found.values())
    print(f"ran sharded: {sharded} of {len(found)}\\n", end="", flush=True)
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in found.items()}
accelerate.Accelerator.get_state_dict = gathered
"""

# Registered first, so called last: a remaining process group may abort the process at exit.
AT_THE_END = """
import atexit, torch
atexit.register(lambda: print(f"ran to the end, grouped: {torch.distributed.is_initialized()}\\n", end="", flush=True))
"""


def run_two(base, out, options, **environment):
    """Run in two processes, as started by `accelerate launch` or torchrun."""
    script = out.parent / "two.py"
    script.write_text(
        f"{ALLOW_FSDP}{AT_THE_END}import sys; sys.path[:0] = [{str(TESTS)!r}]\nfrom pathlib import Path\n"
        "from ctxext.api import TrainingOptions\nfrom tiny_base import tune\n"
        f"tune(Path({str(base)!r}), Path({str(out)!r}), {options!r})\n"
        "from accelerate.state import AcceleratorState\nprint('ran as', AcceleratorState().distributed_type.value)\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    words += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", str(script)]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", **environment}
    result = subprocess.run(words, env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-20000:]
    assert result.stdout.count("ran as MULTI_CPU") == 2, result.stdout
    assert result.stdout.count("ran to the end, grouped: False") == 2, result.stdout
    # Each process gathers at every save, and every weight is in shards.
    saves = [line for line in result.stdout.splitlines() if line.startswith("ran sharded")]
    assert len(saves) >= (4 if environment else 0), result.stdout
    assert all(line.split()[2] == line.split()[4] != "0" for line in saves), result.stdout
    assert bool(saves) == bool(environment), result.stdout


SLOWLY = """
import os, sys, time
sys.path[:0] = [{tests!r}]
from pathlib import Path
from ctxext.api import TrainingOptions
from ctxext.finetune import prepare
read = prepare._read_once
def slowly(*args, **named):
    time.sleep(4)
    return read(*args, **named)
prepare._read_once = slowly
from tiny_base import tune
tune(Path({base!r}), Path({out!r}), {options!r})
"""


@pytest.mark.thorough
def test_the_second_machine_waits_while_the_first_reads_its_data(base, short_trainings, tmp_path):
    """It failed with an assertion, because it waited only for processes of its own machine."""
    options = dataclasses.replace(PARALLEL, steps=1, save_every=1)
    script = tmp_path / "slowly.py"
    script.write_text(SLOWLY.format(tests=str(TESTS), base=str(base), out=str(tmp_path / "out"), options=options))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    shared |= {"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    machines = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **shared, "RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        said = [machine.communicate(timeout=200)[0] for machine in reversed(machines)]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], said


def launched(name):
    """Arguments and environment of `accelerate launch` with an example."""
    words = ["--config_file", str(EXAMPLES / name), "-m", "ctxext"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return arguments, {key: value for key, value in prepare_multi_gpu_env(arguments).items() if "FSDP" in key}


def test_examples_launch_with_their_documented_settings():
    fsdp, environment = launched("fsdp2.yaml")
    assert fsdp.use_fsdp
    assert environment["FSDP_VERSION"] == "2"
    deepspeed, _ = launched("deepspeed-zero3.yaml")
    assert deepspeed.use_deepspeed
    assert deepspeed.zero_stage == 3


@pytest.mark.thorough
@pytest.mark.parametrize("example", ["", "fsdp2.yaml"], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one(base, tmp_path, example):
    """Compare a single process with the shipped example.

    One step in two has fewer tokens to predict in one process than in the other, so that means would differ.
    """
    environment = launched(example)[1] if example else {}
    # In small pieces: one process has more of them than the other.
    options = dataclasses.replace(PARALLEL, piece=1)
    alone = tune(base, tmp_path / "one", options)
    run_two(base, tmp_path / "two", options, **environment)
    report = json.loads((tmp_path / "two" / "finetune.json").read_text())
    assert len(report["losses"]) == PARALLEL.steps
    for (step, loss), (_, expected) in zip(report["losses"], alone.losses, strict=True):
        assert abs(loss - expected) <= 1e-4, step
    one, two = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "two"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4
    assert (logits(load(tmp_path / "one")) - logits(load(tmp_path / "two"))).abs().max() < 1e-3
