"""Each value of config.json, changed alone with all digests written anew, is named by `ctxext verify`."""

import copy
import json

import pytest

import multimodal_models
import tiny_encodings
import tiny_models
from ctxext.api import Recipe, convert
from ctxext.errors import CtxextError
from ctxext.files.content import sha256_of
from ctxext.methods import MsPoE, Ntk, Yarn
from ctxext.recipes.registry import method_named
from ctxext.verify.run import failures, verify
from small_llama import read_json


def step(name, **numbers):
    method = method_named(name)
    return method(**{**method.example, **numbers})


FIXED = {"first_layer": 0, "head_order": "fixed"}
CELLS = {
    "llama": (tiny_models.save, step("self-extend")),
    "gemma3": (tiny_models.save, step("sinks")),
    "gemma3_text": (tiny_models.save, MsPoE(**FIXED)),
    "qwen3": (tiny_models.save, step("dca")),
    "phi3": (tiny_models.save, step("ntk")),
    "gpt_neox": (tiny_models.save, MsPoE(**FIXED)),
    "mixtral": (tiny_models.save, step("pi")),
    "qwen3_moe": (tiny_models.save, step("window")),
    "deepseek_v3": (tiny_models.save, Yarn(factor=4)),
    "bloom": (tiny_encodings.save, step("ntk-alibi")),
    "bert": (tiny_encodings.save, step("table")),
    "xglm": (tiny_encodings.save, step("range")),
    "modernbert": (tiny_models.save, Ntk(factor=4)),
    "t5": (tiny_encodings.save, step("buckets")),
    "granite_swa": (tiny_models.save, Yarn(factor=4)),
    "cohere2": (tiny_models.save, step("declare")),
    "qwen3_5": (multimodal_models.save, Yarn(factor=4)),
}
QUICK = ("llama", "gemma3")
HEADS = [f"auto_map.AutoModelFor{head}" for head in ("SequenceClassification", "TokenClassification")]
HEADS += ["auto_map.AutoModelForQuestionAnswering"]  # Not every version of transformers has the same.


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """A source and its conversion by name."""
    place = tmp_path_factory.mktemp("values")

    def make(name):
        source, out = place / name, place / f"{name}-out"
        if not out.exists():
            save, applied = CELLS[name]
            save(name, source)
            convert(str(source), out, Recipe([applied]), check=False)
        return source, out

    return make


def leaves(node, *path):
    """The places of all values of a configuration that are no objects."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, *path, key)
        else:
            yield (*path, key)


def another(value):
    """A value of the same type, if there is one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, value[-1]] if value else [1]
    return f"{value}x" if isinstance(value, str) else {"x": 1} if isinstance(value, dict) else 1


def changes(config, places):
    """Each change alone, with the place: another value, and no value."""
    for *path, key in places:
        for remove in (False, True):
            changed = copy.deepcopy(config)
            inside = changed
            for part in path:
                inside = inside[part]
            if remove:
                del inside[key]
            else:
                inside[key] = another(inside[key])
            yield ".".join([*path, key]), changed


def write(out, config, record):
    """Write a configuration, and a record with its digest."""
    (out / "config.json").write_text(json.dumps(config, indent=2))
    files = {**record["files"], "config.json": sha256_of(out / "config.json")}
    (out / "ctxext.json").write_text(json.dumps({**record, "files": files}))


def problems(out, **options):
    """What `verify` prints for checks that failed; an error is raised for values that cannot be read."""
    return " ".join(finding.detail for finding in failures(verify(out, load=False, **options)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.thorough) for n in CELLS])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "against"])
def test_no_value_changes_unseen(cells, name, recorded):
    """By the record, and for a record of ctxext 0.3.0 by the source."""
    source, out = cells(name)
    config, record = read_json(out / "config.json"), read_json(out / "ctxext.json")
    options = {} if recorded else {"against": source}
    noted = record if recorded else {key: value for key, value in record.items() if key != "config"}
    places = [place for place in leaves(config) if recorded or place[0] != "ctxext"]
    assert len(places) > 15
    write(out, config, noted)
    assert not problems(out, **options)
    unseen = []
    for place, changed in changes(config, places):
        write(out, changed, noted)
        try:
            told = problems(out, **options)
        except CtxextError:
            continue
        head = place in HEADS and place.rsplit(".", 1)[-1] not in changed["auto_map"]
        if (f'"{place}" is ' not in told) if recorded else not (told or head):
            unseen.append(place)
    write(out, {**config, "added": 1}, noted)
    assert '"added" is 1, not missing' in problems(out, **options)
    write(out, config, record)
    assert not unseen, unseen


def test_a_record_of_0_3_0_has_no_values_but_the_base(cells):
    """Without SOURCE, values outside the recipe are named as not compared; config.json itself records the base."""
    _, out = cells("llama")
    config, record = read_json(out / "config.json"), read_json(out / "ctxext.json")
    noted = {key: value for key, value in record.items() if key != "config"}
    write(out, {**config, "rms_norm_eps": 0.5}, noted)
    by_check = {finding.check: finding for finding in verify(out, load=False)}
    assert not failures(list(by_check.values()))
    assert "values outside the recipe are not compared" in by_check["configuration"].detail
    rope = {**config["rope_parameters"], "rope_theta": 10001.0}
    write(out, {**config, "rope_theta": 10001.0, "rope_parameters": rope, "rope_scaling": rope}, noted)
    assert '"rope_theta" is 10001.0, not 10000.0' in problems(out)
    write(out, config, record)
