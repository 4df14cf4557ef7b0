"""The model card: one for every method, read as the Hub reads it and rendered as a reader sees it."""

import dataclasses
import json
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

import tiny_encodings
from ctxext.api import METHODS, Recipe, convert
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.card import CardFacts, CardResults, convert_command, front_matter, render, wrap_command
from ctxext.converters.convert import card_of
from ctxext.converters.engine_support import UNKNOWN, serving_of
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.methods import AdjustedBase, Llama3, LongRope, MsPoE, Ntk, Yarn
from ctxext.models.checkpoint_info import info_of
from ctxext.publish.push import plan_push
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named
from small_llama import change_json, read_json

REPORT = Path(__file__).parents[1] / "resources" / "report"


def recipe_of(name: str) -> Recipe:
    numbers = {"longrope": {"long_factor": (1.0, 2.0, 3.0, 4.0)}}
    if name == "mspoe":
        return Recipe([MsPoE(first_layer=0, ratio_max=2.5, head_order="prompt")])
    return Recipe([method_named(name)(**{**method_named(name).example, **numbers.get(name, {})})])


def source_for(encoding: str, llama_source: Path, folder: Path) -> Path:
    """A checkpoint with the encoding, and the small Llama's name and card."""
    source = tiny_encodings.source_for(encoding, llama_source, folder / "other" / "llama")
    if source != llama_source:
        (source / "README.md").write_text((llama_source / "README.md").read_text())
    return source


def planned_card(source: Path, recipe: Recipe) -> str:
    return card_of(make_plan(open_checkpoint(str(source)), recipe))


def parts(card: str) -> tuple[dict, str]:
    """Front matter, and the rest as HTML."""
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), MarkdownIt("commonmark", {"html": True}).enable("table").render(body)


@pytest.mark.parametrize("name", [method.name for method in METHODS])
def test_a_card_for_every_method(llama_source, name, tmp_path):
    card = planned_card(source_for(method_named(name).encoding, llama_source, tmp_path), recipe_of(name))
    front, page = parts(card)
    assert front["license"] == "mit"
    assert front["language"] == ["en"]
    assert {"tiny", "ctxext", "long-context", name} <= set(front["tags"])
    assert ("custom_code" in front["tags"]) == method_named(name).needs_code() == ("trust_remote_code=True" in page)
    assert method_named(name).paper in page
    assert "was not evaluated" in page
    grown = "The context length is extended from 128 to 512 tokens."
    grown = "Only the declared context length is raised, from 128 to 512 tokens" if name == "declare" else grown
    reaches = "factor" in recipe_of(name).steps[0].to_dict()
    assert (grown if reaches else "The context length is unchanged: 128 tokens.") in page
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles[:4] == ["Recipe", "Usage", "Serving", "Evaluation"]
    assert page.count("<table>") == 2
    assert "| |" not in re.sub(r"<.*?>", "", page), "a table that is not read as one"
    commands = r"\$ (ctxext|vllm serve|python -m sglang|python convert_hf_to_gguf.py|llama-server|mlx_lm.chat)"
    assert "$" not in re.sub(commands, "", page), "a place of the template that was not filled"
    assert "\n\n\n" not in card
    assert str(llama_source.parent) not in card


@pytest.mark.parametrize(
    "recipe",
    [
        *(recipe_of(method.name) for method in METHODS),
        Recipe([AdjustedBase(theta=1e6, factor=4), Yarn(factor=4, beta_fast=16)]),
        Recipe([AdjustedBase(theta=1e6, factor=2), Ntk(factor=4)]),
        Recipe([Yarn(factor=4), MsPoE(schedule="by-parts", ratio_min=1, head_order="fixed", first_layer=0)]),
    ],
    ids=lambda recipe: recipe.summary(),
)
def test_the_command_of_a_card_makes_the_same_checkpoint(run, llama_source, tmp_path, recipe, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = source_for(recipe.steps[0].encoding, llama_source, tmp_path)
    convert(str(source), tmp_path / "first", recipe, check=False)
    card = (tmp_path / "first" / "README.md").read_text()
    if block := re.search(r"```yaml\n(.*?)```", card, re.DOTALL):
        Path("recipe.yaml").write_text(block[1])
    command = re.search(r"```console\n\$ ctxext (.*?)\n```", card, re.DOTALL)[1].replace("\\\n", "")
    words = [str(source) if word == "llama" else word for word in shlex.split(command)]
    result = run(*words, "--no-verify")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "OUT" / "config.json").read_bytes() == (tmp_path / "first" / "config.json").read_bytes()


