"""`eval` of a GGUF file in llama.cpp, with a stub; tests/engines runs the real engine."""

import json
import sys
from contextlib import closing

import pytest

import stub_xllamacpp
from ctxext.api import Recipe, Settings, evaluate
from ctxext.engines.llama_cpp import LlamaCpp, LlamaTokenizer
from ctxext.errors import CtxextError
from ctxext.gguf.convert import convert_gguf
from ctxext.methods import Yarn
from ctxext.models.model import LoadedModel, Loading
from gguf_files import TENSORS, gguf_bytes, keys_of

LLAMA = Loading(dtype="fp32", engine="llama.cpp")


@pytest.fixture(autouse=True)
def xllamacpp(monkeypatch):
    stub_xllamacpp.made.clear()
    monkeypatch.setitem(sys.modules, "xllamacpp", stub_xllamacpp)


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """A file with the header of the demo; the stub has the weights."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "demo.gguf"
    values = {key: value for key, value in keys_of().items() if key != "tokenizer.chat_template"}
    path.write_bytes(gguf_bytes(values, TENSORS))
    return path


def refusal(result):
    assert isinstance(result.exception, CtxextError)
    return f"{result.exception.message} {result.exception.hint}"


@pytest.mark.thorough
def test_the_same_questions_and_cells_as_the_checkpoint(demo, tmp_path, monkeypatch):
    asked, greedy = [], LoadedModel._decode
    monkeypatch.setattr(
        LoadedModel,
        "_decode",
        lambda loaded, ids, size: asked.extend(ids.tolist()) or greedy(loaded, ids, size),
    )
    settings = Settings(tasks=("needle", "kv"), lengths=(256,), depths=(1.0,), samples=1)
    report = evaluate([demo], settings, loading=LLAMA, out=tmp_path / "out")
    wanted = evaluate(["demo"], Settings(**{**vars(settings), "generate": True}), loading=Loading(dtype="fp32"))
    (model,), (other,) = report["models"], wanted["models"]
    assert [cell["correct"] for cell in model["cells"]] == [cell["correct"] for cell in other["cells"]]
    assert 0 < sum(cell["correct"] for cell in model["cells"]) < len(model["cells"]), "all or nothing is no comparison"
    server = stub_xllamacpp.made[-1]
    assert sorted(server.asked[1:]) == sorted(asked), "the first request chooses the form"
    assert server.parameters.n_ctx == 256
    assert server.parameters.cache_type_k.name == "GGML_TYPE_F32"
    assert (model["name"], model["engine"], model["dtype"]) == ("demo.gguf", "llama.cpp 1", "all F32")
    assert "llama.cpp by xllamacpp 1" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("demo.gguf",), "is a GGUF file, which needs llama.cpp. Add --engine llama.cpp"),
        (("demo", "--engine", "llama.cpp"), '"demo" is not one'),
        (
            ("demo.gguf", "--engine", "llama.cpp", "--task", "needle,short"),
            "llama.cpp only generates answers: it cannot measure short",
        ),
        (("demo.gguf", "--engine", "llama.cpp", "--lengths", "1k"), "supports 512 tokens"),
        (("demo.gguf", "--engine", "llama.cpp", "--lengths", "1k", "--allow-beyond"), "supports only 512 tokens"),
        (("demo.gguf", "--engine", "llama.cpp", "--harness", "longbench"), "cannot be combined with --engine"),
        (("demo.gguf", "--engine", "llama.cpp", "--device", "cpu"), "llama.cpp chooses device"),
        (("none.gguf", "--engine", "llama.cpp"), "There is no file"),
        (("demo.gguf", "./demo.gguf", "--engine", "llama.cpp"), "is listed twice"),
        (
            ("demo.gguf", "--engine", "llama.cpp", "--lengths", "256", "--engine-args", '{"colour": 1}'),
            '"colour" is not one of the arguments for memory and speed',
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(demo, run, words, says):
    message = refusal(run("eval", *words))
    assert says in message
    assert "\n" not in message


def test_without_it_one_line_and_a_hint(demo, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    assert 'llama.cpp is not installed. pip install "ctxext[llama-cpp]"' in refusal(
        run("eval", "demo.gguf", "--engine", "llama.cpp")
    )


def test_the_command_names_the_recipe_and_how_to_run_it(demo, run):
    convert_gguf(demo, "longer.gguf", Recipe([Yarn(factor=2)]))
    more = ("--lengths", "256", "--depths", "1", "--samples", "1", "--engine-args", '{"n_gpu_layers": 0}')
    result = run("eval", "longer.gguf", "--engine", "llama.cpp", *more, "--out", "out")
    assert result.exit_code == 0, result.stderr
    assert "llama-server -m longer.gguf -c 1024" in result.stderr
    report = json.loads(demo.with_name("out").joinpath("report.json").read_text())
    assert report["models"][0]["summary"] == "yarn ×2"
    assert report["versions"]["xllamacpp"] == "1"
    assert stub_xllamacpp.made[-1].parameters.n_gpu_layers == 0


def test_half_a_character_is_an_answer_without_scores(demo, monkeypatch):
    with closing(LlamaCpp(demo, length=256, dtype="auto", threads=1)) as engine:
        written = engine.server.complete([2, 3], "", max_tokens=2)
        monkeypatch.setattr(stub_xllamacpp, "whole", tuple)
        again = engine.server.complete([2, 3], "", max_tokens=2)
    assert (again.text, again.tokens, again.is_empty) == (written.text, (), False)


def test_the_template_in_the_file(demo):
    template = (
        "{{ bos_token }}{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    demo.write_bytes(gguf_bytes({**keys_of(), "tokenizer.chat_template": template}, TENSORS))
    engine = LlamaCpp(demo, length=256, dtype="auto", threads=1)
    said = [{"role": "user", "content": "a"}]
    text = LlamaTokenizer(engine).apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><a>!"
    with pytest.raises(CtxextError, match="exceeds the available context"):
        engine.server.complete([2] * 300, "", max_tokens=1)
    engine.close()


@pytest.mark.parametrize(("length", "is_enough"), [(511, True), (512, True), (513, False)])
def test_a_file_with_a_shorter_context_than_requested_is_refused(demo, length, is_enough):
    """Its context length is 512."""
    if is_enough:
        assert LlamaCpp(demo, length=length, dtype="fp32", threads=1).attention == (
            "F32 keys and values, without flash attention"
        )
        return
    with pytest.raises(CtxextError, match="512 tokens, fewer than 513"):
        LlamaCpp(demo, length=length, dtype="fp32", threads=1)


@pytest.mark.parametrize(("score", "message"), [(float("nan"), "NaN"), (float("-inf"), "finite"), (None, "finite")])
def test_scores_that_are_no_numbers_are_refused(demo, monkeypatch, score, message):
    settings = Settings(tasks=("needle",), lengths=(256,), depths=(1.0,), samples=1)
    monkeypatch.setattr(stub_xllamacpp, "logprob", lambda: score)
    with pytest.raises(CtxextError, match=message):
        evaluate([demo], settings, loading=LLAMA)
