"""Hub tokens: read in one place, and never shown, after any error."""

import html
import io
import json
import os
import re
import sys
import time
from base64 import b64encode, urlsafe_b64encode
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from ctxext import redaction
from ctxext.checkpoint.opening import hub_token
from ctxext.cli.app import main
from ctxext.errors import CtxextError
from ctxext.redaction import RedactedStream, keep_styles, redact, remember, shorten
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
def test_line_ends_around_a_token_are_removed(given):
    assert hub_token(given) == SECRET


@pytest.mark.parametrize("given", AWKWARD[3:])
def test_what_no_token_has_is_refused_without_showing_it(given):
    with pytest.raises(CtxextError, match="invalid characters") as caught:
        hub_token(given)
    assert SECRET[3:] not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    "given", ["Unlike-a-token\x07Unlike-a-token", "Unlike-a-token\nAnother-piece", "Unlike-é-token"]
)
def test_a_token_that_is_refused_is_hidden_from_then_on(given, monkeypatch):
    """Whatever fails next may show it, whole or the piece before its line end."""
    monkeypatch.setattr("ctxext.redaction._secrets", set())
    with pytest.raises(CtxextError, match="contains invalid characters"):
        hub_token(given)
    for piece in given.split():
        assert redact(f"cannot send {piece}") == "cannot send …"


def test_names_that_hold_hf_stay():
    for name in ("requirements-convert_hf_to_gguf.txt", "llama-server -m my_hf_model.gguf"):
        assert redact(name) == name
    other = f"hf_{'An0ther' * 5}"
    assert redact(f"my_{other} and \\n{other}") == "my_hf_… and \\nhf_…"


def test_tokens_are_removed_from_text():
    hub_token("not-of-the-usual-form")
    text = redact(f"Illegal header value b'Bearer {SECRET}\\r' and {SECRET}, not-of-the-usual-form")
    assert SECRET not in text
    assert "usual" not in text
    assert text.startswith("Illegal header value b'Bearer …")


@pytest.mark.parametrize("kind", ["hf_", "api_org_", "Bearer ", "Bearer\t"])
def test_every_kind_of_token_is_known_by_its_form(kind):
    assert redact(f"with {kind}SecretSecret in it") == f"with {kind}… in it"


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.thorough
def test_no_command_shows_a_token(words, our_processes, llama_source, tmp_path):
    """The Hub refuses it, is unreachable, or the token cannot be sent: no output or file contains it."""
    with hub({"me/other": llama_source}) as server:
        for place, given in ((server.url, AWKWARD[0]), (server.url, AWKWARD[3]), ("http://127.0.0.1:9", AWKWARD[1])):
            environment = {**os.environ, **server.settings(tmp_path / "cache"), "HF_ENDPOINT": place}
            command = [sys.executable, "-m", "ctxext", *words, "--token", given]
            result = our_processes.run(
                command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
            )
            said = result.stdout + result.stderr
            assert (result.returncode, "Traceback" in said) == (1, False), said
            assert SECRET[3:] not in said
    held = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET[3:].encode() in path.read_bytes()]
    assert held == []


def test_a_traceback_of_ours_holds_no_token(our_processes):
    script = (
        "from ctxext.cli import app\ndef fail(): raise ValueError('Bearer " + SECRET + "')\napp.app = fail\napp.main()"
    )
    result = our_processes.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ValueError: Bearer …" in result.stderr
    assert SECRET[3:] not in result.stderr


@pytest.mark.thorough
def test_a_token_from_a_windows_file_is_sent_without_extra_characters(llama_source, tmp_path, our_processes):
    with hub({"me/tiny": llama_source}) as server:
        environment = {**os.environ, **server.settings(tmp_path / "cache")}
        command = [sys.executable, "-m", "ctxext", "inspect", "me/tiny", "--token", f"{SECRET}\r\n"]
        result = our_processes.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr


