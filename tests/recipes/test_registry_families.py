"""Every family with every method in the installed transformers: correct, or refused with a reason, never silent.

A tiny random model of each family is converted, and the result is loaded. Without code, it must rotate by the reference
of its method in a forward. With code, it must return the reference's logits, which the conversion checks, also when
decoding from a cache, and must not load without its code. All methods must change logits beyond the original context
length. Within it, relation maps must change none, and two methods must change none at their neutral values. CI runs
every family with a third of the methods, another third for each release of transformers; `make slow` runs all.
The results are stored in data/sweep, from which docs/families.md is created:

    CTXEXT_UPDATE=1 python -m pytest tests/recipes/test_registry_families.py -m slow

`--method NAME` runs one method and adds its results to the others. A method without results has the same
requirements, and families.md reports that it was not run.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import tiny_models
from ctxext.api import METHODS, Recipe, convert
from ctxext.checkpoint.auto_class import MASKED, auto_class
from ctxext.checkpoint.families import family_of, serves_sliding
from ctxext.errors import CtxextError
from ctxext.methods import MsPoE, PositionInterpolation
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from ctxext.verify import isolated_checks, isolated_process
from ctxext.verify.rotation import expected_frequencies

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "portable"))
from measure_rope_types import LENGTH, angles, close
from portable_checkpoints import plain_source

FOUND = Path(__file__).parents[1] / "resources" / "sweep" / "transformers-5.json"
QUICK = ("llama", "gemma3_text", "phi3", "nemotron", "llama4_text", "deepseek_v3", "modernbert")
FAMILIES = [*tiny_models.FAMILIES, *tiny_models.ENCODERS]
NEUTRAL, SHORT = (PositionInterpolation, MsPoE), tiny_models.MAX_POSITIONS // 2
RIGHT, SHIFTED = "right", "silent: logits depend on where a text begins"


def in_process(script, *words):
    """Replace the clean process: run the comparison in this process, which has imported transformers."""
    task = json.loads(Path(words[0]).read_text())
    try:
        comparison = isolated_process.compare(task)
    except Exception as error:
        return subprocess.CompletedProcess(script, 1, "", " ".join(f"{type(error).__name__}: {error}".split()))
    return subprocess.CompletedProcess(script, 0, json.dumps(comparison), "")


def load(folder, *, trust=False):
    auto = getattr(transformers, auto_class(json.loads((Path(folder) / "config.json").read_text())))
    return auto.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trust).eval()


@torch.no_grad()
def logits_of(model, shift=0, length=LENGTH):
    ids = torch.arange(length)[None] % 90 + 5
    cached = {} if auto_class(model.config.to_dict()) == MASKED else {"use_cache": False}
    return model(input_ids=ids, position_ids=torch.arange(length)[None] + shift, **cached).logits


def depends(model, logits):
    """Return whether logits depend on the position of the first token, so that keys and queries rotate differently.

    They do in some stock models, which scale by the position or normalize after the rotation.
    """
    return (logits_of(model, 3) - logits).abs().max() > 1e-2 * logits.abs().max()


def outcome(source, out, step, stock, before):
    """Return the result of a method for a checkpoint: RIGHT, the reason of a refusal, or "silent: " and the error."""
    try:
        convert(str(source), out, Recipe([step]))
    except CtxextError as error:
        return error.message
    config = json.loads((out / "config.json").read_text())
    model = load(out, trust=step.needs_code())
    for name, weight in model.named_parameters():
        if step.needs_code() and name.endswith(step.learned_tensors):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))  # As after training.
    after = logits_of(model)
    if not after.isfinite().all():
        return "silent: logits that are no numbers"
    if torch.equal(after, before):
        return "silent: nothing changes"
    if isinstance(step, Relation) and not torch.equal(*(logits_of(one, length=SHORT) for one in (model, stock))):
        return "silent: short inputs change"
    if not step.needs_code():
        return wrong_angles(model, json.loads((source / "config.json").read_text()), config, step) or RIGHT
    try:
        load(out)
    except Exception:  # After any exception, it is not loaded as a stock model.
        return RIGHT if step.kind != "heads" or depends(stock, before) or not depends(model, after) else SHIFTED
    return "silent: it loads without its code"


def wrong_angles(model, source, config, step):
    """Compare the rotation of a loaded model in a forward with the reference; empty if they agree."""
    family, plain = family_of(source), model_config(source).rotary
    wanted, scaling = expected_frequencies([step.adapt(model_config(source)).resolve(plain)], plain, LENGTH)
    wanted = torch.tensor([*wanted, *([0.0] if plain.span > plain.dim else [])], dtype=torch.float64)
    all_seen = angles(model)
    local = [name for name in all_seen if serves_sliding(source, family, name)]
    local += [name for name in all_seen if "embs." in name and family.layer_theta_key]
    seen = {name: one for name, one in all_seen.items() if name not in local}
    if not seen and not family.layer_theta_key:
        return "silent: nothing was seen to rotate"
    off = [
        name
        for name, (angle, factor) in seen.items()
        if not close(angle, wanted.unique()) or abs(factor / scaling - 1) > 2e-5
    ]
    return f"silent: {off[0]} rotates by other angles" if off else ""


ROTARY = [method for method in METHODS if method.encoding == "rotary"]


def swept(model_type, place, methods=ROTARY):
    """Run methods on one family."""
    source, _ = plain_source(model_type, place / "source")
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    if family.reason:
        with pytest.raises(CtxextError):
            _ = model_config(config).rotary
        return {method.name: family.reason for method in methods}
    outcomes, stock, model = {}, load(source), model_config(config)
    before = logits_of(stock)
    for method in methods:
        out = place / f"{model_type}-{method.name}"
        outcomes[method.name] = outcome(source, out, method.example_step(model.rotary), stock, before)
        shutil.rmtree(out, ignore_errors=True)
        if method in NEUTRAL and outcomes[method.name] == RIGHT:
            neutral = place / f"{model_type}-{method.name}-neutral"
            convert(str(source), neutral, Recipe([method.neutral_step(model.rotary)]))
            if not torch.equal(logits_of(load(neutral, trust=method.needs_code())), before):
                outcomes[method.name] = "silent: neutral numbers change logits"
            shutil.rmtree(neutral)
    return outcomes


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(isolated_checks, "run_isolated", in_process)
    monkeypatch.setattr(isolated_checks, "_NUM_TOKENS", 16)


def which(row, known):
    """Return the supported known methods; reasons of the others may be reworded."""
    return {method for method, words in row.items() if words == RIGHT and method in known}


def kept():
    return json.loads(FOUND.read_text())["families"] if FOUND.exists() else {}


def kept_here():
    """Return the recorded families in the installed version; older versions have fewer."""
    return {name for name in kept() if name in CONFIG_MAPPING_NAMES}


def check(outcomes, known):
    """Nothing is silently wrong, and supported methods are those of the record."""
    silent = [f"{method}: {words}" for method, words in outcomes.items() if words.startswith("silent")]
    assert silent == []
    assert which(outcomes, known) == which(known, outcomes)


def joined(kept, swept_now):
    """Return the record with the results of this run; other methods are unchanged."""
    return {name: {**kept.get(name, {}), **row} for name, row in swept_now.items()}


@pytest.mark.parametrize("model_type", [name for name in QUICK if name in FAMILIES])
@pytest.mark.thorough
def test_family(model_type, tmp_path):
    check(swept(model_type, tmp_path), kept().get(model_type, {}))


def third_of(methods, model_type):
    """Return a third of the methods, another one for the next family and the next release of transformers."""
    first = list(FAMILIES).index(model_type) + int(transformers.__version__.split(".")[1])
    return [method for at, method in enumerate(methods) if (at + first) % 3 == 0]


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_third_of_the_methods(model_type, tmp_path):
    methods = third_of(ROTARY, model_type)
    names, known = {method.name for method in methods}, kept().get(model_type, {})
    check(swept(model_type, tmp_path, methods), {name: words for name, words in known.items() if name in names})


def test_every_method_is_in_the_third_of_some_families():
    """Three consecutive families have different thirds."""
    names = list(FAMILIES)
    for start in range(0, len(names) - 2):
        thirds = [third_of(ROTARY, name) for name in names[start : start + 3]]
        assert sorted(method.name for third in thirds for method in third) == sorted(m.name for m in ROTARY)


@pytest.mark.thorough
def test_every_family_was_swept():
    assert kept_here() == set(FAMILIES)


@pytest.mark.slow
def test_all_families(tmp_path, request):
    outcomes, name = {}, request.config.getoption("--method")
    methods = [method_named(name)] if name else ROTARY
    for model_type in FAMILIES:
        outcomes[model_type] = swept(model_type, tmp_path / model_type, methods)
        shutil.rmtree(tmp_path / model_type)
    cells = [words for row in outcomes.values() for words in row.values()]
    silent = [
        f"{name}: {method}: {words}"
        for name, row in outcomes.items()
        for method, words in row.items()
        if words.startswith("silent")
    ]
    right = cells.count(RIGHT)
    print(f"{len(outcomes)} families, {right} right, {len(cells) - right - len(silent)} refused, {len(silent)} silent")  # noqa: T201
    print(*silent, sep="\n")  # noqa: T201
    if os.environ.get("CTXEXT_UPDATE"):
        FOUND.parent.mkdir(exist_ok=True)
        content = {"version": transformers.__version__, "families": joined(kept() if name else {}, outcomes)}
        FOUND.write_text(json.dumps(content, indent=1) + "\n")
    assert silent == []
    assert outcomes.keys() == kept_here()
    for model_type, row in outcomes.items():
        check(row, kept()[model_type])


def test_a_sweep_of_one_method_keeps_the_others():
    kept = {"llama": {"pi": RIGHT, "yarn": "why not"}, "gone": {"pi": RIGHT}}
    outcomes = {"llama": {"yarn": RIGHT}, "new": {"yarn": "why not"}}
    assert joined(kept, outcomes) == {"llama": {"pi": RIGHT, "yarn": RIGHT}, "new": {"yarn": "why not"}}
