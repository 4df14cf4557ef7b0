"""Files that a merge reads, writes, omits and refuses to lose, on a tiny checkpoint."""

import json
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.errors import CtxextError
from ctxext.merge.run import find_tied_embeddings, merge, save_adapter

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 6,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
EMBEDDING, HEAD, QUERY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"
TENSORS = {EMBEDDING: torch.ones(6, 4), QUERY: torch.zeros(4, 4)}


def make(folder, config=LLAMA, tensors=TENSORS, **texts):
    """A checkpoint with other files in its folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def make_adapter(folder, **tensors):
    """An adapter that adds one to every number of a projection, or of other tensors."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 1}))
    owner = QUERY.removesuffix(".weight")
    given = tensors or {f"{owner}.lora_A.weight": torch.ones(1, 4), f"{owner}.lora_B.weight": torch.ones(4, 1)}
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in given.items()}, folder / "adapter_model.safetensors"
    )
    return folder


def test_a_tensor_that_torch_cannot_hold_is_refused_by_its_file(tmp_path, model):
    folder = make_adapter(tmp_path / "adapter")
    name = f"base_model.model.{QUERY.removesuffix('.weight')}.lora_A.weight"
    header = json.dumps({name: {"dtype": "F6_E2M3", "shape": [1, 4], "data_offsets": [0, 3]}}).encode()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(CtxextError, match=r"adapter_model\.safetensors\" cannot be read: "):
        merge(str(model), folder, tmp_path / "out")


@pytest.fixture
def model(tmp_path):
    return make(tmp_path / "model")


@pytest.fixture
def adapter(tmp_path):
    return make_adapter(tmp_path / "adapter")


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_every_file_comes_along_but_weights_in_other_forms_and_an_older_adapter(tmp_path):
    """Nor files that would load the base again."""
    others = (
        *("pytorch_model.bin", "onnx/model.onnx", "onnx/more.safetensors", "adapter/old.txt", "adapter/deep/old.txt"),
        *("params.json", "adapter_config.json", "config.4.0.0.json", "openvino_model.xml", "trainer_state.json"),
    )
    kept = {"tokenizer.json": "{}", "notes/deep/one.txt": "1"}
    texts = {**dict.fromkeys(others, "{}"), **kept, "ctxext.json": '{"source": {"name": "mine"}, "files": {}}'}
    model = make(tmp_path / "model", {**LLAMA, "configuration_files": ["config.4.0.0.json"]}, **texts)
    save_file({"other": torch.ones(1)}, model / "onnx" / "more.safetensors")
    adapter = make_adapter(tmp_path / "adapter")
    (adapter / "runs" / "deep").mkdir(parents=True)
    for name in ("runs/deep/note.txt", ".env", "modeling.py", "training_args.bin", "tokenizer.json"):
        (adapter / name).write_text("")
    seen, out = [], tmp_path / "out"
    done = merge(str(model), adapter, out, progress=lambda *state: seen.append(state))
    of_the_adapter = ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    written = ["README.md", "config.json", "ctxext.json", "model.safetensors", *kept]
    assert names(out) == sorted([*written, *(f"adapter/{name}" for name in of_the_adapter)])
    assert {name: (out / name).read_text() for name in kept} == kept
    assert load_file(out / "model.safetensors")[QUERY].tolist() == [[1.0] * 4] * 4
    assert (done.folder, done.num_changed, done.num_tensors) == (out, 1, 2)
    size = (model / "model.safetensors").stat().st_size
    assert seen[-1] == ("writing tensors", size, size)
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    config = json.loads((out / "config.json").read_text())
    assert config["ctxext"]["finetune"]["adapter"] == "adapter"
    assert "configuration_files" not in config
    manifest = json.loads((out / "ctxext.json").read_text())
    assert (manifest["source"], manifest["base"]["name"]) == ({"name": "mine"}, "model")
    assert sorted(manifest["files"]) == sorted({*names(out)} - {"ctxext.json", "model.safetensors"})
    assert [*manifest["weights"]] == ["model.safetensors"]


def test_existing_output_is_replaced_only_on_request(tmp_path, model, adapter):
    out = tmp_path / "out"
    merge(str(model), adapter, out)
    with pytest.raises(CtxextError, match="is not empty"):
        merge(str(model), adapter, out)
    merge(str(model), adapter, out, overwrite=True)
    (out / "mine.txt").write_text("")
    with pytest.raises(CtxextError, match=r'files that ctxext did not create: "mine\.txt"'):
        merge(str(model), adapter, out, overwrite=True)
    merge(str(model), adapter, out, overwrite_anything=True)
    assert "mine.txt" not in names(out)