PASSWORD = "TopSecretPassword"
URLS = (
    f"postgresql://me:{PASSWORD}@host/db",
    f"postgresql://me:{PASSWORD}/x@y@host:5432/db",
    f"mysql+pymysql://host/db?user=me&password={PASSWORD}&ssl=1",
    f"https://host/x?access_token={PASSWORD}",
    f"--storage=postgresql://host/db?sslpassword={PASSWORD}",
    f"connection failed: host=h password={PASSWORD} user=me",
    f"https://host/x?api_key={PASSWORD}",
    f"postgresql://host:{PASSWORD}",
    f"postgresql://host:{PASSWORD}/db",
    f"postgresql://me:me@host:{PASSWORD}/db",
    f"postgresql:/me:{PASSWORD}@host/db",
    f"postgresql:me:{PASSWORD}@host/db",
    f"//me:{PASSWORD}@host/db",
    f"me:{PASSWORD}@host/db",
    f"hf://me:{PASSWORD}@host/x.jsonl",
    f"s3://me:{PASSWORD}@host/x.jsonl",
    f'{{"host": "host", "password": "{PASSWORD}"}}',
    f"{{'host': 'host', 'db-password': '{PASSWORD}'}}",
    f'host {{"m": "{{\\"api_key\\": \\"{PASSWORD}\\"}}"}}',
    f'{{"hf_token":"{PASSWORD}", "host": 1}}',
    f"host=h password = '{PASSWORD} and {PASSWORD}'",
    f"host, passwd: {PASSWORD}",
    f"host, api_key: Bearer {PASSWORD}",
    f"host, x-api-key: {PASSWORD}",
    f"host, Authorization: Basic {PASSWORD}",
    f'host {{"authorization": "Basic {PASSWORD}"}}',
    f"host sk-proj-{PASSWORD}",
    f"host ghp_{PASSWORD}",
)


@pytest.mark.parametrize("text", URLS)
def test_passwords_of_urls_are_removed(text):
    assert PASSWORD not in redact(text)
    assert "host" in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://host:8000/path",
        "file:///C:/x",
        "at 12:30 by me@host",
        "http://[::1]:80/x@y",
        "https://host/x@y",
        "a://b:80, c",
        "eos_token=<s>",
        "num_tokens=7",
        "a://b",
        "x@y",
        "C:\\x",
        "token: a list",
        '{"tokens": "x", "eos_token": "</s>", "api_key": null, "keys": 5, "key": "a"}',
        "pip install password-manager",
        "a task-sk-1 and gh_x",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_streams_write_no_secret():
    stream = io.StringIO()
    filtered = RedactedStream(stream)
    print("with Bearer abcdefgh", file=filtered)
    filtered.writelines([f"postgresql://me:{PASSWORD}@host", "\n"])
    assert stream.getvalue() == filtered.getvalue() == "with Bearer …\npostgresql://me:…@host\n"


def test_colours_beside_a_secret_stay(no_memory):
    stream = io.StringIO()
    keep_styles(RedactedStream(stream)).write(f"\x1b[2K\x1b[36m--password={PASSWORD}\x1b[0m {SECRET}\x1b[0m")
    assert stream.getvalue() == "\x1b[2K\x1b[36m--password=…\x1b[0m hf_…\x1b[0m"


def test_an_error_holds_no_secret_in_python_either(no_memory):
    error = CtxextError(f'"{URLS[0]}" is a URL.', hint=f"Leave {SECRET} out.")
    assert str(error) == error.message == '"postgresql://me:…@host/db" is a URL.'
    assert error.hint == "Leave hf_… out."


