"""The name of a GGUF file's quantization: that of its file type, not of its largest tensor."""

import json

import pytest

from ctxext.gguf.convert import convert_gguf
from ctxext.gguf.model import describe, open_gguf, quantization
from ctxext.gguf.verify import verify_gguf
from ctxext.methods import Yarn
from ctxext.recipes.recipe import Recipe
from gguf_files import TENSORS, gguf_bytes, keys_of


def file_of(folder, kind):
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes({**keys_of(), **({} if kind is None else {"general.file_type": kind})}, TENSORS))
    return path


@pytest.mark.parametrize(
    ("kind", "name"),
    [(0, "F32"), (7, "Q8_0"), (15, "Q4_K_M"), (18, "Q6_K"), (32, "BF16"), (39, "NVFP4")],
)
def test_file_type_names_the_quantization(tmp_path, kind, name):
    model = open_gguf(file_of(tmp_path, kind))
    assert quantization(model) == name
    assert f", {name} (most bytes in I8), 512 tokens" in describe(model)


@pytest.mark.parametrize("kind", [None, 4, 1024, "Q4_K_M", 15.0, True])
def test_without_a_known_file_type_it_is_the_tensors(tmp_path, kind):
    """4 is the number of a removed type, and 1024 means that the type is not in the file."""
    model = open_gguf(file_of(tmp_path, kind))
    assert quantization(model) == "I8"
    assert ", I8, 512 tokens" in describe(model)


def test_inspect_and_verify_show_it(tmp_path, run):
    path = file_of(tmp_path, 15)
    assert json.loads(run("inspect", path, "--json").stdout)["quantization"] == "Q4_K_M"
    out = convert_gguf(path, tmp_path / "out.gguf", Recipe(Yarn(factor=4))).out
    assert verify_gguf(out, path)[-1].detail == "3 tensors (Q4_K_M) identical to the source"
