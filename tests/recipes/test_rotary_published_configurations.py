"""Published configurations by six schedules at ×1 and ×4: the rotation of the stock class against formulas by hand.

Each line of tests/resources/published.jsonl has a model's config.json without what no schedule reads, `source` (where
it was
read), and what is known of it: `original` and `reads` (tokens), `declares` where config.json claims another length,
`rotates` (dimensions of a head), `theta`, and `span` where the exponents run over more than that; or `refused`. The
files of tests/resources/configs say the same of further models. A plan is made for the configuration as it is; what it
writes is loaded with few layers and experts.
"""

import copy
import json
from functools import lru_cache
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from by_hand import by_hand
from ctxext.api import Recipe
from ctxext.checkpoint.families import family_of, text_config
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.dialects import unsupported_reason
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from ctxext.verify.rotation import rotations
from published_models import NAMES, published, write_config

FILE = Path(__file__).parents[1] / "resources" / "published.jsonl"
ROWS = {row["model"]: row for row in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())}
ROWS |= {published(name)["model"]: published(name) for name in NAMES if "original" in published(name)}
READ = [name for name, row in ROWS.items() if "refused" not in row]
REFUSED = [name for name, row in ROWS.items() if "refused" in row]
METHODS = ("pi", "ntk", "yarn", "ntk-by-parts", "llama3", "dynamic")
QUICK = (
    "codellama/CodeLlama-13b-hf",
    "meta-llama/Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1",
    "openai/gpt-oss-20b",
    "tencent/Hy-MT2-7B",
    "lmsys/vicuna-7b-v1.5-16k",
    "EleutherAI/pythia-14m",
    "google/gemma-3-4b-it",
)
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def schedule_of(row):
    """The published schedule of the full-attention layers."""
    text = row["config"].get("text_config", row["config"])
    whole = text.get("rope_scaling") or text.get("rope_parameters") or {}
    numbers = whole.get("full_attention", whole)
    return {**numbers, "rope_type": numbers.get("rope_type") or numbers.get("type") or "default"}


def expected(row, method, factor, numbers, at):
    """What a method makes of a published model: the numbers are those of its schedule that the method keeps."""
    facts = {"base": row["theta"], "size": row["rotates"], "length": row["original"], "span": row.get("span")}
    kept = {key: value for key, value in numbers.items() if key not in ("factor", "attention_factor")}
    return by_hand(method, factor, at=at, **facts, **kept)


def small(config):
    """A configuration with few layers, of each type at least one, and few experts."""
    config = copy.deepcopy(config)
    config.pop("auto_map", None)
    family = family_of(config)
    text = text_config(config, family)
    types = text.get("layer_types")
    count = max(types.index(kind) for kind in set(types)) + 1 if types else 6 if family.layers else 2
    text[family.aliases.get("num_hidden_layers", "num_hidden_layers")] = count
    text |= {"layer_types": types[:count]} if types else {}
    text |= {key: 8 for key in EXPERTS if text.get(key)}
    return config


def converted(row, source, name, factor):
    """The plan of one method, by which the model reads `factor` times as much as before; None where it is refused."""
    kind, is_scaled = method_named(name), row["reads"] != row["original"]
    step = kind(target_length=factor * row["reads"]) if is_scaled else kind(factor=float(factor))
    # Factor 1 is written as no schedule, save for `dynamic`, which goes on stretching beyond the original length.
    is_plain = factor == 1 and not is_scaled and name != "dynamic"
    # As checkpoint/test_families.py measures.
    if unsupported_reason(family_of(row["config"]), kind.rope_type) and not is_plain:
        with pytest.raises(CtxextError, match="does not support the rope type"):
            make_plan(source, Recipe([step]), replace_scaling=is_scaled)
        return None
    return make_plan(source, Recipe([step]), replace_scaling=is_scaled, allow_shorter="declares" in row)


