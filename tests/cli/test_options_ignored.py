"""Options without an effect beside others are refused: none is ignored without a word."""

import pytest

from ctxext.errors import CtxextError
from ctxext.evaluate.results_log import ResultsLog
from ctxext.finetune.options import TrainingOptions
from ctxext.search.options import StudyPlace
from gguf_files import TENSORS, gguf_bytes, keys_of
from small_llama import scheduled

AUTO = ("--method", "auto", "--target-length", "512", "--trials", "2")
YARN = ("--method", "yarn", "--factor", "4")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*AUTO, "--recipe", "FILE"), "--method auto cannot be combined with --recipe."),
        ((*AUTO, "--method", "yarn"), "--method auto cannot be combined with another method."),
        ((*AUTO, "--replace-scaling"), "--method auto cannot be combined with --replace-scaling."),
        ((*AUTO, "--calibration-text", "FILE"), "--method auto cannot be combined with --calibration-text."),
        ((*YARN, "--calibration-text", "FILE"), "--calibration-text has no effect: no step"),
        ((*YARN, "--device", "cpu"), "--device has no effect: no step"),
        ((*YARN, "--dtype", "fp32"), "--dtype has no effect: no step"),
        ((*YARN, "--recipe", "FILE"), "--method cannot be combined with --recipe."),
    ],
)
def test_convert(run, llama, tmp_path, words, message):
    (tmp_path / "FILE").write_text("steps: [{method: yarn, factor: 4}]")
    words = [tmp_path / word if word == "FILE" else word for word in words]
    result = run("convert", llama, tmp_path / "out", *words)
    assert isinstance(result.exception, CtxextError)
    assert result.exception.message.startswith(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--digest", "--no-verify", ("--revision", "v1")])
def test_convert_of_a_gguf_file(run, tmp_path, flag):
    source = tmp_path / "some.gguf"
    source.write_bytes(gguf_bytes(keys_of(), TENSORS))
    words = flag if isinstance(flag, tuple) else (flag,)
    result = run("convert", source, tmp_path / "out.gguf", *YARN, *words, "--dry-run")
    assert result.exception.message.startswith(f"{words[0]} does not support GGUF files")


def test_eval_and_search_resume_or_overwrite(tmp_path):
    header = {"settings": {}, "loading": {}, "models": [], "versions": {}}
    for place in (None, tmp_path / "report"):
        if place is not None:
            with pytest.raises(CtxextError, match="--resume cannot be combined with --overwrite"):
                ResultsLog(place).begin(header, resume=True, overwrite=True)
    with pytest.raises(CtxextError, match="--resume cannot be combined with --overwrite"):
        StudyPlace(path=tmp_path / "study.db").check(resume=True, overwrite=True)


@pytest.mark.parametrize(
    "options",
    [
        *({"rank": 8}, {"alpha": 4.0}, {"dropout": 0.1}, {"targets": ("q_proj",)}),
        *({"train_norms": True}, {"train_embeddings": True}),
    ],
)
def test_finetune_without_an_adapter_has_none_of_its_options(options):
    flag = "--" + next(iter(options)).replace("_", "-")
    TrainingOptions(**options)
    with pytest.raises(CtxextError, match=f"--full cannot be combined with {flag}") as error:
        TrainingOptions(full=True, **options)
    assert f"--without {flag[2:]}" in error.value.hint
    TrainingOptions(full=True).resolve(window=64, trained_length=32).for_data(9)


@pytest.mark.parametrize("words", [("search",), ("convert", "--method", "auto")])
def test_a_hint_of_a_search_names_no_option_that_it_lacks(run, llama, words):
    scheduled(llama, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    result = run(words[0], llama, *words[1:], "--target-length", "2k", "--trials", "2")
    assert "already has a schedule" in result.exception.message
    assert "ctxext convert MODEL OUT --method NAME --replace-scaling" in result.exception.hint
