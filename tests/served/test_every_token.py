"""`ctxext verify --engine vllm`, and the commands for serving an unconverted source, with a stub of vLLM."""

import json
import shlex
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import stub_vllm
from ctxext.api import Recipe
from ctxext.checkpoint.head import Head
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.cli.verify import _in_engine as compared_in_engine
from ctxext.converters.convert import convert
from ctxext.converters.engine_support import (
    BY_SOURCE,
    ENGINES,
    EXACT,
    PARTLY,
    UNKNOWN,
    UNTRIED,
    WRONG,
    Serving,
    attn_factor,
    overrides,
    serving_of,
    source_commands,
)
from ctxext.methods import DynamicNtk, Llama3, LongRope, MsPoE, Ntk, NtkByParts, PositionInterpolation, Yarn
from ctxext.recipes.model_config import model_config
from ctxext.served import every_token
from ctxext.served.every_token import EngineComparison, _read
from ctxext.verify import run as verify_run


@pytest.fixture
def vllm(monkeypatch):
    stub_vllm.install(monkeypatch)


@pytest.fixture(scope="module")
def yarn(tmp_path_factory):
    out = tmp_path_factory.mktemp("engine") / "yarn"
    convert("demo", out, Recipe([Yarn(factor=2)]))
    return out


@pytest.mark.thorough
def test_one_row_per_prompt_and_served_checkpoint(vllm, run, yarn):
    result = run("verify", yarn, "--no-load", "--engine", "vllm", "--against", "demo", "--json")
    assert result.exit_code == 0, result.stdout
    rows = json.loads(result.stdout)["engine"]
    assert [row["tokens"] for row in rows] == 2 * [256, 768, 1023]
    assert {row["served"] for row in rows} == {"OUT", "SOURCE with --hf-overrides"}
    assert max(row["difference"] for row in rows) < 1e-3
    assert all(llm.options["dtype"] == "float32" for llm in stub_vllm.made)
    assert all(llm.ended for llm in stub_vllm.made)


@pytest.mark.thorough
def test_a_difference_fails_and_is_shown(vllm, run, yarn, monkeypatch):
    monkeypatch.setattr(stub_vllm, "logprob", lambda number: number + 0.25)
    result = run("verify", yarn, "--no-load", "--engine", "vllm", "--engine-args", '{"max_model_len": 300}')
    assert result.exit_code == 1
    assert "2.5e-01" in result.stdout
    assert "to the last position" in result.stdout
    assert stub_vllm.made[0].options["max_model_len"] == 300


@pytest.mark.parametrize(
    "numbers", [(1e-4,), (1e-4, 0.5), (0.5, 1e-4), (1e-4, float("nan"), 1e-4), (1e-4, 1e-3), (2e-3,)]
)
def test_one_prompt_that_differs_fails_all(vllm, run, yarn, monkeypatch, numbers):
    rows = [EngineComparison("OUT", "inside", 9, number, number / 2, 3) for number in numbers]
    monkeypatch.setattr(every_token, "compare_in_engine", lambda *_args, **_options: rows)
    monkeypatch.setattr(verify_run, "verify", lambda *_args, **_options: [])
    result = run("verify", yarn, "--no-load", "--engine", "vllm", "--json")
    passes = all(number <= 1e-3 for number in numbers)
    assert (result.exit_code, json.loads(result.stdout)["passed"]) == (int(not passes), passes)