def test_a_warning_of_a_library_holds_no_token(our_processes):
    script = f"""
import logging, warnings
from ctxext.cli import app
def say():
    warnings.warn("Bearer {SECRET}")
    logging.getLogger("some").error("Bearer {SECRET}")
    from tqdm import tqdm
    list(tqdm([1], desc="Bearer {SECRET}"))
app.app = say
app.main()
"""
    result = our_processes.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.stderr.count("Bearer …") >= 3
    assert SECRET[3:] not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "me/tiny", SECRET),
        (SECRET,),
        (f"api_org_{SECRET[3:]}",),
        ("inspect", f"--{SECRET}"),
        ("convert", "demo", "--factor", SECRET),
        ("inspect", "demo", f"--{SECRET}=x"),
        ("inspect", "demo", "--original-length", SECRET),
        ("methods", SECRET),
        ("inspect", "--token", PASSWORD, "demo", PASSWORD),
        ("methods", f"--token={PASSWORD}", PASSWORD),
        ("inspect", URLS[0]),
        ("push", "demo", URLS[2]),
        ("search", "demo", "best.yaml", "--target-length", "2k", "--trials", "1", "--storage", URLS[0]),
        ("search", "demo", "best.yaml", "--target-length", "2k", "--trials", "1", "--storage", URLS[2]),
    ],
)
def test_no_secret_is_shown_at_any_position(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ctxext", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = "".join(capfd.readouterr())
    assert stopped.value.code in (1, 2)
    assert said.startswith("error: ")
    assert said.count("\n") <= 2
    assert SECRET[3:] not in said
    assert PASSWORD not in said


@pytest.fixture
def no_memory(monkeypatch):
    """Nothing is known of tokens of other tests."""
    monkeypatch.setattr(redaction, "_secrets", set())


@pytest.mark.parametrize(
    ("given", "stored", "hidden", "taken"),
    [
        ("given-token", "stored-token", False, "given-token"),
        (None, "stored-token", False, "stored-token"),
        (" \n", "stored-token\n", False, "stored-token"),
        (None, "stored-token", True, None),
        ("given-token", "stored-token", True, "given-token"),
        (None, None, False, None),
    ],
)
def test_the_order_of_token_sources(given, stored, hidden, taken, monkeypatch, no_memory):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: stored)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", hidden)
    assert hub_token(given) == taken
    for token in ("given-token", "stored-token"):
        assert (token not in redact(f"a {token} b")) == (token == taken), "only what is used is remembered"


def test_a_token_that_is_refused_is_remembered_in_its_pieces(no_memory):
    with pytest.raises(CtxextError, match="invalid characters"):
        hub_token("first-piece second-piece é")
    assert redact("x first-piece y second-piece z é") == "x … y … z é"


def test_the_longest_secret_is_removed_first_and_short_words_stay(no_memory):
    redaction.remember("12345678", "12345678-and-more", "1234567", None, "")
    assert redact("12345678-and-more, 12345678, 1234567") == "…, …, 1234567"


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["ctxext", "--token", " spaced-token "], ["spaced-token"]),
        (["ctxext", "--token= spaced-token\r\n"], ["spaced-token"]),
        (["--token=one-token=x", "inspect"], ["one-token=x"]),
        (["--token", "first-token", "--token", "second-token"], ["first-token", "second-token"]),
        (["inspect", "--token"], []),
        (["--tokens", "not-a-token", "--data", "text-file"], []),
    ],
)
def test_tokens_of_a_command_line_are_removed_at_any_position(words, hidden, no_memory):
    redaction.remember_arguments(words)
    assert redaction._secrets == set(hidden)


KEY = "correct/horse battery+st\u00e4ple\"'\\&<"


@pytest.mark.parametrize(
    "spell",
    [
        str,
        repr,
        json.dumps,
        lambda key: json.dumps(key, ensure_ascii=False),
        quote,
        lambda key: quote(key, safe=""),
        lambda key: quote(key, safe="").lower(),
        quote_plus,
        html.escape,
        lambda key: repr(key.encode()),
        *(lambda key, user=user: b64encode(f"{user}:{key}".encode()).decode() for user in ("", "a", "ab")),
        lambda key: urlsafe_b64encode(f"me:{key}".encode()).decode(),
    ],
)
def test_a_secret_is_removed_in_every_notation(spell, no_memory):
    remember(KEY)
    text = f"the server returned 401: {spell(KEY)} is wrong"
    hidden = redact(text)
    assert "…" in hidden
    pieces = {text[at : at + 12] for at in range(len("the server returned 401: "), len(text) - len(" is wrong") - 12)}
    assert not [piece for piece in pieces if piece in hidden]


def test_a_secret_with_control_characters_is_removed_in_pieces(no_memory):
    remember("first-piece\nsecond-piece\x07third-piece\tfourth")
    for text in (
        "x first-piece",
        "second-piece\\x07third-piece",
        "b'first-piece\\nsecond-piece'",
        "third-piece fourth",
    ):
        assert "piece" not in redact(text)


