"""`ctxext convert` as a user types it: options, answers, errors and exit codes."""

import ast
import json
import shlex
from pathlib import Path

import pytest

from ctxext import cli
from small_llama import read_json


@pytest.mark.parametrize("link", ["hard", "reflink"])
def test_copy_contradicts_other_ways(run, link, tmp_path):
    words = ("convert", "demo", tmp_path / "out", "--method", "yarn", "--factor", 4, "--copy", "--link")
    assert run(*words, link).exception.message == f"--copy cannot be combined with --link {link}."
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("method", "factor", "warned"), [("yarn", 250, True), ("pi", 33, True), ("yarn", 32, False)])
def test_a_factor_beyond_published_ones_is_warned_of(run, method, factor, warned):
    result = run("convert", "demo", "--method", method, "--factor", factor, "--dry-run")
    assert (f"{factor} times the original context length" in " ".join(result.stderr.split())) is warned


def test_convert_prints_the_next_command(run, llama, tmp_path):
    words = ("convert", llama, tmp_path / "out", "--method", "yarn", "--factor", 4)
    result = run(*words, "--dry-run")
    assert result.exit_code == 0
    assert "128 → 512" in result.stdout
    assert "nothing was written" in result.stdout
    assert not (tmp_path / "out").exists()
    result = run(*words)
    assert result.exit_code == 0
    assert "yarn ×4" in result.stdout
    assert "128 → 512 tokens" in result.stdout
    assert "ctxext eval" in result.stderr
    assert f"Serve it: transformers serve {tmp_path / 'out'}" in result.stderr
    assert (tmp_path / "out" / "config.json").exists()
    with_code = run("convert", llama, tmp_path / "code", "--method", "self-extend", "--factor", 4).stderr
    assert f"Serve it: vllm serve {tmp_path / 'code'} --trust-remote-code" in with_code, (
        "transformers serve has no code"
    )


def test_json_is_alone_on_stdout(run, llama, tmp_path):
    result = run("convert", llama, tmp_path / "out", "-m", "pi", "--target-length", "1k", "--json")
    data = json.loads(result.stdout)
    assert data["recipe"] == {"steps": [{"method": "pi", "factor": 8.0}]}
    assert data["context_length"] == 1024


def test_no_verify_checks_nothing(run, llama, tmp_path):
    words = ("--method", "yarn", "--factor", 4, "--json")
    checked, left = (
        json.loads(run("convert", llama, tmp_path / name, *words, *more).stdout)["verification"]
        for name, more in (("one", ()), ("two", ("--no-verify",)))
    )
    assert checked["of"] == "frequencies"
    assert left is None


def test_default_name(run, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("convert", "llama", "--method", "ntk", "--target-length", "2k", "-q").exit_code == 0
    assert (tmp_path / "llama-ntk-2k" / "config.json").exists()


def test_options_of_several_methods(run, llama, tmp_path):
    methods = ("-m", "abf", "-m", "yarn", "--theta", "1e6", "--factor", 4, "--beta-fast", 16)
    result = run("convert", llama, tmp_path / "out", *methods)
    assert result.exit_code == 0, result.stderr
    config = read_json(tmp_path / "out" / "config.json")
    assert config["rope_theta"] == 1e6
    assert config["rope_scaling"]["beta_fast"] == 16


def test_recipe_file_with_an_option_on_top(run, llama, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps:\n  - method: yarn\n    target_length: 1k\n    beta_fast: 16\n")
    assert run("convert", llama, tmp_path / "out", "--recipe", recipe, "--factor", 2).exit_code == 0
    scaling = read_json(tmp_path / "out" / "config.json")["rope_scaling"]
    assert (scaling["factor"], scaling["beta_fast"]) == (2.0, 16.0)
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(read_json(tmp_path / "out" / "ctxext.json")["recipe"]))
    assert run("convert", llama, tmp_path / "same", "--recipe", again).exit_code == 0
    assert (tmp_path / "same" / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


@pytest.mark.parametrize("content", ["[1.0, 2.0, 3.0, 4.0]", '{"long_factor": [1, 2, 3, 4]}'])
def test_longrope_reads_its_factors_from_a_file(run, llama, tmp_path, content):
    (tmp_path / "factors.json").write_text(content)
    result = run(
        "convert", llama, tmp_path / "out", "-m", "longrope", "--factor", 4, "--long-factor", tmp_path / "factors.json"
    )
    assert result.exit_code == 0, result.stderr
    config = read_json(tmp_path / "out" / "config.json")
    assert config["rope_scaling"]["long_factor"] == [1.0, 2.0, 3.0, 4.0]
    assert config["original_max_position_embeddings"] == 128


BAD = {
    ("-m", "yarn"): "--factor 4 or --target-length 512",
    ("-m", "yarn", "--target-length", "64"): "not above the original context length",
    ("-m", "yarn", "-m", "adaptive", "--factor", "4"): "yarn and adaptive each multiply the context length",
    ("-m", "yarn", "-m", "adaptive", "--target-length", "512"): "recipe file",
    ("-m", "yarn", "--factor", "4", "--beta-fast", "1", "--beta-slow", "2"): "must not be below",
    ("-m", "abf", "--factor", "4"): "--theta",
    ("--recipe", "absent.yaml"): "no recipe file",
}


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_bad_input_gets_one_line(words, llama, tmp_path, capfd, monkeypatch):
    from ctxext.cli import app

    monkeypatch.setattr("sys.argv", ["ctxext", "convert", str(llama), str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit) as caught:
        app.main()
    assert caught.value.code == 1
    shown = capfd.readouterr().err
    assert BAD[words] in shown
    assert shown.startswith("error: ")
    assert shown.count("\n") <= 2
    assert not (tmp_path / "out").exists()


SOURCE = "$(id) `x`;'y"


def test_the_next_command_is_quoted_for_a_shell(run, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama.rename(tmp_path / SOURCE)
    said = run("inspect", SOURCE).stderr
    assert shlex.split(said)[:4] == ["Next:", "ctxext", "convert", SOURCE]
    *_, measured, served = run("convert", SOURCE, "a b", "-m", "yarn", "--factor", "4").stderr.splitlines()
    assert shlex.split(measured.partition(": ")[2])[:4] == ["ctxext", "eval", SOURCE, "a b"]
    assert served == "Serve it: transformers serve 'a b'"
    page = (tmp_path / "a b" / "README.md").read_text()
    command = next(line for line in page.splitlines() if line.startswith("$ ctxext convert"))
    assert shlex.split(command)[:4] == ["$", "ctxext", "convert", SOURCE]


def test_every_next_command_can_be_run_as_printed():
    """A word that holds a space was put together by hand, and is no word of a shell."""
    calls = [
        (path.name, argument)
        for path in Path(cli.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "next_step"
        for argument in node.args
    ]
    assert len(calls) > 20
    wrong = [
        (name, ast.unparse(argument))
        for name, argument in calls
        for part in ast.walk(argument)
        if isinstance(part, ast.Constant) and " " in str(part.value)
    ]
    assert wrong == []