@pytest.mark.parametrize(
    ("asked", "reach", "places"),
    [
        ({}, 1024, {"inside": 256, "beyond": 768, "to the last position": 1023}),
        ({"max_model_len": 4096}, 1024, {"inside": 256, "beyond": 768, "to the last position": 1023}),
        ({"max_model_len": 700}, 700, {"inside": 256, "beyond": 606, "to the last position": 699}),
        ({"max_model_len": 512}, 512, {"inside": 256, "to the last position": 511}),
        ({"max_model_len": 300}, 300, {"inside": 150, "to the last position": 299}),
    ],
)
def test_how_long_the_prompts_are(yarn, monkeypatch, asked, reach, places):
    """A limit of the server shortens them, and an error in one is reported for that one."""
    started, source = [], open_checkpoint("demo")

    class Server:
        def __init__(self, folder, **options):
            started.append((folder.resolve().name, options))

        def score(self, ids):
            return [-1.0] * (len(ids) - 2) + [-1.0 - len(started)]

        def close(self):
            started.append("ended")

    monkeypatch.setattr(every_token, "Vllm", Server)
    wanted = lambda checkpoint, prompts, foreign: [[-1.0] * (len(ids) - 1) for ids in prompts]  # noqa: E731
    monkeypatch.setattr(every_token, "_read_expected", wanted)
    monkeypatch.setattr(every_token, "vllm_arguments", lambda row: {"a": 0, "needs": row.engine})
    served = {"OUT": (yarn, {"a": 1, "seed": 1}), "SOURCE": (source.folder, {"b": 2})}
    rows = every_token.compare_in_engine(open_checkpoint(str(yarn)), served, arguments={"seed": 7, **asked})
    assert [row.place for row in rows] == 2 * [*places]
    assert [row.tokens for row in rows] == 2 * [*places.values()]
    assert [row.served for row in rows] == len(places) * ["OUT"] + len(places) * ["SOURCE"]
    assert [row.difference for row in rows] == len(places) * [1.0] + len(places) * [3.0]
    assert [row.position for row in rows] == [row.tokens - 2 for row in rows]
    assert [row.mean for row in rows] == [row.difference / (row.tokens - 1) for row in rows]
    assert started[1::2] == ["ended", "ended"]
    common = {"length": reach, "dtype": "float32", "trust": False, "may_fetch": False}
    assert started[0][1] == {**common, "arguments": {"a": 1, "needs": "vLLM", "seed": 7}}
    assert started[2][1] == {**common, "arguments": {"a": 0, "needs": "vLLM", "b": 2, "seed": 7}}


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_is_no_number_is_the_largest_difference(at):
    read = [-1.0, -2.0, -3.5]
    read[at] = float("nan")
    row = every_token._compare_prompt("OUT", "inside", read, [-1.5, -2.0, -3.0])
    assert (row.position, row.is_alike, row.tokens) == (at, False, 4)