def test_out_lies_neither_in_the_model_nor_in_the_adapter(model, adapter):
    for folder in (model, adapter):
        before, out = sorted(folder.rglob("*")), folder / "deep" / "out"
        with pytest.raises(CtxextError) as caught:
            merge(str(model), adapter, out)
        assert str(caught.value).splitlines()[0] == f'OUT "{out}" is inside SOURCE "{folder}".'
        assert sorted(folder.rglob("*")) == before


def test_what_another_run_finished_meanwhile_is_seen_before_anything_is_written(tmp_path, model, adapter, monkeypatch):
    out = tmp_path / "out"

    def slow(checkpoint):
        out.mkdir(exist_ok=True)
        (out / "config.json").write_text("{}")
        return {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}

    monkeypatch.setattr(sys.modules["ctxext.merge.run"], "read_shapes", slow)
    with pytest.raises(CtxextError, match="is not empty"):
        merge(str(model), adapter, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model", "out"]
    assert names(out) == ["config.json"]


def test_a_missing_shard_is_reported_before_the_adapter_is_read(tmp_path, adapter):
    index = json.dumps({"weight_map": {EMBEDDING: "model.safetensors", HEAD: "model-2.safetensors"}})
    model = make(tmp_path / "model", **{"model.safetensors.index.json": index})
    with pytest.raises(CtxextError, match=r"model-2\.safetensors"):
        merge(str(model), adapter, tmp_path / "out")


@pytest.mark.parametrize("stored", [False, True])
def test_a_tie_that_training_cut_is_cut_in_the_configuration_and_in_the_index(tmp_path, stored):
    shards = {EMBEDDING: "model.safetensors", QUERY: "model.safetensors"} | (
        {HEAD: "model.safetensors"} if stored else {}
    )
    index = json.dumps({"metadata": {}, "weight_map": shards})
    tensors = {**TENSORS, **({HEAD: torch.ones(6, 4)} if stored else {})}
    model = make(tmp_path / "model", tensors=tensors, **{"model.safetensors.index.json": index})
    adapter = make_adapter(tmp_path / "adapter", **{HEAD: torch.full((6, 4), 2.0)})
    out = tmp_path / "out"
    shown = []
    merge(str(model), adapter, out, progress=lambda *given: shown.append(given))
    assert all(done <= total for _, done, total in shown)
    size = (model / "model.safetensors").stat().st_size + (0 if stored else tensors[EMBEDDING].nbytes)
    assert shown[-1] == ("writing tensors", size, size)
    new = load_file(out / "model.safetensors")
    assert (new[HEAD].mean(), new[EMBEDDING].mean()) == (2, 1)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"] == {
        **shards,
        HEAD: "model.safetensors",
    }


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_tie_of_a_nested_language_model_is_removed_too(tmp_path, is_cut):
    text = {**LLAMA, "model_type": "gemma3_text", "head_dim": 4}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    inside = "model.language_model.embed_tokens.weight"
    model = make(tmp_path / "model", config, {inside: torch.ones(6, 4), QUERY: torch.zeros(4, 4)})
    changed = {HEAD: torch.full((6, 4), 2.0)} if is_cut else {}
    merge(str(model), make_adapter(tmp_path / "adapter", **changed), tmp_path / "out")
    new = json.loads((tmp_path / "out" / "config.json").read_text())
    assert new["text_config"] == {**text, "tie_word_embeddings": not is_cut}
    assert new.get("tie_word_embeddings") == (False if is_cut else None)


def ties_of(folder, config, tensors):
    return find_tied_embeddings(open_checkpoint(str(make(folder, config, tensors))))


@pytest.mark.parametrize(
    ("model_type", "stated", "is_tied"),
    [
        ("llama", True, True),
        ("llama", False, False),
        ("llama", None, False),
        ("gemma", None, True),
        ("gemma", False, False),
    ],
)
def test_whether_the_output_embedding_is_the_input_embedding(tmp_path, model_type, stated, is_tied):
    config = {**LLAMA, "model_type": model_type, "tie_word_embeddings": stated}
    if stated is None:
        del config["tie_word_embeddings"]
    assert ties_of(tmp_path / "model", config, TENSORS) == ({HEAD: EMBEDDING} if is_tied else {})