@pytest.mark.parametrize("key", ["a", "ab", "e ", "abc", "none", "EMPTY", "12345", ".", "\n", "x1", "a1b"])
def test_short_keys_leave_messages_whole(key, no_memory):
    remember(key)
    message = '"a" is none of 12345 tables, x1 and EMPTY a1b: x.\n'
    assert redact(message) == message


def test_short_passwords_are_hidden_as_words(no_memory):
    remember("hunter2")
    assert redact("wrong: hunter2, not hunter22 or ahunter2") == "wrong: …, not hunter22 or ahunter2"


@pytest.mark.parametrize(
    "word",
    [
        f"https://me:{PASSWORD}@host/v1",
        f"--server=https://me:{PASSWORD}@host/v1",
        f"https://me:Top%53ecret{PASSWORD[9:]}@host",
        f'{{"password": "{PASSWORD}"}}',
        f"host=h password={PASSWORD}",
        f"--engine-args={{'hf_token': '{PASSWORD}'}}",
    ],
)
def test_passwords_of_a_command_line_are_hidden_from_then_on(word, no_memory):
    redaction.remember_arguments(["ctxext", word])
    assert PASSWORD not in redact(f"the driver knows no {PASSWORD}")


def test_secrets_of_the_environment_are_hidden(no_memory):
    names = ("HF_TOKEN", "CTXEXT_API_KEY", "PGPASSWORD", "MY_DB_PASSWORD", "token", "AWS_SECRET_ACCESS_KEY")
    redaction.remember_environment({name: f"{name}-{PASSWORD}" for name in names} | {"MAX_TOKENS": "100000000"})
    for name in names:
        assert redact(f"x {name}-{PASSWORD}") == "x …"
    assert redact("100000000 of 8") == "100000000 of 8"


@pytest.mark.parametrize("longest", range(20, 75))
def test_a_cut_shows_no_beginning_of_a_secret(longest, no_memory):
    remember("key-of-the-user")
    text = f"a key-of-the-user b postgresql://me:{PASSWORD}@host c"
    shown = shorten(text, longest)
    assert len(shown) <= longest + 1
    assert not [size for size in range(4, 16) if "key-of-the-user"[:size] in shown or PASSWORD[:size] in shown]


def test_messages_are_shortened_after_secrets_are_removed():
    """Only `shorten` cuts text of others; the slices here are of numbers, names and samples of ours."""
    import ctxext

    package = Path(ctxext.__file__).parent
    cuts = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\[:(\d{2,}|_[A-Z]*(LONG|SHORT|CHAR)[A-Z]*)\]", line)
    }
    assert cuts <= OTHER_CUTS


OTHER_CUTS = {
    "report/tables.py",  # A digest.
    "server/client.py",  # Redacted before.
    "tasks/ruler.py",  # Words of a task.
    "files/output_directory.py",  # The names of a lock and of a host.
    "publish/results.py",  # A digest.
    "redaction.py",
}

SHAPES = (
    *("a", "x:/ ", "a:", "a@", "a:b@", "://", "x://", "hf_", "password", "password=", '"', "\\", '"password": "\\'),
    *("Bearer ", " ", "=", "\x1b[", ":…@", "-", "a b :@ ", "token", "token=", "aa:/b:1 ", "'a':", "authorization:"),
    *('password:"\\', "sk-", "gh", "//", "@", "…", "\ud800", "é", "a.b-c+d", "[a:", "(a:", ":", "\n", "\x07"),
)


@pytest.mark.parametrize("size", [150_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_the_time_is_linear_in_the_text(size, no_memory):
    """A word of 40,000 characters took 18 seconds, a megabyte hours."""
    remember(KEY, "hunter2")
    for shape in SHAPES:
        for begin, end in (("", ""), ("x:/ ", ":@="), ("hf_ Bearer password: ", "@")):
            text = begin + shape * (size // len(shape)) + end
            began = time.process_time()
            shorten(text, 100)
            assert time.process_time() - began < 10 + size / 100_000, (shape, begin)


def test_a_long_word_of_a_configuration_costs_no_time(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x:/ " + "a" * 1_000_000}))
    began = time.process_time()
    message = run("inspect", tmp_path).exception.message
    assert time.process_time() - began < 10
    assert message.startswith('Unknown model type "x:/ a')
