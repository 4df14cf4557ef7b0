"""The check after converting on long windows: it lets nothing right be refused, and sees one position that is wrong."""

import copy
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny_models
from ctxext.api import Recipe, convert
from ctxext.errors import CtxextError
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.registry import METHODS, method_named
from ctxext.verify import isolated_checks, isolated_process
from small_llama import make_llama

LENGTHS = (8192, 131072, 1048576)
MAPS = ("self-extend", "bifocal", "dca", "rerope", "sinks", "window")
RELATIONS = [method.name for method in METHODS if issubclass(method, Relation)]
# Added to `relation_maps.py` of a converted checkpoint: what the map says of rows and keys, changed.
FAULT = """
_rows, _keys = Map.rows, Map.keys

def wrong_rows(self, m, rotated):
    rows = _rows(self, m, rotated)
    return {rows}

def wrong_keys(self, n, rotated, level):
    return {keys}

Map.rows, Map.keys = wrong_rows, wrong_keys
"""
KEYS = "_keys(self, n, rotated, level)"
FAULTS = {
    "the border is one lower": ("rows._replace(**{x: getattr(rows, x) - 1 for x in ('far', 'middle', 'near')})", KEYS),
    "the border is one higher": ("rows._replace(**{x: getattr(rows, x) + 1 for x in ('far', 'middle', 'near')})", KEYS),
    "far keys are near": ("rows._replace(far=rows.far * 0, middle=rows.middle * 0, near=rows.near * 0)", KEYS),
    "no turn of the query": ("rows._replace(at_far=rotated)", KEYS),
    "no turn of keys": ("rows", "rotated"),
    "the keys of the next group": ("rows", "_keys(self, n, rotated, level + 1)"),
}
# Keys do not turn in some maps, and groups are a matter of two; at the border of rerope both distances are the same.
SAME = {
    "no turn of keys": ("sinks", "window"),
    "the keys of the next group": ("dca", "rerope", "sinks", "window"),
    "the border is one lower": ("rerope",),
    "no turn of the query": ("window",),
}
# One number of the step in config.json, one too many; for maps without a line here the original length alone.
SETTINGS = {
    "self-extend": ("window", "original_length"),
    "bifocal": ("window", "original_length"),
    "dca": ("chunk_size", "local"),
    "rerope": ("window", "original_length"),
    "sinks": ("window", "sinks"),
    "window": ("window",),
    "adaptive": ("original_length",),
}


@pytest.fixture
def check(monkeypatch):
    """What the check finds, in this process. Its verdict is left to the test."""
    tasks = []

    def run(script, written):
        tasks.append(json.loads(Path(written).read_text()))
        return subprocess.CompletedProcess(script, 0, json.dumps(compare(tasks[-1])), "")

    monkeypatch.setattr(isolated_checks, "run_isolated", run)
    # `test_forms_process_faults.py` tests these.
    monkeypatch.setattr(isolated_process, "check_forms", lambda *_: ({}, []))
    for name in ("compare_decoding", "run_forms"):
        monkeypatch.setattr(isolated_process, name, lambda *_: {})
    return tasks


@pytest.fixture(autouse=True)
def pairs_once(monkeypatch):
    """The pairs that a reference gives are the same for every fault of one checkpoint."""
    kept, pairs = {}, isolated_process.Expected.pairs

    def once(self, settings, reference, frequencies):
        key = json.dumps(settings), self.layer, frequencies, tuple(self.positions)
        if key not in kept:
            kept[key] = pairs(self, settings, reference, frequencies)
        return kept[key]

    monkeypatch.setattr(isolated_process.Expected, "pairs", once)


def compare(task):
    """Compare without decoding: a spoiled map may end the process for a text as short as that check's."""
    return isolated_process.compare(copy.deepcopy(task))


def source_of(folder, length):
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.02}
    return make_llama(folder, max_position_embeddings=length, rope_theta=5e5, num_hidden_layers=1, **sizes)


def step_for(name):
    return method_named(name)(**method_named(name).example)


def spoiled(out, changed, rows_and_keys=None, setting=None):
    """A copy of a checkpoint with a fault."""
    shutil.copytree(out, changed)
    if setting:
        config = json.loads((changed / "config.json").read_text())
        config["ctxext_code"]["steps"][0][setting] += 1
        (changed / "config.json").write_text(json.dumps(config))
    else:
        with (changed / "relation_maps.py").open("a") as file:
            file.write(FAULT.format(rows=rows_and_keys[0], keys=rows_and_keys[1]))
    return changed