def test_the_input_embedding_is_recognized_by_its_size_without_named_ties(tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_tied_weights_keys", None)
    shapes = {"a": (6,), "b": (6, 1, 4), "c": (4, 6), HEAD: (6, 4), "z.weight": (6, 4)}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    assert ties_of(tmp_path / "model", LLAMA, tensors) == {HEAD: "z.weight"}
    del tensors["z.weight"]
    assert ties_of(tmp_path / "none", LLAMA, tensors) == {}


def test_an_encoder_ties_the_head_of_its_class(tmp_path, monkeypatch):
    from transformers import BertForMaskedLM

    monkeypatch.setattr(BertForMaskedLM, "_tied_weights_keys", {"cls.decoder.weight": "embeddings.weight", "x": "gone"})
    config = {**LLAMA, "model_type": "bert", "architectures": ["BertForMaskedLM"]}
    tensors = {"bert.embeddings.weight": torch.ones(6, 4), "embeddings.weight": torch.ones(6, 4)}
    assert ties_of(tmp_path / "model", config, tensors) == {"cls.decoder.weight": "embeddings.weight"}


def test_an_adapter_is_saved_without_its_optimizer_and_with_the_name_of_its_base(tmp_path, model, adapter):
    (adapter / "optimizer.pt").write_text("large")
    folder = tmp_path / "deep" / "saved"
    save_adapter(adapter, folder, open_checkpoint(str(model)))
    assert names(folder) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config == {"peft_type": "LORA", "lora_alpha": 1, "base_model_name_or_path": "model", "revision": None}
    assert 'base_model: "model"' in (folder / "README.md").read_text()
    assert (folder / "adapter_model.safetensors").read_bytes() == (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(CtxextError) as caught:
        save_adapter(adapter, tmp_path / "none", SimpleNamespace())
    assert str(caught.value) == f'"{adapter}" contains no adapter.'
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("alpha", [1e308, 1e39])
def test_numbers_that_are_not_finite_are_refused_before_out_appears(alpha, model, adapter, tmp_path):
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": alpha}))
    with pytest.raises(CtxextError, match=f'"{QUERY}" would contain infinite numbers or NaN in F32'):
        merge(str(model), adapter, tmp_path / "out")
    assert names(tmp_path) == sorted(f"{folder.name}/{name}" for folder in (model, adapter) for name in names(folder))


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 70_000.0), (torch.float32, float("nan"))])
def test_whole_tensors_that_are_not_finite_in_the_stored_type(dtype, value, tmp_path):
    base = make(tmp_path / "model", tensors={**TENSORS, QUERY: torch.zeros(4, 4, dtype=dtype)})
    changed = make_adapter(tmp_path / "adapter", **{QUERY: torch.full((4, 4), value)})
    with pytest.raises(CtxextError, match="infinite numbers or NaN"):
        merge(str(base), changed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


TRAINED = torch.full((6, 4), 3.0)


@pytest.mark.parametrize("name", ["trainable_params.bin", "non_lora_trainables.bin"])
@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_weights_that_were_trained_beside_an_adapter_are_merged(name, prefix, model, adapter, tmp_path):
    """LongLoRA's embeddings and norms were lost, and the merge was reported as complete."""
    torch.save({f"{prefix}{EMBEDDING}": TRAINED, f"{prefix}{HEAD}": TRAINED}, adapter / name)
    assert merge(str(model), adapter, tmp_path / "out").num_changed == 2
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged[EMBEDDING].equal(TRAINED)
    assert merged[QUERY].equal(torch.ones(4, 4))
    assert (tmp_path / "out" / "adapter" / name).is_file()


def _link(path):
    torch.save({EMBEDDING: TRAINED}, path.parent.parent / "elsewhere.bin")
    path.symlink_to(path.parent.parent / "elsewhere.bin")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: torch.save({"unknown.weight": TRAINED}, path), 'changes "unknown.weight"'),
        (lambda path: torch.save({EMBEDDING: torch.ones(7, 4)}, path), "does not fit"),
        (lambda path: torch.save([TRAINED], path), "is not a dictionary of tensors"),
        (lambda path: path.write_bytes(b"no pickle"), "cannot be read"),
        (lambda path: path.write_bytes(pickle.dumps({EMBEDDING: print})), "cannot be read"),
        (_link, "it is a link"),
    ],
)
def test_weights_beside_an_adapter_that_cannot_be_merged_are_refused_by_name(write, message, model, adapter, tmp_path):
    write(adapter / "trainable_params.bin")
    with pytest.raises(CtxextError, match=message):
        merge(str(model), adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_convert_names_merge_for_an_adapter(adapter, tmp_path):
    with pytest.raises(CtxextError) as caught:
        open_checkpoint(adapter)
    assert f"ctxext merge BASE {adapter} OUT" in caught.value.hint


@pytest.mark.parametrize("name", ["mm_projector.bin", "embeddings.safetensors", "trainable.pt"])
def test_unknown_weights_beside_an_adapter_are_refused(name, model, adapter, tmp_path):
    (adapter / name).write_bytes(b"")
    with pytest.raises(CtxextError, match=f'contains "{name}"'):
        merge(str(model), adapter, tmp_path / "out")
