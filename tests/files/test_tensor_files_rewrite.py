"""A rewritten safetensors file: changed tensors are new, all other bytes are identical."""

import hashlib
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import read_safetensors_header, rewrite
from ctxext.merge.tensors import list_changed_tensors, read_shapes

OLD = {"a": torch.arange(4.0), "embed": torch.arange(6.0).reshape(3, 2), "z": torch.zeros(5)}


class Add:
    """Changes that add one to each number of some tensors."""

    def __init__(self, *names, **untied) -> None:
        self.names, self.untied = frozenset(names), untied

    def compute(self, name, old):
        return old + 1


class Turned(Add):
    def compute(self, name, old):
        return old.T


@pytest.fixture
def again(tmp_path):
    """Rewrite a file of tensors and return the old and the new file."""

    def call(tensors, changes, progress=None):
        old, new, digest = tmp_path / "old", tmp_path / "new", hashlib.sha256()
        save_file(tensors, old, {"format": "pt"})
        rewrite(old, new, list_changed_tensors(changes, old), progress, digest=digest)
        assert digest.hexdigest() == hashlib.sha256(new.read_bytes()).hexdigest()
        rewrite(old, tmp_path / "by the kernel", list_changed_tensors(changes, old))
        assert (tmp_path / "by the kernel").read_bytes() == new.read_bytes()
        return old, new

    return call


def test_nothing_changes(again):
    old, new = again(OLD, Add())
    assert new.read_bytes() == old.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OLD)
def test_one_tensor_changes(name, dtype, again):
    old, new = again({key: tensor.to(dtype) for key, tensor in OLD.items()}, Add(name))
    written = load_file(new)
    for key, tensor in OLD.items():
        assert torch.equal(written[key], (tensor + (key == name)).to(dtype)), key
    assert read_safetensors_header(new) == read_safetensors_header(old)


@pytest.mark.parametrize("head", ["h" * length for length in range(1, 9)])
def test_an_untied_output_embedding_is_written_last(head, again):
    """With names of eight lengths, because the header is padded to a multiple of eight bytes."""
    seen = []
    old, new = again(OLD, Add(head, **{head: "embed"}), lambda *given: seen.append(given))
    written = load_file(new)
    assert torch.equal(written.pop(head), OLD["embed"] + 1)
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        name: tensor.tolist() for name, tensor in OLD.items()
    }
    before, after = read_safetensors_header(old), read_safetensors_header(new)
    assert after.pop(head) == {"dtype": "F32", "shape": [3, 2], "data_offsets": [60, 84]}
    assert after == before
    content = new.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert len(content[8 : 8 + length].rstrip()) > length - 8
    assert json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    assert seen[-1] == ("new", len(content), len(content))


def test_two_output_embeddings_come_one_behind_the_other(again):
    _, new = again(OLD, Add("first", "embed", first="embed", second="a"))
    written = load_file(new)
    assert torch.equal(written["first"], OLD["embed"] + 1)
    assert torch.equal(written["embed"], OLD["embed"] + 1)
    assert torch.equal(written["second"], OLD["a"])


def test_an_output_embedding_that_is_stored_keeps_its_place(again):
    old, new = again({**OLD, "head": OLD["embed"] + 5}, Add("head", head="embed"))
    assert torch.equal(load_file(new)["head"], OLD["embed"] + 6)
    assert read_safetensors_header(new) == read_safetensors_header(old)


def test_a_shard_without_the_embedding_gets_none(again):
    old, new = again({"a": OLD["a"]}, Add("head", head="embed"))
    assert new.read_bytes() == old.read_bytes()


def test_a_tensor_of_another_shape_is_refused(again):
    with pytest.raises(CtxextError, match=r'"embed" was trained as \(2, 3\) but is stored as \(3, 2\)'):
        again(OLD, Turned("embed"))


def test_whole_numbers_are_refused(again):
    with pytest.raises(CtxextError, match='Cannot merge into "a": it is stored as I64'):
        again({"a": torch.arange(4)}, Add("a"))


@pytest.mark.parametrize("digest", [None, hashlib.sha256()])
@pytest.mark.parametrize("changes", [Add(), Add("w")])
def test_a_file_that_is_cut_off_meanwhile_is_one_line(changes, digest, tmp_path):
    """Truncated by the first progress callback."""
    old = tmp_path / "old"
    save_file({"w": torch.zeros(100_000)}, old)
    tensors = list_changed_tensors(changes, old)
    with pytest.raises(CtxextError, match='old" was truncated while it was read'):
        rewrite(old, tmp_path / "new", tensors, lambda *_: os.truncate(old, 1000), digest=digest)


def test_names_and_shapes_that_are_stored(tmp_path):
    save_file(OLD, tmp_path / "model.safetensors")
    assert read_shapes(Checkpoint("mine", tmp_path, {})) == {"a": (4,), "embed": (3, 2), "z": (5,)}
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CtxextError, match='"mine" has no safetensors weights to merge into') as caught:
        read_shapes(Checkpoint("mine", tmp_path, {}))
    assert "--no-merge" in caught.value.hint
