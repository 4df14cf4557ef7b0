"""A rank of tensor parallelism holds a slice of the heads, and takes that slice's numbers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ctxext.recipes import MsPoE
from ctxext.recipes.relation import SelfExtend
from portable_checkpoints import MODERN, llama, load, write

SCRIPT = Path(__file__).with_name("tensor_parallel.py")
HEADS = MsPoE(head_order="fixed", first_layer=0, ratio_min=1.5, ratio_max=4)
RECIPES = {
    "heads": [HEADS],
    "calibrated": [
        MsPoE(head_order="calibrated", ranks=((3, 0, 2, 1),) * 3, first_layer=0, schedule="by-parts", ratio_max=4)
    ],
    "heads and relation map": [HEADS, SelfExtend(factor=2, window=32)],
}


@pytest.mark.skipif(not MODERN, reason="transformers 4.57 spreads over accelerators only")
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_give_the_logits_of_one(recipe, tmp_path):
    source = llama(tmp_path / "source", num_attention_heads=8, num_key_value_heads=4)
    folder = tmp_path / "converted"
    shutil.copytree(source, folder)
    write(folder, *RECIPES[recipe])
    length = 300  # Past the trained length of 256.
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
            *(SCRIPT, folder, str(length), tmp_path / "logits.pt"),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    with torch.no_grad():
        alone = load(folder)(torch.arange(3, 3 + length)[None] % 64).logits
    found = torch.load(tmp_path / "logits.pt")
    assert (found - alone).abs().max() < 1e-5 * max(1.0, alone.abs().max().item())