@pytest.mark.parametrize(("trained", "expected"), [(False, ["OUT", "SOURCE with --hf-overrides"]), (True, ["OUT"])])
def test_a_source_is_not_served_for_a_result_that_was_trained(yarn, tmp_path, monkeypatch, trained, expected):
    """The weights differ, so no override makes the source equal."""
    out = shutil.copytree(yarn, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["ctxext"] |= {"finetune": {"steps": 10}} if trained else {}
    (out / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(every_token, "compare_in_engine", lambda out, served, **options: list(served))
    checkpoints = open_checkpoint(str(out)), open_checkpoint("demo")
    assert compared_in_engine(*checkpoints, trust_remote_code=False, arguments={}) == expected


def test_pieces_read_the_same(monkeypatch, yarn):
    model = AutoModelForCausalLM.from_pretrained(yarn, dtype=torch.float32).eval()
    ids = torch.randint(5, 3000, (130,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        scores = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    monkeypatch.setattr("ctxext.checkpoint.head.positions_at_once", lambda _: 40)
    expected = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert _read(Head(model), ids) == pytest.approx(expected, abs=1e-4)


# Commands for an unconverted source


def lines(*steps, source="demo"):
    checkpoint = open_checkpoint("demo")
    model = Recipe(steps).resolve(model_config(checkpoint.config)).edit(model_config(checkpoint.config))
    return source_commands(source, model, serving_of(model)), model


def test_overrides_of_engines_match_config_json():
    by_engine, model = lines(Yarn(factor=4), source="me/model")
    words = shlex.split(by_engine["vLLM"])
    assert words[:4] == ["vllm", "serve", "me/model", "--hf-overrides"]
    assert json.loads(words[4]) == overrides(model)
    assert overrides(model)["rope_parameters"] == model.config["rope_parameters"]
    assert overrides(model)["max_position_embeddings"] == 2048
    assert words[5:] == ["--max-model-len", "2048"]
    assert json.loads(shlex.split(by_engine["SGLang"])[6]) == overrides(model)
    assert by_engine["llama.cpp"] == (
        "llama-server -m model.gguf --rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 512 "
        "--override-kv llama.context_length=int:2048 -c 2048"
    )


@pytest.mark.parametrize(
    ("step", "flags"),
    [
        (
            PositionInterpolation(factor=4),
            "--rope-scaling linear --rope-scale 4 --override-kv llama.context_length=int:2048",
        ),
        (NtkByParts(factor=4), "--override-kv llama.rope.scaling.attn_factor=float:0.878249"),
        (Yarn(factor=4, beta_fast=16), "--yarn-beta-fast 16"),
        (Ntk(factor=4), "--rope-freq-base "),
    ],
)
def test_flags_of_llama_cpp(step, flags):
    assert flags in lines(step)[0]["llama.cpp"]


def test_the_factor_for_llama_cpp():
    """attention_factor / (1 + 0.1 · ln factor): 1 by parts, and the tested number for ×4."""
    assert attn_factor(lines(NtkByParts(factor=4))[1]) == pytest.approx(0.878249, abs=1e-6)
    assert attn_factor(lines(Yarn(factor=4, attention_factor=1.2))[1]) == pytest.approx(1.053899, abs=1e-6)
    assert attn_factor(lines(Yarn(factor=4))[1]) is None


def test_no_line_for_what_an_engine_does_not_serve():
    assert lines(MsPoE(head_order="fixed"))[0] == {}
    assert lines(DynamicNtk(factor=4))[0] == {}
    assert "SGLang" not in lines(Yarn(factor=4, attention_factor=1.2))[0]
    assert "SGLang" in lines(NtkByParts(factor=4))[0]
    assert set(lines(Llama3(factor=4))[0]) == {"vLLM", "SGLang"}
    assert set(lines(LongRope(factor=4, long_factor=(2.0,) * 16))[0]) == {"vLLM", "SGLang"}


@pytest.mark.parametrize(
    ("status", "remark", "engines"),
    [
        (EXACT, "", {"vLLM", "SGLang", "llama.cpp"}),
        (PARTLY, "", {"vLLM", "SGLang", "llama.cpp"}),
        (UNKNOWN, BY_SOURCE, {"vLLM", "SGLang", "llama.cpp"}),
        (UNKNOWN, f"{UNTRIED} olmo2", {"vLLM"}),
        (UNKNOWN, "yarn is untested", set()),
        (WRONG, "", set()),
    ],
)
def test_lines_are_offered_for_what_was_tried_or_read(status, remark, engines):
    _, model = lines(Yarn(factor=4))
    rows = [Serving(engine, status, remark=remark) for engine in ENGINES]
    assert set(source_commands("SOURCE", model, rows)) == engines
    for engine in ("vLLM", "SGLang", "llama.cpp"):  # Each by its own row.
        others = [Serving(name, WRONG) if name != engine else Serving(name, status, remark=remark) for name in ENGINES]
        assert set(source_commands("SOURCE", model, others)) == engines & {engine}


def test_an_untried_family_is_offered_to_vllm_alone():
    config = {"model_type": "olmo2", "max_position_embeddings": 512, "hidden_size": 64, "num_attention_heads": 4}
    plain = model_config({**config, "num_hidden_layers": 2, "rope_theta": 10000.0})
    model = Recipe([Yarn(factor=4)]).resolve(plain).edit(plain)
    assert set(source_commands("SOURCE", model, serving_of(model))) == {"vLLM"}


def test_overrides_of_engines_are_printed_by_convert_and_inspect(run, yarn):
    output = run("convert", "demo", "--method", "yarn", "--factor", "2", "--dry-run").stdout
    line = next(line.strip() for line in output.splitlines() if "vllm serve" in line)
    assert shlex.split(line)[2] == "SOURCE"
    assert line in run("inspect", yarn).stdout
    card = (yarn / "README.md").read_text()
    assert "draft model does not inherit" in output
    assert "draft model does not inherit" in card
    assert "vllm serve SOURCE" in card
    assert "--hf-overrides" in card
    data = json.loads(run("inspect", yarn, "--json").stdout)
    assert data["unconverted"]["vLLM"] == line
