"""Checkpoints: their files, allowed kinds of files, and properties."""

import json
import os
import struct
from pathlib import Path

import pytest

from ctxext.checkpoint.families import family_of
from ctxext.checkpoint.opening import (
    Checkpoint,
    claimed_lengths,
    fingerprint,
    is_cached,
    open_checkpoint,
    read_safetensors_header,
)
from ctxext.errors import CtxextError

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
LLAMA |= {"max_position_embeddings": 128}
TENSORS = {
    "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]},
}
COMMIT = "c" * 40


def safetensors(size=28) -> bytes:
    text = json.dumps(TENSORS).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def made(folder: Path, **files) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return Checkpoint("mine", folder, dict(LLAMA))


def test_names_that_may_be_published(tmp_path):
    folder = tmp_path / "home" / "model"
    for name, revision, expected in (
        ("you/model", COMMIT, "you/model"),
        ("demo", None, "demo"),
        (str(folder), None, "model"),
        (f"{folder}/../model", None, "model"),
    ):
        assert Checkpoint(name, folder, {}, revision).public_name == expected


def test_a_folder_may_be_reached_by_a_link(tmp_path, monkeypatch):
    """A checkpoint may be a link to a folder of any name."""
    made(tmp_path / "in", **{"model.safetensors": safetensors(), "deep/x.json": {}})
    (tmp_path / "link").symlink_to("in")
    monkeypatch.chdir(tmp_path / "in")
    for name in (tmp_path / "link", Path("../link"), Path(), tmp_path / "in" / ".." / "link"):
        Checkpoint("mine", name, dict(LLAMA)).check_weights()


def test_files_that_count(tmp_path):
    names = ["b.txt", "a/deep.txt", ".gitattributes", "model.safetensors", "x.gguf", "tokenizer.json"]
    left = [".git/config", ".cache/x", "a/__pycache__/x.pyc", ".hidden", "a/.hidden", ".gitignore"]
    source = made(tmp_path / "in", **dict.fromkeys([*names, *left], b"1"))
    assert [path.as_posix() for path in source.files] == sorted([*names, "config.json"], key=Path)
    assert [path.as_posix() for path in source.weight_files] == ["model.safetensors", "x.gguf"]
    assert source.size_of(Path("b.txt")) == 1
    remote = Checkpoint("x", tmp_path / "in", {}, remote_sizes={"b.txt": 7, "gone.bin": 0})
    assert [remote.size_of(Path(name)) for name in ("b.txt", "gone.bin", "a/deep.txt")] == [7, 0, 1]


def test_json_files(tmp_path):
    source = made(tmp_path / "in", **{"a.json": {"x": 1}, "b.json": [1]})
    assert source.read_json("a.json") == {"x": 1}
    assert source.read_json("none.json") is None
    with pytest.raises(CtxextError, match="is not a JSON object"):
        source.read_json("b.json")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", {"max_length": "20"}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("model.safetensors.index.json", {"weight_map": {"w": 1}}),
        ("ctxext.json", {"weights": {"w": "x"}}),
        ("config.json", {"hidden_size": 0}),
    ],
)
def test_files_with_a_known_digest_are_checked(name, content, tmp_path):
    source = made(tmp_path / "in", **{name: content, "others.json": content})
    assert source.read_json("others.json") == content
    with pytest.raises(CtxextError, match="expected"):
        source.read_json(name)


def in_cache(tmp_path, repository="models--a--b") -> tuple[Path, Path]:
    """A snapshot and its blobs, in the layout of the Hub's client."""
    blobs, snapshot = tmp_path / repository / "blobs", tmp_path / repository / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    return blobs, snapshot


def test_digests_that_the_cache_knows(tmp_path, monkeypatch):
    blobs, snapshot = in_cache(tmp_path)
    source = made(snapshot)
    for name, blob in (("large.bin", "0f" * 32), ("small.txt", "0f" * 20), ("upper.bin", "0F" * 32)):
        (blobs / blob).write_bytes(b"")
        (snapshot / name).symlink_to(blobs / blob)
    # A folder with the layout of the cache, with names that are no digests.
    assert source.known_digest(Path("large.bin")) is None
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert is_cached(blobs / "x")
    assert not is_cached(snapshot / "x")
    assert source.known_digest(Path("large.bin")) == "0f" * 32
    assert source.known_digest(Path("small.txt")) is None
    assert source.known_digest(Path("upper.bin")) is None
    (tmp_path / ("1" * 64)).write_bytes(b"")
    (snapshot / "elsewhere.bin").symlink_to(tmp_path / ("1" * 64))
    assert source.known_digest(Path("elsewhere.bin")) is None


def test_links_within_the_folder_and_its_own_cache_are_followed(tmp_path):
    blobs, snapshot = in_cache(tmp_path)
    source = made(snapshot, **{"a.txt": b"1"})
    (blobs / "x").write_bytes(b"")
    (snapshot / "b.txt").symlink_to(blobs / "x")
    (snapshot / "c.txt").symlink_to("a.txt")
    source.check_files()
    others, _ = in_cache(tmp_path, "models--c--d")
    (others / "y").write_bytes(b"")
    (snapshot / "d.txt").symlink_to(others / "y")
    with pytest.raises(CtxextError, match=r'"d\.txt" of "mine" is a link to a file outside the folder'):
        Checkpoint("mine", snapshot, {}).check_files()