def test_long_commands_are_still_one_command():
    command = convert_command("user/name", "a" * 40, recipe_of("mspoe"))
    assert shlex.split(wrap_command(command, 40).replace("\\\n", "")) == shlex.split(command)
    assert max(map(len, wrap_command(command, 60).splitlines())) < 100


def test_a_source_on_the_hub_is_named_as_base(llama_source):
    local = open_checkpoint(str(llama_source))
    source = Checkpoint("maker/tiny", local.folder, local.config, revision="b" * 40)
    card = card_of(make_plan(source, Recipe([Yarn(factor=4)])))
    front, page = parts(card)
    assert front["base_model"] == "maker/tiny"
    assert "base_model_relation" not in front, "the Hub's words all say that the weights are others"
    assert f"--revision {'b' * 40}" in page.replace("\\\n   ", "")


@pytest.mark.parametrize(
    ("declared", "base"),
    [
        ("maker/tiny-1.5", "maker/tiny-1.5"),
        ("there/folder", None),
        *((name, None) for name in ("/data/tiny", "../tiny", "a/b/c", "tiny", "", "a/b--c", "a/b c", "a/..", 5, None)),
    ],
)
def test_a_folder_with_a_recorded_id_has_it_as_base(llama, declared, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("there/folder").mkdir(parents=True)
    change_json(llama / "config.json", _name_or_path=declared)
    convert(str(llama), tmp_path / "out", Recipe([Yarn(factor=4)]), check=False)
    written = parts((tmp_path / "out" / "README.md").read_text())[0]
    pushed = parts(plan_push(tmp_path / "out", "me/x", check=False).card)[0]
    assert written.get("base_model") == pushed.get("base_model") == base
    named = plan_push(tmp_path / "out", "me/x", check=False, base="maker/other")
    assert parts(named.card)[0]["base_model"] == named.base == "maker/other"


def test_the_commands_of_each_engine_that_is_exact(llama_source, tmp_path):
    convert(str(llama_source), tmp_path / "out", Recipe([Yarn(factor=4)]), check=False)
    block = plan_push(tmp_path / "out", "me/x", check=False).card.split("## Serving")[1].split("```console\n")[1]
    assert block.split("```")[0].splitlines() == [
        "$ vllm serve me/x",
        "$ hf download me/x --local-dir x",
        "$ python convert_hf_to_gguf.py x --outfile x.gguf",
        "$ llama-server -m x.gguf -c 512",
        "$ mlx_lm.chat --model me/x",
    ]
    convert(str(llama_source), tmp_path / "code", recipe_of("self-extend"), check=False)
    served = plan_push(tmp_path / "code", "me/x", check=False).card.split("## Serving")[1].split("##")[0]
    assert "$ vllm serve me/x --trust-remote-code\n```" in served
    assert "gguf" not in served


def test_the_command_of_llama_cpp_has_the_arguments_that_make_it_right(llama_source, tmp_path):
    convert(str(llama_source), tmp_path / "out", recipe_of("ntk-by-parts"), check=False)
    card = plan_push(tmp_path / "out", "me/x", check=False).card
    block = card.split("## Serving")[1].split("```console\n")[1].split("```")[0].replace("\\\n", " ")
    line = next(line for line in block.splitlines() if "llama-server" in line)
    assert shlex.split(line.removeprefix("$ "))[:5] == ["llama-server", "-m", "x.gguf", "-c", "512"]
    assert shlex.split(line)[-2] == "--override-kv"
    assert shlex.split(line)[-1].startswith("llama.rope.scaling.attn_factor=float:0.87")


def facts_of(llama_source, **facts) -> CardFacts:
    """The facts of a card for YaRN, and others."""
    plan = make_plan(open_checkpoint(str(llama_source)), Recipe([Yarn(factor=4)]))
    return CardFacts(
        source="maker/tiny",
        revision="c" * 40,
        recipe=plan.recipe,
        model=plan.model,
        inherited={},
        cautions=(),
        **facts,
    )


def test_weights_that_were_trained_are_not_served_from_the_source(llama_source):
    """The source with overrides has other weights."""
    facts = facts_of(llama_source)
    assert "The source can be served with the same recipe" in render(facts)
    trained = render(dataclasses.replace(facts, training={"steps": 3}))
    assert "The source can be served with the same recipe" not in trained
    assert "vllm serve maker/tiny" not in trained


def test_a_broken_card_of_the_source_does_no_harm(llama):
    for text in ("---\n: [\n---\n", "---\nnothing ends", "no front matter", "---\n- a list\n---\n"):
        (llama / "README.md").write_text(text)
        assert parts(planned_card(llama, recipe_of("pi")))[0]["library_name"] == "transformers"


# Results


def publishable(llama_source, tmp_path):
    """A converted checkpoint and a report that measured it; the figures are made up."""
    convert(str(llama_source), tmp_path / "out", Recipe([Yarn(factor=4)]), digest=True, link="copy")
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    manifest = read_json(tmp_path / "out" / "ctxext.json")
    manifest["files"]["tokenizer.json"] = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    (tmp_path / "out" / "ctxext.json").write_text(json.dumps(manifest))
    digest = info_of("out", open_checkpoint(str(tmp_path / "out"))).digest
    report = read_json(REPORT / "report.json")
    report["models"][1]["digest"] = digest
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "report.html").write_text("<p>page</p>")
    for name in ("needle.png", "needle-tiny.png", "perplexity.png"):
        (folder / name).write_bytes(b"picture")
    return tmp_path / "out", folder


