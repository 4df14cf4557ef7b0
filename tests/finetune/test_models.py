"""The device and the types of a training, on machines that torch is made to describe."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from ctxext.checkpoint import loading
from ctxext.errors import CtxextError
from ctxext.files import processes
from ctxext.finetune import arguments, dry_run, models, step_costs
from ctxext.finetune.models import choose_precision
from ctxext.finetune.stopping import StopAfterStep
from tiny_base import arguments_of

PLACES = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
NATIVE = {"H100": "cuda", "Arc": "xpu"}
KINDS = {**NATIVE, "T4": "cuda", "old Arc": "xpu", "M2": "mps", "NPU": "npu"}
FLAGS = {"Sapphire Rapids": "fpu avx512_bf16 amx_bf16", "Zen 4": "fpu avx512_bf16", "T4": "fpu amx_bf16"}
COMPUTES_BF16 = {*NATIVE, "NPU", "Sapphire Rapids", "Zen 4"}
MACHINES = [*KINDS, "Sapphire Rapids", "Zen 4", "no accelerator"]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Make torch describe a machine with one kind of accelerator, or none."""

    def describe(name):
        kind, is_native = KINDS.get(name, ""), name in NATIVE
        (tmp_path / "cpuinfo").write_text(f"flags : {FLAGS.get(name, 'fpu avx2')}\n")
        monkeypatch.setattr(loading, "_CPU_FLAGS", tmp_path / "cpuinfo")
        for place, module in PLACES.items():
            monkeypatch.setattr(module, "is_available", lambda there=place == kind: there)
        support = lambda including_emulation=True: including_emulation or is_native  # noqa: E731
        for module in (torch.cuda, torch.xpu):
            monkeypatch.setattr(module, "is_bf16_supported", support)
            monkeypatch.setattr(module, "device_count", lambda: 2)
        accelerator = SimpleNamespace(type=kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(kind))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
        if kind == "npu":
            module = SimpleNamespace(device_count=lambda: 1, is_bf16_supported=lambda: True)
            monkeypatch.setattr(torch, "get_device_module", lambda device: module)
            monkeypatch.setattr(torch, "device", lambda *words: SimpleNamespace(type=words[0], index=0))
        return kind

    return describe


def precision_of(device="auto", dtype="auto", full=False, **more):
    return choose_precision(device, dtype, full=full, **more)


@pytest.mark.parametrize("name", MACHINES)
def test_training_uses_the_accelerator_that_torch_reports(machine, monkeypatch, tmp_path, name):
    kind = machine(name)
    monkeypatch.setattr(arguments, "TrainingArguments", dict)
    expected = kind or "cpu"
    assert loading.choose_device("auto").type == expected
    made = arguments_of(tmp_path)
    assert made["use_cpu"] == (not kind)
    assert made["dataloader_pin_memory"] == (expected not in ("cpu", "mps"))
    assert made["bf16"] == (name in COMPUTES_BF16)
    assert not made["fp16"]
    assert arguments_of(tmp_path, device="cpu")["use_cpu"]
    half = arguments_of(tmp_path, dtype="fp16")
    assert (half["bf16"], half["fp16"]) == (False, bool(kind))


@pytest.mark.parametrize("name", MACHINES)
def test_frozen_weights_keep_their_type_if_bf16_is_native(machine, name):
    kind, is_native = machine(name), name in COMPUTES_BF16
    precision = precision_of()
    assert precision.weights == ("auto" if is_native else torch.float32)
    assert precision.dtype == ("bf16" if is_native else "fp32")
    assert precision_of(full=True).weights == torch.float32
    assert precision_of(full=True).dtype == precision.dtype
    assert precision_of(dtype="bf16").weights == torch.bfloat16
    text = f"training on {kind or 'cpu'} in {precision.dtype}"
    emulated = f"; {kind} has no native bf16 here, --dtype fp16 may be faster"
    assert str(precision) == text + ("" if is_native or not kind else emulated)


def test_4_bit_weights_are_multiplied_in_a_type_that_the_device_has(machine):
    for name, dtype in (("T4", torch.float32), ("H100", torch.bfloat16)):
        machine(name)
        pytest.importorskip("transformers")
        models.find_spec, before = (lambda _: True), models.find_spec
        try:
            made = models._make_4bit_config(precision_of(in_4bit=True).weights)
        finally:
            models.find_spec = before
        assert made.bnb_4bit_compute_dtype == dtype


def test_only_devices_of_this_machine_are_accepted(machine):
    machine("Arc")
    assert loading.choose_device("xpu:1") == torch.device("xpu", 1)
    for name in ("cuda", "mps", "xpu:2", "meta"):
        with pytest.raises(CtxextError, match=f'torch finds no device "{name}"') as error:
            loading.choose_device(name)
        assert error.value.hint == "Choose --device auto, xpu or cpu."


def test_memory_and_random_state_are_those_of_the_device(monkeypatch):
    """Not of CUDA, nor of the CPU, where the model is until the Trainer moves it."""
    calls = []
    module = SimpleNamespace(
        max_memory_allocated=lambda device: 7,
        reset_peak_memory_stats=lambda device: calls.append("reset"),
        get_device_properties=lambda device: SimpleNamespace(total_memory=11),
        synchronize=lambda: calls.append("waited"),
        get_rng_state=lambda: torch.tensor([3]),
        set_rng_state=lambda state: calls.append(int(state)),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device("xpu")
    assert processes.forget_peak(device)
    assert (processes.peak_memory(device), processes.total_memory(device)) == (7, 11)
    assert dry_run._available_memory(device) == 11
    assert dry_run._available_memory(torch.device("cpu")) > 11
    arguments, clock = SimpleNamespace(device=device), step_costs._Clock()
    clock.on_step_begin(arguments, None, None)
    clock.on_step_end(arguments, None, None)
    assert clock.peaks == [7]
    stop, state = StopAfterStep(), SimpleNamespace(global_step=3)
    stop.on_step_begin(arguments, state, None)
    stop.received = 2
    stop.on_substep_end(arguments, state, SimpleNamespace())
    assert calls == ["reset", "reset", "waited", 3]


def test_a_plan_names_the_device():
    assert {"device", "dtype"} <= {field.name for field in dataclasses.fields(dry_run.Plan)}
