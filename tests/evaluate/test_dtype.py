"""What "auto" computes in: as saved, and on a CPU what it is fast in, without rounding a weight."""

import pytest
import torch

from ctxext.system import loading
from hand_made import tiny_llama

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("saved", "flags", "computed"),
    [
        ("bfloat16", "fpu avx512_bf16 sse", "bfloat16"),
        ("bfloat16", "fpu amx_bf16", "bfloat16"),
        ("bfloat16", "fpu avx2", "float32"),
        ("float16", "fpu amx_bf16", "float32"),
        ("float32", "fpu amx_bf16", "float32"),
    ],
)
def test_auto_on_a_cpu(monkeypatch, tmp_path, saved, flags, computed):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(loading, "_CPU_FLAGS", tmp_path / "cpuinfo")
    model = tiny_llama().to(getattr(torch, saved))
    assert loading.settle_dtype(model, "auto", CPU).dtype == getattr(torch, computed)
    model = tiny_llama().to(getattr(torch, saved))
    assert loading.settle_dtype(model, "fp16", CPU).dtype == getattr(torch, saved), "what was asked for stays"


def test_a_system_that_does_not_say(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "_CPU_FLAGS", tmp_path / "nothing")
    assert loading.fast_cpu_dtype() == torch.float32
