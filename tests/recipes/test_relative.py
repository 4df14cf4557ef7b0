"""DeBERTa's distances and XLNet's memory: loaded models against computations in float64 over every pair of tokens."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.errors import CtxextError
from ctxext.methods import LongerMemory, Table, WiderBuckets
from ctxext.recipes.methods.fills import DISTANCE_FILLS
from ctxext.verify.conversion import Conversion
from ctxext.verify.references.encodings import deberta_bucket
from ctxext.verify.references.relative import deberta_states, xlnet_states
from ctxext.verify.rotation import reference_of
from ctxext.verify.run import check_buckets, check_memory, check_tables
from tiny_encodings import LENGTH, VOCABULARY, load, save

FACTORS = (1.5, 2, 4, 8)
TOLERANCE = 1e-5
"""Largest difference of float32 from float64, over the scale of the result."""
METHODS = {
    "deberta": [Table(factor=1, fill="tile"), Table(factor=1, fill="linear")],
    "deberta-v2": [Table(factor=1, fill="tile"), Table(factor=1, fill="linear")],
    "deberta-v3": [WiderBuckets(factor=1)],
}
CASES = [
    pytest.param(name, index, factor, marks=() if (name, factor) in {("deberta", 4), ("deberta-v3", 1.5)} else extra)
    for extra in [pytest.mark.thorough]
    for name, methods in METHODS.items()
    for index in range(len(methods))
    for factor in FACTORS
]


def step_of(name, index, factor):
    return type(METHODS[name][index])(**{**vars(METHODS[name][index]), "factor": factor})


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("relative")
    return {name: save(name, place / name) for name in (*METHODS, "xlnet")}


def copy_changed(source, folder, **changes):
    """Copy a checkpoint with other values in config.json."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def batch(length):
    """A text, and a shorter one that is padded."""
    ids = torch.randint(4, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1, length - length // 3 :] = 0
    return ids, mask


def states(folder, ids, mask):
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state


def row_of(config, source, step):
    """The row of each distance, from the source's configuration and the factor alone."""
    distance = source.get("max_relative_positions", -1)
    distance = distance if distance > 0 else source["max_position_embeddings"]
    if isinstance(step, WiderBuckets):
        numbers = {"distance": distance, "num_buckets": 2 * source["position_buckets"]}
        return lambda d: int(deberta_bucket({"factor": step.factor}, numbers, -d) + 1e-9)
    span = round(distance * step.factor)
    return lambda d: min(max(d + span, 0), 2 * span - 1)


@pytest.mark.parametrize(("name", "index", "factor"), CASES)
def test_deberta_reads_as_the_reference(name, index, factor, sources, tmp_path):
    source, step = json.loads((sources[name] / "config.json").read_text()), step_of(name, index, factor)
    convert(str(sources[name]), tmp_path / "out", Recipe([step]))
    before = transformers.AutoModel.from_pretrained(sources[name])
    for length in (LENGTH // 2, LENGTH, round(factor * LENGTH), round(factor * LENGTH) + 7):
        ids, mask = batch(length)
        loaded = states(tmp_path / "out", ids, mask)
        weights = {key: weight.detach().double() for key, weight in before.named_parameters()}
        if isinstance(step, Table):
            old = weights["encoder.rel_embeddings.weight"]
            numbers = {"fill": step.fill, "distances": True}
            count = 2 * round(len(old) // 2 * factor)
            weights["encoder.rel_embeddings.weight"] = reference_of(Table).rows(numbers, old, count)
        config = {**before.config.to_dict(), "model_type": source["model_type"]}
        expected = deberta_states(weights, config, ids, mask, row_of(config, source, step))
        read = mask.bool()
        difference, scale = (loaded.double() - expected)[read].abs().max(), expected[read].abs().max()
        assert difference <= TOLERANCE * scale, (length, difference / scale)


@pytest.mark.parametrize("name", METHODS)
def test_a_factor_of_one_is_bit_identical(name, sources, tmp_path):
    for index, step in enumerate(METHODS[name]):
        convert(str(sources[name]), tmp_path / f"{index}", Recipe([step]))
        for length in (LENGTH, 3 * LENGTH):
            ids, mask = batch(length)
            assert torch.equal(states(sources[name], ids, mask), states(tmp_path / f"{index}", ids, mask))


def test_a_factor_of_one_leaves_the_memory_bit_identical(sources, tmp_path):
    convert(str(sources["xlnet"]), tmp_path / "out", Recipe([LongerMemory(factor=1)]))
    assert all(map(torch.equal, read_segments(sources["xlnet"])[1], read_segments(tmp_path / "out")[1]))


@pytest.mark.parametrize("name", ["deberta", "deberta-v2"])
def test_tile_leaves_near_distances_bit_identical(name, sources, tmp_path):
    convert(str(sources[name]), tmp_path / "out", Recipe([Table(factor=4)]))
    old = load(sources[name]).get_parameter("deberta.encoder.rel_embeddings.weight")
    new = load(tmp_path / "out").get_parameter("deberta.encoder.rel_embeddings.weight")
    first = (len(new) - len(old)) // 2
    assert torch.equal(new[first : first + len(old)], old)
    # Distances inside the table: the last one is only at its end in both.
    ids, mask = batch(len(old) // 2)
    assert torch.equal(states(sources[name], ids, mask), states(tmp_path / "out", ids, mask))
    ids, mask = batch(3 * LENGTH)
    assert not torch.allclose(states(sources[name], ids, mask), states(tmp_path / "out", ids, mask), atol=1e-2)


@pytest.mark.parametrize("fill", DISTANCE_FILLS)
def test_a_fill_is_mirrored_around_distance_0(fill):
    """Rows of distances as multiples of a vector: linear divides the distance, and tile repeats each side."""
    import numpy as np

    old, new = 6, 12
    which, weights = DISTANCE_FILLS[fill](np.arange(new), old, new)
    rows = np.arange(-3, 3).astype(float)
    filled = (weights * rows[np.minimum(which, old - 1)]).sum(axis=1)
    expected = {
        "tile": [-3, -2, -1, -3, -2, -1, 0, 1, 2, 0, 1, 2],
        "linear": [-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 2],
    }
    assert filled.tolist() == expected[fill]


def read_segments(folder, sizes=(9, 30, 70, 8), padding=0):
    """Return segments and their states; the last one is read with padding after it, which other tokens ignore."""
    model, mems, results = transformers.AutoModel.from_pretrained(folder).eval(), None, []
    segments = [torch.randint(4, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(n)) for n in sizes]
    with torch.no_grad():
        for segment in segments:
            width = padding if segment is segments[-1] else 0
            ids, mask = (torch.nn.functional.pad(each, (0, width)) for each in (segment, torch.ones_like(segment)))
            output = model(input_ids=ids, attention_mask=mask, mems=mems)
            mems = output.mems
            results.append(output.last_hidden_state[:, : segment.shape[1]])
    return segments, results


@pytest.mark.parametrize("factor", FACTORS)
def test_xlnet_reads_segments_as_the_reference(factor, sources, tmp_path):
    convert(str(sources["xlnet"]), tmp_path / "out", Recipe([LongerMemory(factor=factor)]))
    assert json.loads((tmp_path / "out/config.json").read_text())["mem_len"] == round(factor * LENGTH)
    source = transformers.AutoModel.from_pretrained(sources["xlnet"])
    weights = {key: weight.detach().double() for key, weight in source.named_parameters()}
    segments, loaded = read_segments(tmp_path / "out", padding=5)
    expected = xlnet_states(weights, source.config.to_dict(), segments, round(factor * LENGTH))
    scale = max(each.abs().max() for each in expected)
    assert max((a.double() - b).abs().max() for a, b in zip(loaded, expected, strict=True)) <= TOLERANCE * scale
    shorter = xlnet_states(weights, source.config.to_dict(), segments, round(factor * LENGTH) - 1)
    assert (loaded[-1].double() - shorter[-1]).abs().max() > TOLERANCE * scale, "one state less is noticed"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "step", "check"),
    [
        ("deberta", Table(factor=2), check_tables),
        ("deberta-v2", Table(factor=1.5, fill="linear"), check_tables),
        ("deberta-v3", WiderBuckets(factor=4), check_buckets),
        ("xlnet", LongerMemory(mem_len=40), check_memory),
    ],
)
def test_verify_compares_the_loaded_model(name, step, check, sources, tmp_path):
    convert(str(sources[name]), tmp_path / "out", Recipe([step]))
    subject = Conversion(open_checkpoint(str(tmp_path / "out")), open_checkpoint(str(sources[name])))
    finding = check(subject)
    assert finding.status == "passed", finding
    findings = verify(str(tmp_path / "out"), against=str(sources[name]))
    assert {one.status for one in findings} <= {"passed", "not checked"}, findings
    if check is check_tables:
        file = tmp_path / "out/model.safetensors"
        tensors = load_file(file)
        tensors["deberta.encoder.rel_embeddings.weight"][3, 0] += 0.01
        save_file(tensors, file, {"format": "pt"})
    else:
        key = "mem_len" if check is check_memory else "max_relative_positions"
        config = json.loads((tmp_path / "out/config.json").read_text())
        (tmp_path / "out/config.json").write_text(json.dumps({**config, key: config[key] + 9}))
    changed = Conversion(open_checkpoint(str(tmp_path / "out")), open_checkpoint(str(sources[name])))
    assert check(changed).status == "failed"


@pytest.mark.parametrize(
    ("name", "changes", "method", "words"),
    [
        ("deberta", {"position_biased_input": True}, "table", '"position_biased_input" is true'),
        ("deberta-v3", {"position_biased_input": True}, "buckets", '"position_biased_input" is true'),
        ("deberta-v2", {"relative_attention": False}, "table", '"relative_attention" is false'),
        ("xlnet", {"bi_data": True}, "memory", '"bi_data" is true'),
        ("xlnet", {"clamp_len": 40}, "memory", '"clamp_len" is 40'),
        ("xlnet", {"same_length": True}, "memory", '"same_length" is true'),
        ("xlnet", {"reuse_len": 4}, "memory", '"reuse_len" is 4'),
        ("xlnet", {"use_mems_eval": False}, "memory", '"use_mems_eval" is false'),
    ],
)
def test_what_no_method_supports_is_refused_by_name(name, changes, method, words, sources, tmp_path, run):
    source = copy_changed(sources[name], tmp_path / "source", **changes)
    inspection = inspect_checkpoint(open_checkpoint(str(source), weights=False))
    assert all(inspection.methods.values())
    assert inspection.bound
    (source / "model.safetensors").write_bytes(b"not read")
    refused = run("convert", source, tmp_path / "out", "--method", method, "--factor", 2, "--dry-run")
    assert refused.exit_code == 1
    assert words in refused.exception.message


@pytest.mark.parametrize(
    ("name", "changes", "options", "words"),
    [
        ("xlnet", {"mem_len": -3}, ["--factor", 2], "mem_len"),
        ("xlnet", {"mem_len": None}, ["--factor", 2], "config.json sets no mem_len"),
        ("xlnet", {}, [], "memory needs a factor or a number of states"),
        ("xlnet", {}, ["--factor", 2, "--mem-len", 40], "not both"),
        ("xlnet", {}, ["--mem-len", 8], "but the result would have 8"),
        ("deberta-v3", {"max_relative_positions": 5}, ["--factor", 2], '"max_relative_positions" is 5'),
        ("deberta-v3", {"position_buckets": 1}, ["--factor", 2], '"position_buckets" 1'),
    ],
)
def test_lengths_without_a_result_are_refused(name, changes, options, words, sources, tmp_path, run):
    source = copy_changed(sources[name], tmp_path / "source", **changes)
    method = "memory" if name == "xlnet" else "buckets"
    refused = run("convert", source, tmp_path / "out", "--method", method, *options, "--dry-run")
    assert refused.exit_code == 1
    assert words in refused.exception.message


def test_the_smallest_distance_with_logarithmic_buckets_is_extended(sources, tmp_path):
    source = copy_changed(sources["deberta-v3"], tmp_path / "source", max_relative_positions=6)
    convert(str(source), tmp_path / "out", Recipe([WiderBuckets(factor=2)]), check=False)
    assert torch.isfinite(states(tmp_path / "out", *batch(40))).all()


def test_a_memory_without_a_limit_gets_one(sources, tmp_path):
    """Published configurations have a null, with which the model keeps all states."""
    source = copy_changed(sources["xlnet"], tmp_path / "source", mem_len=None)
    tokenizer = (source / "tokenizer_config.json").read_text()
    made = convert(str(source), tmp_path / "out", Recipe([LongerMemory(mem_len=600)]))
    assert any("keeps the states of all earlier segments" in caution for caution in made.plan.cautions)
    assert json.loads((tmp_path / "out/config.json").read_text())["mem_len"] == 600
    assert (tmp_path / "out/tokenizer_config.json").read_text() == tokenizer, "a segment stays as long"
    # Up to 600 states, both keep all.
    sizes = (40, 30, 70, 8)
    assert all(map(torch.equal, read_segments(source, sizes)[1], read_segments(tmp_path / "out", sizes)[1]))
    again = convert(
        str(tmp_path / "out"), tmp_path / "again", Recipe([LongerMemory(mem_len=900)]), replace_scaling=True
    )
    assert again.plan.start.config["mem_len"] is None


def test_absent_keys_are_defaults_of_the_class():
    """The classes assume an absolute table and no distances if a configuration does not mention them."""
    config = {"model_type": "deberta-v2", "position_buckets": 256}
    assert family_of(config).reason.startswith('"position_biased_input" is true')
    config |= {"position_biased_input": False}
    assert family_of(config).reason.startswith('"relative_attention" is false')
    assert not family_of({**config, "relative_attention": True}).reason


def test_the_configuration_names_the_new_distances(sources, tmp_path):
    for name, step, distance in (
        ("deberta", Table(factor=4), 4 * LENGTH),
        ("deberta-v2", Table(factor=4), 4 * 8),
        ("deberta-v3", WiderBuckets(factor=4), 4 * LENGTH),
    ):
        convert(str(sources[name]), tmp_path / name, Recipe([step]))
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["max_position_embeddings"], config["max_relative_positions"]) == (4 * LENGTH, distance)
        assert json.loads((tmp_path / name / "tokenizer_config.json").read_text())["model_max_length"] == 4 * LENGTH
        with pytest.raises(CtxextError, match="already extended"):
            convert(str(tmp_path / name), tmp_path / "twice", Recipe([step]))


HEADS = {
    "deberta": ("DebertaForSequenceClassification", Table(factor=2)),
    "deberta-v2": ("DebertaV2ForSequenceClassification", Table(factor=2, fill="linear")),
    "deberta-v3": ("DebertaV2ForSequenceClassification", WiderBuckets(factor=2)),
    "xlnet": ("XLNetForSequenceClassification", LongerMemory(factor=2)),
}


def convert_classifier(name, place):
    """Convert a model that distinguishes three classes; return the folders of the source and of the result."""
    head, step = HEADS[name]
    source = save(name, place / "source", name=head, more={"num_labels": 3})
    convert(str(source), place / "out", Recipe([step]))
    return source, place / "out"


@pytest.mark.parametrize("name", HEADS)
def test_a_classifier_keeps_its_head(name, tmp_path):
    """The class of the Auto class loads, its other weights are the source's, and near tokens give the same logits."""
    before, after = (
        transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
        for folder in convert_classifier(name, tmp_path)
    )
    assert type(after).__name__ == HEADS[name][0]
    weights = {key: weight for key, weight in before.named_parameters() if "rel_emb" not in key}
    assert all(torch.equal(weight, after.get_parameter(key)) for key, weight in weights.items())
    assert any("classifier" in key or "logits_proj" in key for key in weights)
    with torch.no_grad():
        near, far = ([model(*texts).logits for model in (before, after)] for texts in (batch(3), batch(3 * LENGTH)))
    assert torch.equal(*near) or name == "deberta-v2"  # linear changes every distance.
    assert not torch.equal(*far) or name == "xlnet"  # A single segment has no memory.


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEADS)
def test_verify_reads_a_classifier(name, tmp_path):
    source, out = convert_classifier(name, tmp_path)
    findings = verify(str(out), against=str(source))
    assert {one.status for one in findings} <= {"passed", "not checked"}, findings