@pytest.mark.parametrize("length", [LENGTHS[0], pytest.param(LENGTHS[1], marks=pytest.mark.slow), LENGTHS[2]])
@pytest.mark.parametrize("name", RELATIONS)
def test_one_position_that_is_wrong_is_seen_and_nothing_right_refused(name, length, check, tmp_path):
    out = tmp_path / f"{name}-{length}"
    result = convert(str(source_of(tmp_path / "source", length)), out, Recipe([step_for(name)]))
    assert result.verification.difference < 1e-5
    faults = [fault for fault in FAULTS if name in MAPS and name not in SAME.get(fault, ())]
    signals = {}
    for number, fault in enumerate([*faults, *SETTINGS.get(name, ("original_length",))]):
        changed = tmp_path / f"{name}-{length}-{number}"
        kind = {"rows_and_keys": FAULTS[fault]} if fault in FAULTS else {"setting": fault}
        comparison = compare({**check[0], "folder": str(spoiled(out, changed, **kind))})
        signals[fault] = comparison["attention"]
    assert min(signals.values()) > 10 * isolated_checks.TOLERANCE, signals


@pytest.mark.parametrize("setting", ["window", "group"])
@pytest.mark.thorough
def test_a_fixed_group_and_border(setting, check, tmp_path):
    step = method_named("self-extend")(factor=4.0, group=5, window=1024)
    out = tmp_path / f"fixed-{setting}"
    convert(str(source_of(tmp_path / "source", 8192)), out, Recipe([step]))
    changed = spoiled(out, tmp_path / f"changed-{setting}", setting=setting)
    assert compare({**check[0], "folder": str(changed)})["attention"] > 10 * isolated_checks.TOLERANCE


@pytest.mark.parametrize("name", RELATIONS)
def test_tokens_are_at_the_borders_of_rules(name, check, tmp_path):
    length = 8192
    convert(str(source_of(tmp_path / "source", length)), tmp_path / f"where-{name}", Recipe([step_for(name)]))
    positions, settings = set(check[0]["positions"]), check[0]["steps"][0]
    reach = round(method_named(name).example["factor"] * length)
    assert len(positions) <= 68
    assert {0, 1, reach - 2, reach - 1} <= positions
    assert name in ("sinks", "window") or {length - 1, length, length + 1} <= positions
    if name in ("dca", "adaptive"):
        assert name == "dca" or {2 * length - 1, 2 * length} <= positions
    elif name in SETTINGS:
        border = reach - 1 - settings["window"]
        assert {border - 1, border, border + 1} <= positions


def test_norms_with_weights_after_the_rotation_are_refused(check, tmp_path):
    """Fresh weights of ones would hide that HunYuan multiplies what is rotated, dimension by dimension."""
    source = tiny_models.save("hunyuan_v1_dense", tmp_path / "source")
    with pytest.raises(CtxextError, match='"hunyuan_v1_dense" does not support rerope: it changes queries and keys'):
        convert(str(source), tmp_path / "hunyuan", Recipe([method_named("rerope")(factor=4.0)]))


@pytest.mark.skipif("nanochat" not in tiny_models.FAMILIES, reason="this transformers has no nanochat")
@pytest.mark.thorough
def test_norms_without_weights_after_the_rotation_are_part_of_the_reference(check, tmp_path):
    source = tiny_models.save("nanochat", tmp_path / "source")
    for name in ("self-extend", "dca", "sinks"):
        result = convert(str(source), tmp_path / f"nanochat-{name}", Recipe([step_for(name)]))
        assert result.verification.difference < 1e-5


LLAMA = {"rope_theta": 5e5, "intermediate_size": 14336}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHAPES = {
    "Llama-3.1-8B-8k": ("llama", 8192, LLAMA),
    "Mistral-7B-32k": ("mistral", 32768, {"rope_theta": 1e6, "intermediate_size": 14336, "sliding_window": None}),
    "Llama-3.1-8B-128k": (
        "llama",
        131072,
        {**LLAMA, "rope_scaling": {**SCALED, "original_max_position_embeddings": 8192}},
    ),
    "Qwen3-8B-256k": ("qwen3", 262144, {"rope_theta": 1e6, "intermediate_size": 12288}),
}


@pytest.mark.parametrize(
    "which", [pytest.param(0, marks=pytest.mark.thorough), pytest.param(1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_real_widths_by_default_options(shape, which, run, tmp_path):
    """Two layers of published models, with random weights and few words, by the command itself: two methods each.

    CI tries one of the two.
    """
    family, length, numbers = SHAPES[shape]
    widths = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": length, **widths, **numbers}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    names = (*MAPS, "adaptive")
    name = names[(list(SHAPES).index(shape) + which * len(SHAPES)) % len(names)]
    result = run("convert", tmp_path / "source", tmp_path / "out", "--method", name, "--factor", "4")
    assert result.exit_code == 0, f"{name}: {result.output} {result.exception}"