@lru_cache(maxsize=16)
def rotating(config, lengths):
    """What the stock class of a configuration, written as JSON, rotates by at some lengths."""
    return rotations(json.loads(config), lengths)


def loaded(config, lengths):
    """The same of a configuration made small; factor 1 gives one for all methods."""
    plain = {key: value for key, value in small(config).items() if key != "ctxext"}
    return rotating(json.dumps(plain, sort_keys=True), lengths)


def check_loaded(row, config, name, factor):
    """The loaded result against the formula, layer type by layer type, at half and at all of its length."""
    family, published_schedule = family_of(row["config"]), schedule_of(row)
    total = factor * row["reads"] / row["original"]
    lengths = (row["original"] // 2, round(total * row["original"]))
    is_same_type = method_named(name).rope_type == published_schedule["rope_type"]
    is_same = total == 1 or (name == published_schedule["rope_type"] and total == published_schedule["factor"])
    before, after = loaded(row["config"], lengths), loaded(config, lengths)
    for length in lengths:
        checked = 0
        for was, entry in zip(before[length], after[length], strict=True):
            if any(word in f"{entry.module}.{entry.layer_type}" for word in ("local", *family.sliding_types)):
                assert entry == was, "a sliding layer changed"
                continue
            checked += 1
            wanted, scaling = expected(row, name, total, published_schedule if is_same_type else {}, length)
            if name == "yarn" and family.scales_scores and not is_same_type:  # The whole score is scaled instead.
                scaling = 1.0
            found = [frequency for frequency in entry.frequencies if frequency > 0]
            assert found == pytest.approx(sorted(set(wanted)), rel=2e-5), length
            assert entry.scaling == pytest.approx(scaling, rel=2e-5)
            if is_same:
                assert entry == was, "not bit-equal to the source"
        assert checked


def sweep(model, tmp_path):
    """All methods on one model.

    Returns:
        How many conversions were loaded and right, refused with a true reason, and not for this transformers.
    """
    row = ROWS[model]
    source = open_checkpoint(str(write_config(row["config"], tmp_path / "source")))
    is_known = row["config"]["model_type"] in CONFIG_MAPPING_NAMES
    counts = [0, 0, 0]
    for factor in (1, 4):
        for name in METHODS:
            plan = converted(row, source, name, factor)
            if plan is None:
                counts[1] += 1
                continue
            config = plan.model.config
            if not is_known:
                counts[2] += 1
                continue
            check_loaded(row, config, name, factor)
            counts[0] += 1
    return counts


def test_there_are_a_hundred_that_are_read():
    assert len(READ) >= 130
    assert all(len(row["source"]) > 20 for row in ROWS.values())


def test_lengths_and_bases_are_those_that_were_published():
    for name in READ:
        row, rotary = ROWS[name], model_config(ROWS[name]["config"]).rotary
        reads = rotary.usable_length if rotary.is_scaled else rotary.context_length
        assert (rotary.trained_length, reads) == (row["original"], row["reads"]), name
        assert (rotary.dim, rotary.theta, rotary.span) == (row["rotates"], row["theta"], row.get("span", rotary.dim))
        assert rotary.declared_length == row.get("declares"), name


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name):
    with pytest.raises(CtxextError, match=ROWS[name]["refused"]):
        _ = model_config(ROWS[name]["config"]).rotary


@pytest.mark.parametrize("name", QUICK)
def test_a_few(name, tmp_path):
    assert sweep(name, tmp_path)[0]


@pytest.mark.thorough
def test_all_of_them(tmp_path):
    counts = [sweep(name, tmp_path / str(number)) for number, name in enumerate(READ)]
    right, refused, elsewhere = (sum(column) for column in zip(*counts, strict=True))
    print(f"{len(READ)} models: {right} right, {refused} refused, {elsewhere} not for this transformers")  # noqa: T201
    assert right + refused + elsewhere == len(READ) * len(METHODS) * 2