def test_results_are_on_the_card_with_intervals_and_in_the_front_matter(llama_source, tmp_path):
    out, folder = publishable(llama_source, tmp_path)
    plan = plan_push(out, "me/tiny-yarn", report=folder)
    front, page = parts(plan.card)
    assert '<td style="text-align:right">83–99</td>' in page
    assert '<img src="report/needle.png" alt="needle" />' in page
    assert '<img src="report/perplexity.png"' in page
    assert "ctxext eval tiny OUT --task needle,perplexity,short" in page
    assert "from_pretrained(&quot;me/tiny-yarn&quot;)" in page
    assert "Looking a key up in a long JSON object" in page
    assert "was not evaluated" not in page
    assert {"report/report.json", "report/report.html", "report/needle.png", "report/perplexity.png"} <= set(plan.texts)
    assert "report/needle-tiny.png" not in plan.texts
    index = front["model-index"]
    assert index[0]["name"] == "tiny-yarn"
    figures = {
        (entry["dataset"]["name"], entry["metrics"][0]["type"]): entry["metrics"][0]["value"]
        for entry in index[0]["results"]
    }
    assert figures["needle, 128 tokens", "exact_match"] == pytest.approx(29 / 30, abs=1e-6)
    assert figures["short, 128 tokens", "perplexity"] == 4.5
    assert len(figures) == len(index[0]["results"]) == 5


# Engines


def test_engines_are_listed_only_for_tested_methods(llama_source):
    recipe = Recipe([Yarn(factor=4)])
    config = open_checkpoint(str(llama_source)).config
    untried = {**config, "model_type": "seed_oss"}
    rows = serving_of(recipe.edit(model_config(untried)))
    assert [row.status for row in rows[1:]] == [UNKNOWN] * 4
    assert rows[1].remark == "untested with seed_oss"


@pytest.mark.parametrize(
    ("recipe", "engine", "status", "arguments"),
    [
        (recipe_of("pi"), "vLLM", "exact", "--max-model-len 512"),
        (recipe_of("yarn"), "vLLM", "exact", ""),
        (recipe_of("ntk-by-parts"), "SGLang", "not known", ""),
        (
            Recipe([Yarn(factor=4, attention_factor=1.2)]),
            "llama.cpp",
            "exact",
            "--override-kv llama.rope.scaling.attn_factor=float:1.0539",
        ),
        (recipe_of("longrope"), "vLLM", "with care", "--max-model-len 512"),
        (recipe_of("longrope"), "transformers", "with care", ""),
        (recipe_of("dynamic"), "vLLM", "not", ""),
        (recipe_of("llama3"), "llama.cpp", "exact", ""),
        (recipe_of("mspoe"), "vLLM", "not", ""),
        (Recipe([MsPoE(first_layer=0, head_order="fixed")]), "vLLM", "exact", "--trust-remote-code"),
        (recipe_of("mspoe"), "transformers", "with care", "trust_remote_code=True"),
        (recipe_of("self-extend"), "vLLM", "exact", "--trust-remote-code"),
    ],
)
def test_exact_arguments(llama_source, recipe, engine, status, arguments):
    plan = make_plan(open_checkpoint(str(llama_source)), recipe)
    row = next(row for row in plan.serving if row.engine == engine)
    assert (row.status, row.arguments) == (status, arguments)


