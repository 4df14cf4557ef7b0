"""A rank of tensor parallelism holds a slice of the heads, and takes that slice's numbers."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ctxext.methods import MsPoE
from ctxext.portable.method import Call
from ctxext.recipes.methods.self_extend import SelfExtend
from portable_checkpoints import llama, load, write

SCRIPT = Path(__file__).with_name("tensor_parallel.py")
HEADS = MsPoE(head_order="fixed", first_layer=0, ratio_min=1.5, ratio_max=4)
RECIPES = {
    "heads": [HEADS],
    "calibrated": [
        MsPoE(head_order="calibrated", ranks=((3, 0, 2, 1),) * 3, first_layer=0, schedule="by-parts", ratio_max=4)
    ],
    "heads and relation map": [HEADS, SelfExtend(factor=2, window=32)],
}


LENGTH = 300  # Past the trained length of 256.


@pytest.mark.thorough
def test_two_processes_give_the_logits_of_one(tmp_path):
    source = llama(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    folders = [tmp_path / name.replace(" ", "_") for name in RECIPES]
    for folder, steps in zip(folders, RECIPES.values(), strict=True):
        shutil.copytree(source, folder)
        write(folder, *steps)
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
            *(SCRIPT, str(LENGTH), tmp_path / "logits.pt", *folders),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    for folder, spread in zip(folders, torch.load(tmp_path / "logits.pt"), strict=True):
        with torch.no_grad():
            alone = load(folder)(torch.arange(3, 3 + LENGTH)[None] % 64).logits
        assert (spread - alone).abs().max() < 1e-5 * max(1.0, alone.abs().max().item()), folder.name


@pytest.mark.parametrize(
    ("rank", "local", "total", "first"),
    [(0, 4, 4, 0), (0, 2, 8, 0), (1, 2, 8, 2), (3, 2, 8, 6), (5, 2, 8, 2), (2, 1, 3, 2)],
)
def test_the_first_head_of_a_rank(rank, local, total, first, monkeypatch):
    """Ranks hold one slice after the other; where there are more of them than slices they begin again."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    call = SimpleNamespace(layer=0)
    Call.see_heads(call, local, total)
    assert (call.kv_heads, call.first_head) == (local, first)


@pytest.mark.parametrize(("local", "is_spread"), [(3, True), (4, False)])
def test_heads_that_are_no_rank_s_are_refused(local, is_spread, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: is_spread)
    with pytest.raises(ValueError, match=f"values for 8 KV heads, but layer 5 has {local}"):
        Call.see_heads(SimpleNamespace(layer=5), local, 8)
