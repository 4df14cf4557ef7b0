"""Hub tokens: read in one place, and shown nowhere, whatever fails."""

import os
import subprocess
import sys

import pytest

from ctxext.errors import CtxextError
from ctxext.tokens import hub_token, redacted
from hub_server import hub

SECRET = "hf_TopSecretTopSecretTopSecret"
AWKWARD = [f"{SECRET}\r\n", f"{SECRET}\n", f" {SECRET}", f"{SECRET}\x07", f"hf_\n{SECRET[3:]}", f"{SECRET}é"]
COMMANDS = (
    ("inspect", "me/tiny"),
    ("convert", "me/tiny", "out", "-m", "pi", "--factor", "2"),
    ("verify", "me/tiny"),
    ("eval", "me/tiny", "--task", "short"),
    ("search", "me/tiny", "--target-length", "256"),
    ("finetune", "me/tiny", "out", "--data", "nothing.txt"),
    ("merge", "me/tiny", "adapter", "out"),
)


@pytest.mark.parametrize("given", [SECRET, f"{SECRET}\r\n", f"\n {SECRET}\t"])
def test_line_ends_around_a_token_are_taken_away(given):
    assert hub_token(given) == SECRET


@pytest.mark.parametrize("given", AWKWARD[3:])
def test_what_no_token_has_is_refused_without_showing_it(given):
    with pytest.raises(CtxextError, match="characters that no token has") as caught:
        hub_token(given)
    assert SECRET[3:] not in caught.value.message + caught.value.hint


def test_tokens_are_taken_out_of_text():
    hub_token("not-of-the-usual-form")
    text = redacted(f"Illegal header value b'Bearer {SECRET}\\r' and {SECRET}, not-of-the-usual-form")
    assert SECRET not in text
    assert "usual" not in text
    assert text.startswith("Illegal header value b'Bearer …")


@pytest.mark.parametrize("kind", ["hf_", "api_org_", "Bearer ", "Bearer\t"])
def test_every_kind_of_token_is_known_by_its_form(kind):
    assert redacted(f"with {kind}SecretSecret in it") == f"with {kind}… in it"


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_no_command_shows_a_token(words, our_processes, llama_source, tmp_path):
    """The Hub refuses, is not there, or the token cannot be sent at all: nothing that is said or written holds it."""
    with hub({"me/other": llama_source}) as server:
        for place, given in ((server.url, AWKWARD[0]), (server.url, AWKWARD[3]), ("http://127.0.0.1:9", AWKWARD[1])):
            environment = {**os.environ, "HF_ENDPOINT": place, "HF_HOME": str(tmp_path / "cache")}
            environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
            command = [sys.executable, "-m", "ctxext", *words, "--token", given]
            result = our_processes.run(
                command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
            )
            said = result.stdout + result.stderr
            assert (result.returncode, "Traceback" in said) == (1, False), said
            assert SECRET[3:] not in said
    held = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET[3:].encode() in path.read_bytes()]
    assert held == []


def test_a_traceback_of_ours_holds_no_token():
    script = (
        "from ctxext.cli import app\ndef fail(): raise ValueError('Bearer " + SECRET + "')\napp.app = fail\napp.main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ValueError: Bearer …" in result.stderr
    assert SECRET[3:] not in result.stderr


def test_a_token_from_a_windows_file_is_sent_as_it_is_meant(llama_source, tmp_path):
    with hub({"me/tiny": llama_source}) as server:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "cache")}
        environment |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "ctxext", "inspect", "me/tiny", "--token", f"{SECRET}\r\n"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
