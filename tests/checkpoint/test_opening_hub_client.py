"""A Hub id, with a stub of the Hub's client: its calls, and the message for each of its errors.

`checkpoint/test_opening_hub.py` runs the client itself against a server.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

from ctxext.checkpoint.opening import WEIGHT_SUFFIXES, open_checkpoint
from ctxext.errors import CtxextError

COMMIT = "c" * 40
CONFIG = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
SIZES = {"README.md": 10, "model.safetensors": 1234, "empty.bin": 0, "untold.gguf": None}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """The calls of the client, one dictionary each."""
    calls, snapshot = [], tmp_path / COMMIT
    snapshot.mkdir()
    (snapshot / "config.json").write_text(json.dumps(CONFIG))

    def download(source, **options):
        calls.append({"source": source, **options})
        return str(snapshot)

    class Api:
        def __init__(self, token):
            self.token = token

        def model_info(self, source, *, revision, files_metadata):
            calls.append({"source": source, "revision": revision, "token": self.token})
            files = [SimpleNamespace(rfilename=name, size=files_metadata and size) for name, size in SIZES.items()]
            return SimpleNamespace(siblings=files if source == "you/model" else None)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    enable_progress_bars()
    yield calls
    enable_progress_bars()


def test_a_checkpoint_comes_with_its_weights(asked):
    checkpoint = open_checkpoint("you/model", revision="main", token="t")
    assert asked == [{"source": "you/model", "revision": "main", "token": "t", "ignore_patterns": []}]
    assert (checkpoint.name, checkpoint.revision, checkpoint.remote_sizes, checkpoint.config) == (
        "you/model",
        COMMIT,
        {},
        CONFIG,
    )
    assert not are_progress_bars_disabled()


@pytest.mark.parametrize("error", [errors.OfflineModeIsEnabled("x"), OSError("x"), ConnectionError("x")])
def test_a_full_cache_is_enough_without_the_hub(asked, monkeypatch, error):
    def offline(*_args, **_options):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", offline)
    with pytest.raises(CtxextError, match="the Hub cannot be reached"):
        open_checkpoint("you/model", weights=False)
    folder = Path(huggingface_hub.snapshot_download("you/model"))
    (folder / "model.safetensors").write_bytes(b"1234")
    checkpoint = open_checkpoint("you/model", weights=False)
    assert checkpoint.remote_sizes == {}
    assert checkpoint.size_of(Path("model.safetensors")) == 4


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_download_without_weights_has_their_sizes(asked, revision):
    checkpoint = open_checkpoint("you/model", revision=revision, token="t", weights=False)
    told = {"source": "you/model", "revision": revision, "token": "t"}
    assert asked == [{**told, "ignore_patterns": [f"*{suffix}" for suffix in WEIGHT_SUFFIXES]}, told]
    assert checkpoint.remote_sizes == {"model.safetensors": 1234, "empty.bin": 0, "untold.gguf": 0}
    assert [checkpoint.size_of(Path(name)) for name in checkpoint.remote_sizes] == [1234, 0, 0]
    assert are_progress_bars_disabled()  # Small files have none.
    assert open_checkpoint("you/other", weights=False).remote_sizes == {}


def error_of(kind, *words):
    """Create an error of the client without a server's response."""
    return kind.__new__(kind, *words)


UNREACHABLE = '"you/model" is neither a folder nor in the Hub\'s cache, and the Hub cannot be reached.'
UNKNOWN = 'There is no folder "you/model", and no such repository on the Hub.'


@pytest.mark.parametrize(
    ("error", "message", "hint"),
    [
        (error_of(errors.GatedRepoError), '"you/model" is gated on the Hub.', "Accept its terms on the Hub"),
        (error_of(errors.RevisionNotFoundError), '"you/model" has no revision "v2".', ""),
        (error_of(errors.RepositoryNotFoundError), UNKNOWN, "Check the spelling"),
        (errors.HFValidationError("you"), UNKNOWN, "Check the spelling"),
        (error_of(errors.LocalEntryNotFoundError), UNREACHABLE, "Check the name and the network"),
        (errors.OfflineModeIsEnabled("off"), UNREACHABLE, "Check the name and the network"),
        (error_of(errors.HTTPError), UNREACHABLE, "Check the name and the network"),
        (OSError("no route"), UNREACHABLE, "Check the name and the network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_client(error, message, hint, asked, monkeypatch):
    def download(source, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CtxextError) as caught:
        open_checkpoint("you/model", revision="v2", token="t")
    assert caught.value.message == message
    assert (caught.value.hint or "").startswith(hint)


@pytest.mark.parametrize("name", ["no/such/folder", "a model", "models/", "/no/where"])
def test_an_invalid_hub_id_is_not_requested(name, asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CtxextError) as caught:
        open_checkpoint(name)
    assert caught.value.message == f'There is no folder "{name}".'
    assert caught.value.hint == "Specify a folder, a Hub id (user/name) or demo."
    assert asked == []