def test_an_adapter_is_tagged_as_one(llama_source):
    measured = CardResults(body="", command="", missing=())
    front = front_matter(facts_of(llama_source, training={"steps": 3}, is_adapter=True, measured=measured))
    assert (front["library_name"], front["base_model_relation"]) == ("peft", "adapter")
    assert LongRope.name not in front["tags"]


def test_words_of_a_report_are_no_part_of_the_pages_form(llama_source, tmp_path):
    out, folder = publishable(llama_source, tmp_path)
    report = read_json(folder / "report.json")
    report["versions"] |= {"torch": "1\n\n# Heading", "transformers": "2 | ![x](y) <b>"}
    report["models"][1] |= {"device": "cpu\n\n# Heading", "attention": "<i>", "dtype": "x\n```"}
    report["models"][1] |= {"name": "a\n# Heading", "summary": "x | <b>", "harness": {"y\n# Heading": {"![x](y)": 1}}}
    for cell in report["models"][1]["cells"]:
        cell["task"] = "<b>\n\n# Heading"
    report["settings"]["data"] = "a\n```\n# Heading\n$(id)"
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "needle-x](y).png").write_bytes(b"picture")
    (folder / "needle.png").unlink()
    plan = plan_push(out, "me/tiny-yarn", report=folder)
    assert not [line for line in plan.card.splitlines() if line.startswith(("# Heading", "$(id)"))]
    assert "<b>" not in plan.card.split("---", 2)[2]
    assert "![x](y)" not in plan.card
    assert "--data 'a?```?# Heading?$(id)'" in plan.card
    assert "](y)" not in " ".join(plan.texts)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("settings", {"data": {}}),
        ("settings", {"depths": None}),
        ("cells", {"share": "1"}),
        ("cells", {"share": math.nan}),
        ("cells", {"correct": "x"}),
        ("cells", {"samples": None}),
        ("cells", {"texts": [[0, 1]]}),
        ("perplexity", {"lengths": {"x": {}}}),
        ("short", {"perplexity": []}),
        ("short", {"length": 64, "loss": 1.0, "perplexity": math.nan, "against": None}),
        ("harness", {"a": {"b": "1"}}),
        ("effective", {"tasks": {"needle": {}}}),
    ],
)
def test_a_report_of_another_form_is_refused_in_one_line(part, change, llama_source, tmp_path):
    out, folder = publishable(llama_source, tmp_path)
    report = read_json(folder / "report.json")
    model = report["models"][1]
    holder = report["settings"] if part == "settings" else model["cells"][0] if part == "cells" else {}
    holder |= change
    model |= {} if part in ("settings", "cells") else {part: {**(model.get(part) or {}), **change}}
    (folder / "report.json").write_text(json.dumps(report))
    with pytest.raises(CtxextError, match="is not a report of ctxext eval"):
        plan_push(out, "me/tiny-yarn", report=folder)


def test_numbers_at_their_defaults_are_not_in_the_command():
    line = convert_command("me/m", None, Recipe([Yarn(factor=4)]))
    assert line == "ctxext convert me/m OUT --method yarn --factor 4"
    assert Llama3(factor=4).low_freq_factor == 1.0
    line = convert_command("me/m", None, Recipe([Llama3(factor=4)]))
    assert line == "ctxext convert me/m OUT --method llama3 --factor 4"
    line = convert_command("me/m", "abc", Recipe([Yarn(factor=4, beta_fast=16.0)]), "x")
    assert line == "ctxext convert me/m x --method yarn --factor 4 --beta-fast 16 --revision abc"
    line = convert_command("me/m", None, Recipe([Yarn(factor=4, truncate=False)]))
    assert line == "ctxext convert me/m OUT --method yarn --factor 4 --no-truncate"
    line = convert_command("me/m", None, Recipe([AdjustedBase(theta=500_000.5, factor=4.5)]))
    assert shlex.split(line)[4:] == ["--method", "abf", *shlex.split(line)[6:]]
    assert {"500000.5", "4.5"} <= set(shlex.split(line))
