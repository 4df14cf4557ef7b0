"""A merged checkpoint contains all trained weights, and everything else is unchanged."""

import hashlib
import json
import os
import shutil
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import multimodal_models
from ctxext.api import convert, merge
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import read_safetensors_header
from ctxext.merge.run import find_tied_embeddings
from ctxext.methods import MsPoE, Yarn
from tiny_base import change, load, logits, make_base, save_llama, tune

MSPOE = MsPoE(head_order="fixed", first_layer=0, schedule="by-parts", ratio_min=1.5, ratio_max=4)

GEMMA3 = {
    "image_token_index": multimodal_models.IMAGE,
    "mm_tokens_per_image": 4,
    "text_config": {**multimodal_models.TEXT, "model_type": "gemma3_text", "query_pre_attn_scalar": 16},
    "vision_config": {**multimodal_models.TOWER, "model_type": "siglip_vision_model"},
}


def with_adapter(base, out):
    """The base with the adapter, loaded by peft."""
    from peft import PeftModel

    return PeftModel.from_pretrained(load(base), out / "adapter").eval()


@pytest.mark.parametrize("tied", [True, False])
def test_merged_equals_the_adapter_on_its_base(tmp_path, tied):
    """With all weights that are trained in addition to matrices; test_kinds has other adapters."""
    base = make_base(tmp_path, tie_word_embeddings=tied)
    out = tmp_path / "out"
    tune(base, out, change(train_norms=True, train_embeddings=True))
    merged, expected, before = logits(load(out)), logits(with_adapter(base, out)), logits(load(base))
    assert (merged - expected).abs().max() < 1e-4
    assert (merged - before).abs().max() > 1e-2
    header, old = (read_safetensors_header(folder / "model.safetensors") for folder in (out, base))
    assert header == old
    assert ("lm_head.weight" in header) is not tied
    model = load(out)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


@pytest.mark.parametrize("name", ["gemma3", "llama4", "qwen3_5"])
@pytest.mark.thorough
def test_a_text_model_within_a_multimodal_model_is_merged_in_place(tmp_path, monkeypatch, name):
    """Its files, the multimodal class and the trained class have different tensor names."""
    monkeypatch.setitem(multimodal_models.CONFIGS, "gemma3", GEMMA3)
    if name not in (*multimodal_models.NAMES, "gemma3"):
        pytest.skip("this transformers does not have it")
    source = multimodal_models.save(name, tmp_path / "source")
    for path in save_llama(tmp_path / "words").glob("tokenizer*"):
        shutil.copy(path, source)
    convert(str(source), tmp_path / "base", Yarn(factor=2), check=False)
    tune(tmp_path / "base", tmp_path / "out", change(learning_rate=5e-2))
    merged, before = load(tmp_path / "out"), load(tmp_path / "base")
    expected = logits(with_adapter(tmp_path / "base", tmp_path / "out"))
    assert (logits(merged) - expected).abs().max() < 1e-4
    assert (logits(before) - expected).abs().max() > 1e-2
    headers = [read_safetensors_header(tmp_path / folder / "model.safetensors") for folder in ("base", "out")]
    assert headers[0] == headers[1]


@pytest.mark.thorough
def test_a_base_in_four_bits_is_merged_into_its_original_weights(tmp_path):
    pytest.importorskip("bitsandbytes")
    base = make_base(tmp_path, hidden_size=64, intermediate_size=64)  # It packs blocks of 64.
    out, plain = tmp_path / "out", tmp_path / "plain"
    done, whole = tune(base, out, change(quantize="4bit")), tune(base, plain)
    assert (done.num_trained, done.num_parameters) == (whole.num_trained, whole.num_parameters)
    # It was trained in 4 bits: the loss of the first step is close to the other, but not equal.
    assert 0 < abs(done.losses[0][1] - whole.losses[0][1]) < 0.2
    assert (logits(load(out)) - logits(with_adapter(base, out))).abs().max() < 1e-4
    assert "base in 4bit while training" in (out / "ctxext.json").read_text()


