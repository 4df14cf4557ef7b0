"""Checkpoints read by every release of transformers that people have: equal logits, or a caution of `convert`.

Tiny checkpoints are converted once. Each release loads them in a process without ctxext. The logits of one call and of
a padded batch, decoded from a cache, must equal those of the installed release, unless `convert` warns that the release
does not support the schedule. CI reads a sample; `make versions` reads all.
"""

import json

import pytest
from packaging.version import Version
from safetensors.torch import load_file

import matrix
from ctxext.converters.plan import first_release_of_5, is_new_only
from ctxext.recipes.model_config import model_config
from releases import RELEASES, read, require_release

pytestmark = pytest.mark.usefixtures("real_processes")
TOLERANCE = 1e-5  # Of the largest logit.
SAMPLE = {
    "families": ("llama", "gemma3", "qwen3_moe", "modernbert", "bloom"),
    "methods": ("yarn", "longrope", "mspoe", "self-extend", "ntk-alibi"),
}


def written(place, **chosen):
    """Return the folders of converted checkpoints by name, and the folder of the installed release's logits."""
    folders = matrix.build(place / "checkpoints", **chosen)
    assert read(folders, place / "newest") == {}
    return folders, place / "newest"


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return written(tmp_path_factory.mktemp("sample"), **SAMPLE)


@pytest.fixture(scope="module")
def every_checkpoint(tmp_path_factory):
    return written(tmp_path_factory.mktemp("all"))


def is_refused(folder, release):
    """Return whether `convert` warns that a release does not support the schedule of a checkpoint."""
    model = model_config(json.loads((folder / "config.json").read_text()))
    if release.startswith("4."):
        return is_new_only(model)
    first = first_release_of_5(model)
    return bool(first) and Version(release) < Version(first)


def differences(release, folders, newest, out):
    """Return the error or the difference of each checkpoint that a release does not read as the installed one does."""
    found = read(folders, out, release)
    for name in folders.keys() - found.keys():
        expected, actual = load_file(newest / f"{name}.safetensors"), load_file(out / f"{name}.safetensors")
        assert actual.keys() == expected.keys()
        for kind, logits in expected.items():
            difference = float((actual[kind] - logits).abs().max() / logits.abs().max())
            if not difference <= TOLERANCE:
                found[name] = f"{kind}: logits differ by {difference:.1e}"
    return found


def check(release, folders, newest, out):
    require_release(release)
    found = differences(release, folders, newest, out)
    refused = {name for name, folder in folders.items() if is_refused(folder, release)}
    print(f"transformers {release}: {len(folders) - len(found)} equal, {len(refused)} refused")  # noqa: T201
    assert {name: words for name, words in found.items() if name not in refused} == {}
    assert refused <= found.keys(), "convert warns of these, but they are read as by the installed release"


@pytest.mark.thorough
@pytest.mark.parametrize("release", RELEASES)
def test_a_sample_is_read_alike(release, sample, tmp_path):
    check(release, *sample, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_every_checkpoint_is_read_alike(release, every_checkpoint, tmp_path):
    check(release, *every_checkpoint, tmp_path / "out")
