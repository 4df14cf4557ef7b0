"""Longer position tables, learned or computed: read back from the loaded model and held against the reference."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxext.api import Recipe, convert, verify
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.inspection import inspect_checkpoint
from ctxext.errors import CtxextError
from ctxext.files.content import sha256_of
from ctxext.recipes.encodings.learned import COMPUTED as COMPUTED_LAYOUTS
from ctxext.recipes.encodings.learned import LAYOUTS
from ctxext.recipes.methods.fills import FILLS, KEEPS_ROWS, _round_to, continue_sinusoids, fill_rows
from ctxext.recipes.methods.range import Range
from ctxext.recipes.methods.table import Table
from ctxext.verify.conversion import Conversion
from ctxext.verify.rotation import reference_of
from ctxext.verify.run import check_tables
from tiny_encodings import COMPUTED, LEARNED, LENGTH, load, logits, save

FACTOR = 3


def table_of(model, ending):
    return next(weight for name, weight in model.named_parameters() if name.endswith(ending)).detach()


def findings(folder, **options):
    return {finding.check: finding for finding in verify(str(folder), **options)}


def test_every_layout_has_a_model():
    assert set(LEARNED) == set(LAYOUTS)


@pytest.mark.parametrize("model_type", [name for name in LEARNED if not LAYOUTS[name].distance_key])
def test_a_family(model_type, tmp_path):
    source = save(model_type, tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Table(factor=FACTOR, fill="tile")]))
    before, after = load(source), load(tmp_path / "out")
    layout = LAYOUTS[model_type]
    special = layout.num_special({"pad_token_id": 1})
    for ending in layout.tensors:
        old, new = table_of(before, ending), table_of(after, ending)
        assert torch.equal(new[: len(old)], old), "special rows and the first L are the source's"
        numbers = {"fill": "tile"}
        wanted = reference_of(Table).rows(numbers, old[special:].double(), FACTOR * LENGTH)
        assert torch.allclose(new[special:].double(), wanted, atol=1e-6)
    assert torch.equal(logits(before, LENGTH), logits(after, LENGTH)), "inputs within L give the very same"
    assert logits(after, FACTOR * LENGTH).isfinite().all()
    others = {name for name, weight in before.named_parameters() if not name.endswith(layout.tensors)}
    assert all(torch.equal(before.get_parameter(name), after.get_parameter(name)) for name in others)
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == FACTOR * LENGTH
    by_check = findings(tmp_path / "out", against=str(source), load=False)
    assert {name: one.status for name, one in by_check.items()} == {
        "record": "passed", "files": "passed", "weights": "not checked", "configuration": "passed",
        "lengths": "passed", "code": "passed", "against": "passed",
    }  # fmt: skip
    assert all(ending in by_check["against"].detail for ending in layout.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fill", FILLS)
def test_a_fill_matches_its_reference(fill, dtype, tmp_path):
    source = save("opt", tmp_path / "source", dtype=dtype)
    for factor, place in ((FACTOR, "whole"), (2.5, "half")):
        convert(str(source), tmp_path / place, Recipe([Table(factor=factor, fill=fill)]))
        old = load_file(source / "model.safetensors")["model.decoder.embed_positions.weight"]
        new = load_file(tmp_path / place / "model.safetensors")["model.decoder.embed_positions.weight"]
        count = round(factor * LENGTH)
        wanted = reference_of(Table).rows({"fill": fill}, old[2:].double(), count)
        assert new.shape == (2 + count, old.shape[1])
        assert new.dtype == dtype
        assert torch.equal(new[:2], old[:2])
        # Rounded once: at most half a step of the format from the exact row.
        assert ((new[2:].double() - wanted).abs() <= torch.finfo(dtype).eps * wanted.abs().clamp(min=1e-2)).all()
        assert torch.equal(new[2 : 2 + LENGTH], old[2:]) == (fill in KEEPS_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "fill"), [("gpt2", "tile"), ("roberta", "linear")])
def test_verify_loads_and_compares(model_type, fill, tmp_path):
    source = save(model_type, tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Table(factor=FACTOR, fill=fill)]))
    by_check = findings(tmp_path / "out", against=str(source))
    assert by_check["loading"].status == by_check["tables"].status == "passed", by_check
    assert ("identical to the source" in by_check["tables"].detail) == (fill in KEEPS_ROWS)
    assert findings(tmp_path / "out")["tables"].status == "passed", "a whole factor keeps every old row"


@pytest.mark.thorough
def test_verify_finds_a_row_that_was_changed(tmp_path):
    source = save("bert", tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Table(factor=FACTOR, fill="tile")]))
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    tensors["bert.embeddings.position_embeddings.weight"][LENGTH + 3, 0] += 0.01
    save_file(tensors, file, {"format": "pt"})
    subject = Conversion(open_checkpoint(str(tmp_path / "out")), open_checkpoint(str(source)))
    assert check_tables(subject).status == "failed"


def test_shards_without_the_table_are_linked_and_the_index_agrees(tmp_path):
    source = save("gpt2", tmp_path / "source", max_shard_size="6KB")
    shards = sorted(source.glob("*.safetensors"))
    assert len(shards) > 2
    done = convert(str(source), tmp_path / "out", Recipe([Table(factor=FACTOR)]), link="hard")
    (rewritten,) = [name for name, how in done.written.ways.items() if how == "rewritten"]
    for shard in shards:
        assert (tmp_path / "out" / shard.name).samefile(shard) == (shard.name != rewritten)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    sizes = [t.numel() * t.element_size() for s in shards for t in load_file(tmp_path / "out" / s.name).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert torch.equal(logits(load(source), LENGTH), logits(load(tmp_path / "out"), LENGTH))


def test_models_without_a_head_and_old_buffers(tmp_path):
    """Names without a prefix, and the buffers that checkpoints of transformers 2 and 3 keep among the weights."""
    source = save("bert", tmp_path / "source", name="BertModel")
    file = source / "model.safetensors"
    tensors = load_file(file)
    assert "embeddings.position_embeddings.weight" in tensors
    tensors["embeddings.position_ids"] = torch.arange(LENGTH)[None]
    tensors["embeddings.token_type_ids"] = torch.zeros(1, LENGTH, dtype=torch.long)
    save_file(tensors, file, {"format": "pt"})
    convert(str(source), tmp_path / "out", Recipe([Table(factor=FACTOR)]))
    made = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(made["embeddings.position_ids"], torch.arange(FACTOR * LENGTH)[None])
    assert torch.equal(made["embeddings.token_type_ids"], torch.zeros(1, FACTOR * LENGTH, dtype=torch.long))
    assert torch.equal(logits(load(source), LENGTH), logits(load(tmp_path / "out"), LENGTH))
    record = json.loads((tmp_path / "out/ctxext.json").read_text())
    assert set(record["rewritten"]) == {
        "embeddings.position_embeddings.weight", "embeddings.position_ids", "embeddings.token_type_ids"
    }  # fmt: skip
    card = (tmp_path / "out/README.md").read_text()
    assert "except for `embeddings.position_embeddings.weight`" in card
    assert "AutoModel.from_pretrained" in card
    assert "pipeline_tag: feature-extraction" in card
    assert "config-only" not in card


def test_gpt2_with_the_masks_of_the_first_releases(tmp_path):
    source = save("gpt2", tmp_path / "source")
    file = source / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(LENGTH, LENGTH).tril().view(1, 1, LENGTH, LENGTH)
    save_file(tensors, file, {"format": "pt"})
    convert(str(source), tmp_path / "out", Recipe([Table(factor=FACTOR)]))
    assert torch.equal(logits(load(source), LENGTH), logits(load(tmp_path / "out"), LENGTH))
    assert logits(load(tmp_path / "out"), FACTOR * LENGTH).isfinite().all()


def test_other_forms_of_the_weights_are_left_out_and_named(tmp_path):
    source = save("bert", tmp_path / "source")
    for name in ("pytorch_model.bin", "tf_model.h5", "rust_model.ot"):
        (source / name).write_bytes(b"the old table")
    (source / "2_Dense").mkdir()
    (source / "2_Dense/model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    done = convert(str(source), tmp_path / "out", Recipe([Table(factor=FACTOR)]))
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert not names & {"pytorch_model.bin", "tf_model.h5", "rust_model.ot"}
    assert "2_Dense/model.safetensors" in names
    assert any("pytorch_model.bin" in caution for caution in done.plan.cautions)
    assert findings(tmp_path / "out", load=False)["files"].status == "passed"


@pytest.mark.parametrize("digest", [False, True])
def test_a_rewritten_file_does_not_take_the_digest_that_the_cache_knows(digest, tmp_path, monkeypatch):
    source = save("gpt2", tmp_path / "source")
    monkeypatch.setattr(Checkpoint, "known_digest", lambda checkpoint, path: "0f" * 32)
    convert(str(source), tmp_path / "out", Recipe([Table(factor=2)]), digest=digest, check=False)
    wanted = sha256_of(tmp_path / "out" / "model.safetensors") if digest else None
    assert json.loads((tmp_path / "out" / "ctxext.json").read_text())["weights"] == {"model.safetensors": wanted}


def refused(source, step, out, **options) -> CtxextError:
    with pytest.raises(CtxextError) as caught:
        convert(str(source), out, Recipe([step]), **options)
    assert not out.exists()
    return caught.value


def test_a_table_is_neither_lengthened_twice_nor_restored(tmp_path):
    source = save("gpt2", tmp_path / "source")
    convert(str(source), tmp_path / "once", Recipe([Table(factor=2)]))
    assert "already extended" in refused(tmp_path / "once", Table(factor=2), tmp_path / "out").message
    again = refused(tmp_path / "once", Table(factor=2), tmp_path / "out", replace_scaling=True)
    assert "source" in again.hint


def test_inspect_and_convert_report_the_rows_of_the_table(tmp_path, run):
    source = save("roberta", tmp_path / "source")
    shown = run("inspect", source).output
    assert "12 positions after 2 for others" in " ".join(shown.split())
    assert "--method table" in run("inspect", source).stderr
    dry = run("convert", source, "--method", "table", "--factor", 2, "--dry-run").output
    assert "unchanged except roberta.embeddings.position_embeddings.weight 14×16 → 26×16" in " ".join(dry.split())
    done = run("convert", source, tmp_path / "out", "--method", "table", "--factor", 2)
    assert done.exit_code == 0
    assert f"ctxext eval {tmp_path / 'out'}" in " ".join(done.stderr.split()).replace("\n", "")
    assert "neither a causal nor a masked" in run("eval", save("bart", tmp_path / "bart")).exception.message
    assert json.loads(run("inspect", tmp_path / "out", "--json").stdout)["encoding"]["is_extended"] is True


def test_a_full_disk_or_a_broken_source_leaves_nothing(tmp_path):
    source = save("gpt2", tmp_path / "source")
    shutil.copy(source / "model.safetensors", tmp_path / "keep")
    (source / "model.safetensors").write_bytes((tmp_path / "keep").read_bytes()[:-8])
    refused(source, Table(factor=2), tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# Tables of sinusoids


def test_every_computed_layout_has_a_model():
    assert set(COMPUTED) == set(COMPUTED_LAYOUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", COMPUTED)
def test_a_computed_table(model_type, dtype, tmp_path):
    source = save(model_type, tmp_path / "source", dtype=dtype)
    convert(str(source), tmp_path / "out", Recipe([Range(factor=FACTOR)]))
    before, after = load(source).float(), load(tmp_path / "out").float()
    assert torch.equal(logits(before, LENGTH), logits(after, LENGTH))
    assert logits(after, FACTOR * LENGTH).isfinite().all()
    for ending in COMPUTED_LAYOUTS[model_type].tensors:
        table = next(weight for name, weight in after.named_parameters() if name.endswith(ending)).detach()
        wanted = reference_of(Range).rows({}, table.double(), FACTOR * LENGTH)
        assert torch.allclose(table.double(), wanted, atol=1e-6 if dtype == torch.float32 else 1e-3)
    read = json.loads((tmp_path / "out/config.json").read_text())
    assert read["max_position_embeddings"] == FACTOR * LENGTH
    findings = verify(str(tmp_path / "out"), against=str(source), load=False)
    assert {one.status for one in findings} == {"passed", "not checked"}, findings
    assert check_inspect(tmp_path / "out")


def check_inspect(folder):
    inspection = inspect_checkpoint(open_checkpoint(str(folder)))
    assert inspection.model.encoding.context_length == FACTOR * LENGTH
    return not inspection.methods["range"] and inspection.methods["table"]


@pytest.mark.parametrize("model_type", ["marian", "pegasus"])
@pytest.mark.thorough
def test_a_loaded_computed_table_is_compared(model_type, tmp_path):
    source = save(model_type, tmp_path / "source")
    convert(str(source), tmp_path / "out", Recipe([Range(factor=FACTOR)]))
    finding = check_tables(Conversion(open_checkpoint(str(tmp_path / "out"))))
    assert finding.status == "passed", finding


def test_many_rows_are_made_as_few_are():
    table = np.random.default_rng(0).normal(size=(40, 2)).astype("<f4")
    content = b"".join(fill_rows(memoryview(table.tobytes()), "F32", 2, 0, 3000, FILLS["linear"]))
    rows, at = np.frombuffer(content, "<f4").reshape(3000, 2), 2500 * 40 / 3000
    low = int(at)
    np.testing.assert_allclose(rows[2500], table[low] + (at - low) * (table[low + 1] - table[low]), rtol=1e-5)


def test_bf16_is_rounded_to_the_nearest_and_ties_to_even_as_torch_does():
    bits = np.array(
        [0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF818000, 0x3F817FFF], dtype=np.uint32
    )
    values = np.concatenate([bits.view(np.float32), np.random.default_rng(0).normal(size=1000).astype(np.float32)])
    wanted = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert _round_to(values.astype(np.float64), "BF16").tolist() == wanted.tolist()


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids_continue_beyond_the_old_rows(width):
    """Vaswani et al. 2017, section 3.5: sines of p / 10000^(2i/d), then cosines; the old rows stay as they are."""
    old, special, new = 3, 1, 1500
    raw = np.full((special + old, width), 5.0, dtype="<f4").tobytes()
    content = b"".join(continue_sinusoids(memoryview(raw), "F32", width, special, new))
    extended = np.frombuffer(content, dtype="<f4").reshape(-1, width)
    assert extended.shape == (special + new, width)
    assert (extended[: special + old] == 5).all()
    for p in (3, 4, 700, 1499):
        sines = [np.sin(p / 10000 ** (2 * i / width)) for i in range((width + 1) // 2)]
        cosines = [np.cos(p / 10000 ** (2 * i / width)) for i in range(width // 2)]
        np.testing.assert_allclose(extended[special + p], [*sines, *cosines], rtol=1e-5, atol=1e-6)