@pytest.mark.thorough
def test_mspoe_base_keeps_its_code(tmp_path):
    """Byte for byte: `portable/test_modeling_family.py` loads it without ctxext."""
    base, out = make_base(tmp_path, Yarn(factor=4), MSPOE), tmp_path / "tuned"
    tune(base, out)
    assert (logits(load(out)) - logits(with_adapter(base, out))).abs().max() < 1e-4
    for name in (
        "mspoe.py",
        "method.py",
        "modeling_family.py",
        "private_copy.py",
        "modeling_ctxext.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (base, out))
    assert new["ctxext"].pop("finetune")["trained"] == "LoRA rank 4, alpha 8"
    assert new == old


@pytest.mark.thorough
def test_full_training_ends_in_the_same_layout(tmp_path):
    base, out = make_base(tmp_path, tie_word_embeddings=True), tmp_path / "out"
    tune(base, out, change(full=True, learning_rate=1e-3))
    header, old = (read_safetensors_header(folder / "model.safetensors") for folder in (out, base))
    assert header == old
    assert not (out / "adapter").exists()
    assert (logits(load(out)) - logits(load(base))).abs().max() > 1e-2


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "out"
    tune(base, out)
    return out


@pytest.mark.thorough
def test_a_separate_merge_gives_the_same_weights(base, tuned, tmp_path):
    done = merge(str(base), tuned / "adapter", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()
    assert done.num_changed == 14
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["rope_scaling"]["factor"] == config["rope_parameters"]["factor"] == 4.0


@pytest.mark.parametrize("options", [{"train_norms": True, "train_embeddings": True}, {"full": True}])
def test_a_share_of_the_change_lies_between_base_and_training(tmp_path, options):
    """Matrices, norms and embeddings, also those that training unties (WiSE-FT, arXiv 2109.01903, equation 1)."""
    base, out, part = make_base(tmp_path, tie_word_embeddings=True), tmp_path / "out", tmp_path / "part"
    tune(base, out, change(**options))
    tune(base, part, change(**options, strength=0.25))
    first, last, between = (dict(load(folder).named_parameters()) for folder in (base, out, part))
    assert first.keys() <= last.keys() == between.keys()
    changed = 0
    for name, tensor in between.items():
        old = first.get(name, first["model.embed_tokens.weight"]).double()
        expected = 0.75 * old + 0.25 * last[name].double()
        assert (tensor.double() - expected).abs().max() <= 1e-6, name
        changed += not torch.equal(tensor, old.float())
    assert changed == len(between)
    trained = out if options.get("full") else part / "adapter"  # The adapter has the whole change.
    merge(str(base), trained, tmp_path / "again", strength=0.25)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (part / "model.safetensors").read_bytes()
    for folder in (part, tmp_path / "again"):
        assert json.loads((folder / "config.json").read_text())["ctxext"]["finetune"]["strength"] == 0.25
        assert "strength" in (folder / "README.md").read_text()


@pytest.mark.parametrize("strength", [0, -0.5, 1.01, float("nan")])
def test_the_share_of_the_change_is_above_0_and_at_most_1(base, tmp_path, strength):
    with pytest.raises(CtxextError, match="--strength must be"):
        merge(str(base), tmp_path, tmp_path / "out", strength=strength)


def test_an_adapter_without_a_merge_has_no_strength(base, tmp_path):
    with pytest.raises(CtxextError, match=r"--strength .* cannot be combined with --no-merge"):
        tune(base, tmp_path / "out", change(strength=0.5), merge=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_shards_stay_shards_and_hold_no_more_than_one_tensor(base, tuned, tmp_path):
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    shutil.copytree(base, sharded)
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    for path in (tmp_path / "plain").glob("model*"):
        shutil.copyfile(path, sharded / path.name)
    assert len(list(sharded.glob("model-*"))) > 2
    merge(str(sharded), tuned / "adapter", tmp_path / "out")
    assert (logits(load(tmp_path / "out")) - logits(load(tuned))).abs().max() < 1e-6


def test_manifest_has_the_digests_of_what_lies_there(tuned):
    manifest = json.loads((tuned / "ctxext.json").read_text())
    for name, digest in {**manifest["files"], **manifest["weights"]}.items():
        assert hashlib.sha256((tuned / name).read_bytes()).hexdigest() == digest, name
    assert set(manifest["weights"]) == {"model.safetensors"}
    lying = {path.relative_to(tuned).as_posix() for path in tuned.rglob("*") if path.is_file()}
    assert set(manifest["files"]) == lying - {"model.safetensors", "ctxext.json"}
    assert manifest["recipe"]["steps"][0]["method"] == "yarn"


def test_the_adapter_comes_along_without_pipes_and_links(base, tuned, tmp_path):
    shutil.copytree(tuned / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "merges.txt").write_text("mine")
    os.mkfifo(tmp_path / "adapter" / "vocab.txt")
    (tmp_path / "adapter" / "tokenizer.json").symlink_to("/etc/hostname")
    merge(str(base), tmp_path / "adapter", tmp_path / "out")
    assert (tmp_path / "out" / "adapter" / "merges.txt").read_text() == "mine"
    assert not {"vocab.txt", "tokenizer.json"} & {path.name for path in (tmp_path / "out" / "adapter").iterdir()}


def test_a_stopped_merge_leaves_nothing(base, tuned, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(str(base), tuned / "adapter", tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("writer", ["ctxext", "transformers"])
def test_a_checkpoint_that_was_trained_is_merged_whole(base, tuned, tmp_path, writer):
    """transformers writes the keys of its version, and all defaults."""
    other = tmp_path / "other"
    if writer == "transformers":
        model = load(tuned)
        model.config.use_cache = False
        model.save_pretrained(other)
        assert (other / "config.json").read_text() != (tuned / "config.json").read_text()
    else:
        shutil.copytree(tuned, other)
    merge(base, other, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()
    assert not (tmp_path / "out" / "adapter").exists()
    notes = json.loads((tmp_path / "out" / "config.json").read_text())["ctxext"]["finetune"]
    assert notes["tuned"] == "other"
    text = (other / "config.json").read_text()
    wider = text.replace('"factor": 4.0', '"factor": 3.0')
    assert wider != text
    (other / "config.json").write_text(wider)
    with pytest.raises(CtxextError, match=r"was not trained from .*config\.json has a different positions"):
        merge(base, other, tmp_path / "again")
    (other / "config.json").write_text(text)
    save_file({**weights(other), "model.more.weight": torch.ones(2)}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CtxextError, match=r'was not trained from .*"model\.more\.weight"'):
        merge(base, other, tmp_path / "again")


@pytest.mark.parametrize(("stated", "tied"), [(True, {"lm_head.weight": "model.embed_tokens.weight"}), (False, {})])
def test_a_family_that_this_transformers_does_not_know_may_tie_its_embeddings(tmp_path, monkeypatch, stated, tied):
    base = make_base(tmp_path, tie_word_embeddings=True)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": stated}))
    monkeypatch.setattr("transformers.AutoConfig.for_model", mock.Mock(side_effect=ValueError("Unrecognized")))
    assert find_tied_embeddings(open_checkpoint(str(base))) == tied


@pytest.mark.parametrize("both", ["base", "tuned"])
def test_tied_embeddings_that_one_of_the_two_files_holds_twice(tmp_path, both):
    base = make_base(tmp_path, tie_word_embeddings=True)
    shutil.copytree(base, tmp_path / "tuned")
    old = weights(base)
    new = {name: tensor + 0.5 for name, tensor in old.items()}
    twice = {"lm_head.weight": (old if both == "base" else new)["model.embed_tokens.weight"].clone()}
    for folder, tensors, name in ((base, old, "base"), (tmp_path / "tuned", new, "tuned")):
        save_file({**tensors, **(twice if name == both else {})}, folder / "model.safetensors", {"format": "pt"})
    merged = weights(merge(base, tmp_path / "tuned", tmp_path / "out").folder)
    assert merged.keys() == weights(base).keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, new["model.embed_tokens.weight" if name == "lm_head.weight" else name])
