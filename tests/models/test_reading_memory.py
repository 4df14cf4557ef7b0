"""The memory to read a long prompt, as `LoadedModel.estimate_memory` computes it, against what a process needs."""

import json
import os
import subprocess
import sys

import pytest

from ctxext.models.model import LoadedModel
from ctxext.models.prefix_cache import sharing_works
from hand_made import tiny_llama
from tiny_models import build

SCRIPT = """
import ctypes, gc, json, sys, torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from ctxext.files.processes import forget_peak, peak_memory
from ctxext.models.model import LoadedModel
from ctxext.models.prefix_cache import sharing_works
from ctxext.models.token_losses import token_losses
torch.set_num_threads(1)
torch.manual_seed(0)
config = Gemma3TextConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=32768, sliding_window=512,
    layer_types=2 * [*3 * ["sliding_attention"], "full_attention"],
)
model = Gemma3ForCausalLM(config).eval()
loaded = LoadedModel("gemma", model, None, can_share=sharing_works(model))
estimates, peaks = [], []
for length in (8192, 16384):
    ids = torch.randint(3, 1000, (1, length))
    token_losses(loaded, ids[:, :64])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS"))) * 1024
    forget_peak(loaded.device)
    token_losses(loaded, ids)
    peaks.append(peak_memory(loaded.device) - before)
    estimates.append(loaded.estimate_memory(length))
print(json.dumps([estimates, peaks]))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_estimate_is_what_reading_takes():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    estimates, peaks = json.loads(done.stdout.splitlines()[-1])
    ratios = [estimate / peak for estimate, peak in zip(estimates, peaks, strict=True)]
    assert all(0.8 <= ratio <= 1.25 for ratio in ratios), ratios


def test_a_window_takes_no_more_memory_for_longer_prompts():
    """But for one hidden state and one line of the mask of a piece."""
    model = build("mistral").eval()
    loaded = LoadedModel("mistral", model, None, can_share=sharing_works(model))
    per_token = (loaded.estimate_memory(100_000) - loaded.estimate_memory(50_000)) / 50_000
    assert per_token == 4 * (1.25 * 512 + 32)
    whole = LoadedModel("mistral", model, None, can_share=False)
    assert whole.estimate_memory(100_000) == 2 * whole.estimate_memory(50_000)
    assert loaded.estimate_memory(16) == whole.estimate_memory(16)


def test_models_without_windows_have_the_batches_they_had():
    loaded = LoadedModel("llama", tiny_llama(), None, can_share=True)
    assert loaded.estimate_memory(1000) == 1000 * 4 * (2 * 2 * 2 * 8 + 16 * 32 + 3 * 64)
