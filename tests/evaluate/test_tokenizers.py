"""A tokenizer's files are a stranger's: where its library fails or panics, there is one line, and no backtrace."""

import json
import os
import shutil

import pytest

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.app import main
from ctxext.data.encoding import tokenized
from ctxext.data.tokenizer import open_tokenizer
from ctxext.errors import CtxextError


class PanicException(BaseException):
    """What a library in Rust raises, which is no Exception."""


def changed(folder, edit):
    """The demo's tokenizer with an edited tokenizer.json."""
    shutil.copytree(open_checkpoint("demo").folder, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    edit(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def unknown_token(content):
    content["post_processor"]["single"][0] = {"SpecialToken": {"id": "<nowhere>", "type_id": 0}}


def test_an_unknown_token_in_a_post_processor(tmp_path, capfd):
    folder = changed(tmp_path / "model", unknown_token)
    with pytest.raises(CtxextError, match="The tokenizer fails: no entry found for key") as caught:
        open_tokenizer(folder)
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


def test_the_same_from_a_command(tmp_path, capfd, monkeypatch):
    folder = changed(tmp_path / "model", unknown_token)
    monkeypatch.setattr("sys.argv", ["ctxext", "eval", str(folder), "--task", "needle", "--lengths", "256", "-q"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith("error: The tokenizer fails: no entry found for key")
    assert said.count("\n") == 2


def test_a_panic_later_on_and_what_is_no_panic():
    def panic(*_given, **_more):
        raise PanicException("out of range\nand so on")

    def stop(*_given, **_more):
        raise KeyboardInterrupt

    with pytest.raises(CtxextError, match=r"^The tokenizer fails: out of range$"):
        tokenized(panic, "x")
    with pytest.raises(KeyboardInterrupt):
        tokenized(stop, "x")


def test_errors_of_the_process_are_heard_again(tmp_path, capfd):
    open_tokenizer(open_checkpoint("demo").folder)
    with pytest.raises(CtxextError):
        open_tokenizer(changed(tmp_path / "model", unknown_token))
    os.write(2, b"heard")
    assert capfd.readouterr().err == "heard"