@pytest.mark.parametrize("name", ["x.bin", "model.safetensors"])
def test_a_record_in_the_folder_is_a_claim_and_no_permission(name, tmp_path):
    """The ctxext.json of SOURCE must not copy any file into OUT."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"")
    source = made(tmp_path / "in", **{"ctxext.json": {"links": {name: str(secret)}}})
    (source.folder / name).symlink_to(secret)
    with pytest.raises(CtxextError, match=f'"{name}" of "mine" is a link to a file outside the folder'):
        source.check_files()


@pytest.mark.parametrize(
    ("folder", "blob"),
    [
        ("in", "blobs/x"),  # A parent named blobs in a folder above.
        ("models--a--b/in", "models--a--b/blobs/x"),  # Without a snapshot.
        ("models--a--b/snapshots/c", "blobs/x"),
        ("a/snapshots/c", "a/blobs/x"),
        ("models--a--b/snapshots/c", "models--c--d/blobs/x"),
        ("models--a--b/snapshots/c", "models--a--b/blobs/x/y"),
    ],
)
def test_what_is_called_blobs_is_not_the_cache(folder, blob, tmp_path):
    (tmp_path / blob).parent.mkdir(parents=True)
    (tmp_path / blob).write_bytes(b"")
    source = made(tmp_path / folder)
    (source.folder / "x.bin").symlink_to(tmp_path / blob)
    with pytest.raises(CtxextError, match="link to a file outside the folder"):
        source.check_files()


def test_files_that_are_none(tmp_path):
    (made(tmp_path / "a").folder / "gone").symlink_to("nowhere")
    with pytest.raises(CtxextError, match='"gone" of "mine" is a broken link'):
        Checkpoint("mine", tmp_path / "a", {}).check_files()
    os.mkfifo(made(tmp_path / "b").folder / "pipe")
    with pytest.raises(CtxextError, match='"pipe" of "mine" is not a regular file'):
        Checkpoint("mine", tmp_path / "b", {}).check_files()


INDEX = "model.safetensors.index.json"
SHARDS = {"weight_map": {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": safetensors()}, ""),
        ({"pytorch_model.bin": b"x"}, ""),
        ({"pytorch_model-00001-of-00001.bin": b"x"}, ""),
        ({name: safetensors() for name in SHARDS["weight_map"].values()} | {INDEX: SHARDS}, ""),
        ({"model-00001-of-00002.safetensors": safetensors(), INDEX: SHARDS}, "which is missing"),
        ({"pytorch_model.bin": b"x", "pytorch_model.bin.index.json": SHARDS}, "which is missing"),
        (
            {"model.safetensors": safetensors(), INDEX: {"weight_map": {"w": "../model.safetensors"}}},
            "outside the folder",
        ),
        (
            {"model.safetensors": safetensors(), INDEX: {"weight_map": {"w": "/model.safetensors"}}},
            "outside the folder",
        ),
        ({}, "no weights that transformers can load"),
        ({"adapter_model.safetensors": safetensors()}, "no weights that transformers can load"),
        ({"sub/model.safetensors": safetensors()}, "no weights that transformers can load"),
        ({"model.safetensors.old": b"x", "model.gguf": b"x"}, "no weights that transformers can load"),
        ({"model.safetensors": safetensors(size=27)}, "truncated or not a safetensors file"),
        ({"model.safetensors": safetensors(), "extra.safetensors": b"1"}, "truncated or not a safetensors file"),
    ],
)
def test_weights(files, message, tmp_path):
    source = made(tmp_path / "in", **files)
    if not message:
        source.check_weights()
        return
    with pytest.raises(CtxextError, match=message):
        source.check_weights()


def test_weights_of_files_without_weights_are_not_read(tmp_path):
    source = made(tmp_path / "in", **{"model.safetensors": safetensors()})
    (tmp_path / "in" / "notes.txt").symlink_to("/etc/hostname")
    with pytest.raises(CtxextError, match="link to a file outside the folder"):
        source.check_weights()


def test_weights_that_stayed_on_the_hub_count(tmp_path):
    source = made(tmp_path / "in", **{INDEX: SHARDS})
    sizes = dict.fromkeys(SHARDS["weight_map"].values(), 28)
    Checkpoint("x", source.folder, {}, COMMIT, sizes).check_weights()
    with pytest.raises(CtxextError, match="which is missing"):
        Checkpoint("x", source.folder, {}, COMMIT, dict([*sizes.items()][:1])).check_weights()


def test_what_is_loaded_and_counted(tmp_path):
    files = dict.fromkeys(("model.safetensors", "adapter_model.safetensors", "sub/model.safetensors"), safetensors())
    source = made(tmp_path / "in", **files)
    assert [path.as_posix() for path in source.loaded_safetensors] == ["model.safetensors"]
    source = made(tmp_path / "one", **{"model.safetensors": safetensors(), "pytorch_model.bin": b"x"})
    assert source.num_parameters == 2 * 3 + 1
    assert source.headers == TENSORS
    assert made(tmp_path / "none", **{"pytorch_model.bin": b"x"}).num_parameters is None


def tensor(dtype, *shape):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}


@pytest.mark.parametrize(
    ("described", "tensors"),
    [
        ({}, {"a.weight": tensor("F16", 64, 32)}),
        (
            {"quant_method": "gptq", "bits": 4},
            {
                "a.qweight": tensor("I32", 8, 32),
                "a.qzeros": tensor("I32", 1, 4),
                "a.scales": tensor("F16", 1, 32),
                "a.g_idx": tensor("I32", 64),
            },
        ),
        ({"quant_method": "awq", "w_bit": 4}, {"a.qweight": tensor("I32", 64, 4), "a.scales": tensor("F16", 1, 32)}),
        ({"quant_method": "gptq", "bits": 8}, {"a.qweight": tensor("I32", 16, 32)}),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {
                "a.weight": tensor("U8", 1024, 1),
                "a.weight.absmax": tensor("F32", 32),
                "a.weight.quant_state.bitsandbytes__nf4": tensor("U8", 99),
            },
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
            {
                "a.weight_packed": tensor("I32", 64, 4),
                "a.weight_scale": tensor("BF16", 64, 1),
                "a.weight_shape": tensor("I64", 2),
            },
        ),
        ({"quant_method": "mxfp4"}, {"a_blocks": tensor("U8", 64, 1, 16), "a_scales": tensor("U8", 64, 1)}),
        ({"quant_method": "fp8"}, {"a.weight": tensor("F8_E4M3", 64, 32), "a.weight_scale_inv": tensor("F32", 1, 1)}),
    ],
    ids=lambda value: value.get("quant_method", "") if isinstance(value, dict) else "",
)
def test_packed_weights_are_counted_unpacked(described, tensors, tmp_path, monkeypatch):
    """All have a matrix of 64 x 32 and an unchanged vector."""
    source = Checkpoint("x", tmp_path, {"quantization_config": described} if described else {})
    monkeypatch.setattr(Checkpoint, "headers", {**tensors, "norm.weight": tensor("F16", 7)})
    assert source.num_parameters == 64 * 32 + 7


def test_a_header_larger_than_any_is_not_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 8 + 100_000_001)
    with pytest.raises(CtxextError, match=r'"x\.safetensors" is truncated'):
        read_safetensors_header(path)


def test_places_that_hold_none(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (("file", "is a file"), ("empty", "has no config.json")):
        with pytest.raises(CtxextError, match=message):
            open_checkpoint(str(tmp_path / name))
    source = open_checkpoint(str(made(tmp_path / "in").folder), original_length=64)
    assert (source.config, source.revision, source.remote_sizes, source.original_length) == (LLAMA, None, {}, 64)


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    made(tmp_path / "in")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK | os.X_OK)
    with pytest.raises(CtxextError, match=r"in\" cannot be read"):
        open_checkpoint(str(tmp_path / "in"))


def test_a_folder_named_demo_has_priority_over_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("demo").folder.parent.name == "demo"
    made(tmp_path / "demo")
    assert open_checkpoint("demo").config == LLAMA


def test_an_installation_without_its_demo(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CtxextError, match="demo checkpoint is missing") as caught:
        open_checkpoint("demo")
    assert caught.value.hint == "Install ctxext again."


def test_sizes_that_no_model_has(tmp_path):
    folder = made(tmp_path / "in").folder
    (folder / "config.json").write_text(json.dumps({**LLAMA, "head_dim": 7}))
    with pytest.raises(CtxextError, match=r'in/config\.json": each head rotates "7" dimensions'):
        open_checkpoint(str(folder))


def test_lengths_that_are_claimed(tmp_path):
    family = family_of(LLAMA)
    source = made(
        tmp_path / "in", **{"tokenizer_config.json": {"model_max_length": 10**30}, "generation_config.json": {}}
    )
    assert claimed_lengths(source, family) == {"config.json": 128}
    assert claimed_lengths(source, family, 64) == {"config.json": 64}
    files = {"tokenizer_config.json": {"model_max_length": 512.0}, "generation_config.json": {"max_length": 20}}
    assert claimed_lengths(made(tmp_path / "in", **files), family) == {
        "config.json": 128,
        "tokenizer_config.json": 512,
        "generation_config.json": 20,
    }
    for length, claimed in ((10**12 - 1, {"tokenizer_config.json": 10**12 - 1}), (10**12, {})):
        source = made(tmp_path / "two", **{"tokenizer_config.json": {"model_max_length": length}})
        assert claimed_lengths(source, family) == {"config.json": 128, **claimed}


@pytest.mark.parametrize("size", [100, 1 << 16, 3 << 20])
def test_a_fingerprint_reads_weights_to_both_ends(tmp_path, size):
    """Only samples of large files are read; training may have changed the last tensor."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    found = set()
    for place in (None, 0, size - 1):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        weights.write_bytes(content)
        found.add(fingerprint(Checkpoint("x", tmp_path, {})))
    assert len(found) == 3
