"""Verdicts on servers that read a checkpoint rightly or with one of the usual faults, over a server on loopback."""

import copy
import dataclasses
import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctxext.api import Recipe
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.convert import convert
from ctxext.data.encoding import Encoder
from ctxext.errors import CtxextError
from ctxext.methods import DynamicNtk, Ntk, NtkByParts, PositionInterpolation, SelfExtend, Yarn
from ctxext.recipes.model_config import model_config
from ctxext.served.check import check_server
from ctxext.served.probes import TOKENS, Probe, probes_of
from ctxext.served.readings import (
    CONVERTED,
    CUT,
    DEFAULT_TEMPERATURE,
    LINEAR,
    NO_TEMPERATURE,
    NO_THETA,
    UNMODIFIED,
    readings_of,
)
from ctxext.served.verdict import FAULT, SERVED, UNDECIDED, find_cut
from ctxext.server.client import Server
from openai_server import Served, running

TEMPLATE = "<|user|>{{ messages[0]['content'] }}<|assistant|>"


def copy_demo(place, theta):
    """Copy the demo with another base."""
    place.mkdir()
    for file in open_checkpoint("demo").folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    config = json.loads((place / "config.json").read_text())
    config["rope_theta"] = theta
    if isinstance(config.get("rope_parameters"), dict):
        config["rope_parameters"]["rope_theta"] = theta
    (place / "config.json").write_text(json.dumps(config))
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo with yarn ×2 and a base that engines do not assume."""
    out = tmp_path_factory.mktemp("served") / "out"
    source = copy_demo(tmp_path_factory.mktemp("sources") / "demo", 20_000.0)
    convert(str(source), out, Recipe([Yarn(factor=2)]), check=False)
    return out


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """Build the server of a reading."""
    checkpoint, models = open_checkpoint(str(folder)), {}
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def build(reading=CONVERTED, **options):
        if reading not in models:
            place = tmp_path_factory.mktemp("reading")
            (place / "config.json").write_text(json.dumps(readings_of(checkpoint)[reading]))
            (place / "model.safetensors").symlink_to((folder / "model.safetensors").resolve())
            models[reading] = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        return Served(models[reading], tokenizer, **options)

    return build


@pytest.fixture
def check(folder):
    """Check a server, and return the report."""

    def call(server, **options):
        with running(server) as url:
            return check_server(open_checkpoint(str(folder)), Server(url, timeout=60), **options)

    return call


def test_the_checkpoint_as_converted(served, check):
    stages = []
    report = check(served(), progress=lambda *stage: stages.append(stage))
    assert (report.status, report.verdict, report.fix) == (SERVED, "It serves the checkpoint as converted.", "")
    assert (report.server, report.model, report.basis, report.notes) == ("vLLM 0.0", "served", "log-probabilities", ())
    assert [probe["place"] for probe in report.probes] == ["inside", "just beyond", "near the end"]
    assert [probe["read"] for probe in report.probes] == [probe["tokens"] for probe in report.probes]
    assert all(probe["differences"][CONVERTED] < 1e-4 for probe in report.probes)
    assert all(
        value > 0.1 for probe in report.probes for name, value in probe["differences"].items() if name != CONVERTED
    )
    assert stages[0][0].startswith("sending 2")
    assert stages[-1] == ("done", 1, 1)


@pytest.mark.parametrize("reading", [UNMODIFIED, LINEAR, NO_THETA, NO_TEMPERATURE])
@pytest.mark.thorough
def test_a_wrong_reading(served, check, reading):
    report = check(served(reading))
    assert (report.status, report.verdict) == (FAULT, f"It serves {reading}.")
    assert "--hf-overrides" in report.fix
    assert "20000" in report.fix


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.thorough
def test_prompts_that_are_cut(served, check, counts):
    report = check(served(length=512, cuts=True, counts=counts))
    assert report.status == FAULT
    kept = 512 - TOKENS
    assert report.verdict == f"It silently cuts prompts to their last {kept} tokens. It serves {CONVERTED}."
    assert report.fix == "Start it with --max-model-len 1024."


@pytest.mark.parametrize("order", [1, -1])
def test_a_reading_that_is_not_finite_does_not_hide_a_cut_prompt(order):
    """Its mean error compares with no other."""
    errors = {UNMODIFIED: [[math.nan], [1.0]], CONVERTED: [[1.0], [2.0]], f"{CUT} 512": [[0.0], [0.01]]}
    assert find_cut(Probe("near the end", [], "", errors=dict(list(errors.items())[::order]))) == 512


@pytest.mark.thorough
def test_prompts_that_are_refused(served, check):
    report = check(served(length=512))
    assert report.verdict == f"It refuses prompts of more than 512 tokens. It serves {CONVERTED}."
    assert (report.status, report.fix) == (FAULT, "Start it with --max-model-len 1024.")
    assert [probe["refused"] for probe in report.probes] == [False, True, True]
    report = check(served(UNMODIFIED, length=512))
    assert report.verdict.endswith(f"It serves {UNMODIFIED}.")
    assert report.fix.startswith("Start it with the schedule"), "which also sets the length"


@pytest.mark.thorough
def test_text_and_no_log_probabilities(served, check):
    assert check(served(takes_ids=False)).status == SERVED
    report = check(served(has_logprobs=False))
    assert (report.status, report.basis) == (UNDECIDED, "generated text")
    assert report.verdict.startswith(f"It serves {CONVERTED}, ")
    assert LINEAR not in report.verdict
    assert report.verdict.endswith("Generated text without log-probabilities does not distinguish them.")
    report = check(served(LINEAR, has_logprobs=False, takes_ids=False))
    assert (report.status, report.verdict) == (FAULT, f"It serves {LINEAR}.")


@pytest.mark.thorough
def test_a_server_that_samples(served, check):
    report = check(served(has_logprobs=False, is_sampled=True))
    assert (report.status, report.verdict[:29]) == (UNDECIDED, "Sampling cannot be disabled: ")
    assert check(served(is_sampled=True)).status == SERVED, "log-probabilities do not depend on the temperature"


@pytest.mark.thorough
def test_templates(folder, served, check, monkeypatch):
    wrapping = served(takes_ids=False, template=("Human: ", " Assistant:"))
    report = check(wrapping)
    assert report.status == FAULT
    assert report.verdict.startswith("It adds ")
    assert "as a template does" in report.verdict
    chat = served(chat_only=True)
    chat.tokenizer = copy.deepcopy(chat.tokenizer)
    chat.tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr("ctxext.served.check.open_tokenizer", lambda *_, **__: chat.tokenizer)
    report = check(chat)
    assert (report.status, report.verdict) == (SERVED, "It serves the checkpoint as converted.")
    known = dataclasses.replace(wrapping, tokenizer=chat.tokenizer, template=("<|user|>", "<|assistant|>"))
    report = check(known)
    assert (report.status, report.verdict[:36]) == (FAULT, "It wraps prompts in the chat templat")


@pytest.fixture
def in_chat(served, monkeypatch):
    """Build a server with a chat template, which the checkpoint has too."""

    def build(reading=CONVERTED, template=TEMPLATE, **options):
        chat = served(reading, **options)
        chat.tokenizer = copy.deepcopy(chat.tokenizer)
        chat.tokenizer.chat_template = template
        known = copy.deepcopy(chat.tokenizer)
        known.chat_template = TEMPLATE
        monkeypatch.setattr("ctxext.served.check.open_tokenizer", lambda *_, **__: known)
        return chat

    return build


@pytest.mark.thorough
def test_a_wrong_reading_in_chat(in_chat, check):
    report = check(in_chat(UNMODIFIED, chat_only=True))
    assert (report.status, report.verdict, report.basis) == (FAULT, f"It serves {UNMODIFIED}.", "log-probabilities")


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.thorough
def test_completions_that_cannot_be_compared(in_chat, check, wraps):
    """Ollama's have the chat template, TGI's no log-probabilities; their chat completions have both in order."""
    server = in_chat()
    complete = server.complete

    def answer(content):
        if "messages" in content:
            return complete(content)
        if not isinstance(content["prompt"], str):
            return 422, {"error": "prompt must be a string"}
        server.template = ("<|user|>", "<|assistant|>") if wraps else ("", "")
        result = complete({**content, "logprobs": None})
        server.template = ("", "")
        return result

    server.complete = answer
    report = check(server)
    assert (report.status, report.verdict) == (SERVED, "It serves the checkpoint as converted.")


@pytest.mark.parametrize("template", [TEMPLATE, "<|system|>Be brief." + TEMPLATE])
def test_another_chat_template_is_no_fault(in_chat, check, monkeypatch, template):
    """A checkpoint without a template, or with another one than the server."""
    server = in_chat(template=template, chat_only=True)
    if template == TEMPLATE:
        monkeypatch.undo()
    report = check(server)
    assert report.status == UNDECIDED
    assert re.fullmatch(r"Its chat template has \d+ tokens more than that of the checkpoint.", report.verdict)
    assert report.fix.startswith("Set the template of the checkpoint with --chat-template FILE, or add that of")


@pytest.mark.thorough
def test_completions_of_ollama_wrap_by_design(served, check):
    models = json.dumps({"data": [{"id": "served:latest", "owned_by": "library"}]}).encode()
    wrapping = served(takes_ids=False, template=("Human: ", " Assistant:"), has_logprobs=False)
    wrapping.override = lambda path: (200, {}, models) if path == "/v1/models" else None
    report = check(wrapping)
    assert (report.server, report.status) == ("Ollama", UNDECIDED)
    assert report.fix.startswith(("Use Ollama 0.12.11 or later", "Check that it serves these weights"))


@pytest.mark.thorough
def test_chat_without_log_probabilities(in_chat, check):
    report = check(in_chat(chat_only=True, has_logprobs=False))
    assert (report.status, report.basis) == (UNDECIDED, "generated text")
    assert report.verdict.endswith("Generated text without log-probabilities does not distinguish them.")
    assert report.fix.startswith("Give the address of vLLM itself, which also has /v1/completions")


@pytest.mark.thorough
def test_noise_of_8_bits(served, check):
    assert check(served(noise=0.05)).status == SERVED
    assert check(served(NO_TEMPERATURE, noise=0.05)).verdict == f"It serves {NO_TEMPERATURE}."


@pytest.mark.thorough
def test_no_false_alarm(served, check):
    for seed in range(20):
        report = check(served(noise=0.05, seed=seed, has_logprobs=seed % 2 == 0))
        assert report.status != FAULT, report


@pytest.mark.thorough
def test_other_weights(served, check):
    other = served()
    generator = torch.Generator().manual_seed(0)
    other.model = copy.deepcopy(other.model)
    with torch.no_grad():
        for weight in other.model.parameters():
            weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator) if weight.ndim > 1 else 0
    report = check(other)
    assert (report.status, report.verdict[:36]) == (UNDECIDED, "It fits no reading of the checkpoint")


def answering(completion):
    """Return a server that answers every prompt like this."""
    body = json.dumps({"choices": [completion]}).encode()
    return Served(None, None, override=lambda path: (200, {}, body) if path == "/v1/completions" else None)


@pytest.mark.thorough
def test_no_tokens(check):
    report = check(answering({"text": "", "finish_reason": "stop"}))
    assert (report.status, report.verdict) == (UNDECIDED, "It returns no tokens that can be compared.")
    assert report.notes == ()
    report = check(answering({"text": "", "finish_reason": "length"}))
    assert report.status == FAULT
    assert report.verdict.startswith("It generates no token after prompts of 2")


def test_other_token_ids(check):
    row = {"tokens": ["token_id:99999"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:99999": -1.0}]}
    with pytest.raises(CtxextError, match="returns the token 99999, but the checkpoint has only 3,072 tokens"):
        check(answering({"text": "?", "logprobs": row}))


@pytest.mark.thorough
def test_a_time_limit(served, check):
    report = check(served(), minutes=0)
    assert report.status == UNDECIDED, "nothing beyond the original length was compared"
    assert report.verdict.startswith("It serves the checkpoint as converted up to 2")
    (note,) = report.notes
    assert note.startswith("0 minutes do not suffice for prompts of 5")


@pytest.mark.parametrize(
    ("method", "theta", "names"),
    [
        (Ntk(factor=4), 1e4, [UNMODIFIED]),
        (Ntk(factor=4), 2e4, [UNMODIFIED, NO_THETA]),
        (PositionInterpolation(factor=4), 1e4, [UNMODIFIED]),
        (Yarn(factor=4), 1e4, [UNMODIFIED, NO_TEMPERATURE, LINEAR]),
        (NtkByParts(factor=4), 1e4, [UNMODIFIED, DEFAULT_TEMPERATURE, LINEAR]),
        (DynamicNtk(factor=4), 1e4, [UNMODIFIED, LINEAR]),
        (SelfExtend(factor=4), 2e4, [UNMODIFIED, NO_THETA]),
    ],
)
def test_the_readings_of_a_method_differ_from_each_other(tmp_path, method, theta, names):
    """Two equal readings can never be told apart, so that a fault would be undecided."""
    source = copy_demo(tmp_path / "source", theta)
    convert(str(source), tmp_path / "out", Recipe([method]), check=False)
    readings = readings_of(open_checkpoint(str(tmp_path / "out")))
    assert list(readings) == [CONVERTED, *names]
    if LINEAR in names:
        assert model_config(readings[LINEAR]).rotary.parameters["factor"] == 4


def test_the_prompts_of_a_dynamic_schedule_exceed_the_original_length(tmp_path):
    convert("demo", tmp_path / "out", Recipe([DynamicNtk(factor=4)]), check=False)
    checkpoint = open_checkpoint(str(tmp_path / "out"))
    probes = probes_of(checkpoint, Encoder(AutoTokenizer.from_pretrained(checkpoint.folder)))
    assert [probe.place for probe in probes] == ["inside", "just beyond", "at twice", "near the end"]


def test_a_checkpoint_that_is_not_extended(served):
    with running(served()) as url, pytest.raises(CtxextError, match="is not extended"):
        check_server(open_checkpoint("demo"), Server(url))


@pytest.mark.thorough
def test_the_command(run, folder, served):
    with running(served(UNMODIFIED)) as url:
        result = run("verify", folder, "--server", url)
        assert result.exit_code == 1
        assert result.stdout.startswith("✗ vLLM 0.0 (served): It serves the unmodified model.\n")
        assert "Fix: Start it with the schedule: vllm serve" in result.stdout
        content = json.loads(run("verify", folder, "--server", url, "--json").stdout)
    assert (content["passed"], content["status"], content["server"]) == (False, FAULT, "vLLM 0.0")
    assert content["probes"][0]["differences"][UNMODIFIED] < 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--server", "http://127.0.0.1:1", "--engine", "vllm"), "--engine cannot be combined with --server."),
        (("--server", "http://127.0.0.1:1", "--against", "demo"), "--against cannot be combined with --server."),
        (("--server", "http://127.0.0.1:1", "--no-load"), "--no-load cannot be combined with --server."),
        (("--model", "it"), "--model requires a server."),
        (("--api-key", "it"), "--api-key requires a server."),
        (("--minutes", "1"), "--minutes requires a server."),
        (("--server", "localhost:8000"), '"localhost:8000" is not a URL.'),
    ],
)
def test_combinations_without_a_meaning(run, folder, words, message):
    assert run("verify", folder, *words).exception.message == message


@pytest.mark.thorough
def test_a_place_without_a_token_is_a_fault(served, check):
    """A server that answers nothing beyond its limit, with 200."""
    silent = served()
    complete = silent.complete
    empty = {"choices": [{"text": "", "finish_reason": "length"}], "usage": {"completion_tokens": 0}}
    silent.complete = lambda content: (200, empty) if len(content["prompt"]) > 512 else complete(content)
    report = check(silent)
    assert report.status == FAULT
    assert report.verdict.startswith("It generates no token after prompts of 5")
    assert [probe["silent"] for probe in report.probes] == [False, True, True]


@pytest.mark.parametrize("takes_ids", [True, False])
@pytest.mark.thorough
def test_a_cut_that_only_the_count_shows(served, check, takes_ids):
    """A server that reads the first and the last tokens, and returns no log-probabilities."""
    cutting = served(takes_ids=takes_ids, has_logprobs=False)
    complete = cutting.complete

    def cut(content):
        prompt = content["prompt"]
        ids = prompt if isinstance(prompt, list) else cutting.tokenizer(prompt)["input_ids"]
        ids = ids if len(ids) <= 512 else ids[:4] + ids[-300:]
        cutting.takes_ids = True
        status, answer = complete({**content, "prompt": ids})
        cutting.takes_ids = takes_ids
        return (status, answer) if takes_ids or isinstance(prompt, str) else (422, {"error": "prompt must be a string"})

    cutting.complete = cut
    report = check(cutting)
    assert report.status == FAULT
    assert report.verdict.startswith("It silently reads only 304 of 5")
