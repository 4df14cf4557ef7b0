"""Checkpoints in vLLM, compared with transformers: the measurements of `converters/engine_support.py`."""

from contextlib import closing

import pytest

from checkpoints_to_serve import LENGTHS, expected, largest, prompts
from ctxext.api import Recipe, Settings, evaluate
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.calibration import calibrate_recipe
from ctxext.converters.convert import convert
from ctxext.converters.engine_support import overrides
from ctxext.converters.options import ConvertOptions
from ctxext.methods import MsPoE
from ctxext.models.model import Loading
from ctxext.recipes.model_config import model_config
from ctxext.served.every_token import compare_in_engine

pytest.importorskip("vllm", reason="vLLM is not installed")
from offline_vllm import Engine

pytestmark = pytest.mark.engine

SMALL = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
CONFIG_ONLY = ["pi", "ntk", "yarn", "ntk-by-parts", "llama3", "longrope"]
TOLERANCE = 1e-3


def asked(folder, lengths=LENGTHS, **options):
    """Return the log-probabilities in vLLM."""
    arguments = {**SMALL, **options}
    with closing(Engine(folder, length=2048, dtype="float32", trust=True, arguments=arguments)) as engine:
        return engine.log_probabilities(prompts(lengths))


@pytest.mark.parametrize("name", [*CONFIG_ONLY, "mspoe fixed", "mspoe by parts on yarn"])
def test_log_probabilities_are_those_of_transformers(made, note, name):
    folder = made(name)
    lengths = (40, 400) if name == "mspoe fixed" else LENGTHS
    extra = {"max_model_len": 512} if name == "mspoe fixed" else {}
    differences = largest(asked(folder, lengths, **extra), expected(folder, prompts(lengths)))
    note("vLLM", name, differences)
    assert max(differences) < TOLERANCE


@pytest.mark.parametrize("name", CONFIG_ONLY)
def test_the_unconverted_checkpoint_is_served_as_the_converted_one(made, note, name):
    folder = made(name)
    source = open_checkpoint("demo").folder
    model = model_config(open_checkpoint(str(folder)).config)
    served = asked(source, hf_overrides=overrides(model))
    differences = largest(served, expected(folder, prompts()))
    note("vLLM", f"{name}, unconverted", differences)
    assert max(differences) < TOLERANCE


def test_two_lists_of_longrope_are_one_in_vllm(made, note):
    folder = made("longrope with two lists")
    differences = short, _, long = largest(asked(folder), expected(folder, prompts()))
    note("vLLM", "longrope with two lists", differences)
    assert short > 1
    assert long < TOLERANCE


def test_dynamic_is_wrong(made, note):
    folder = made("dynamic")
    differences = largest(asked(folder), expected(folder, prompts()))
    note("vLLM", "dynamic", differences)
    assert max(differences) > 1


def test_each_head_of_a_rank_has_its_ratio(made, note, monkeypatch):
    """Tensor parallelism: each of two processes has half of the heads."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # By default it needs a memory node per process.
    folder = made("mspoe by parts on yarn")
    differences = largest(asked(folder, tensor_parallel_size=2), expected(folder, prompts()))
    note("vLLM", "mspoe by parts on yarn, tensor parallel 2", differences)
    assert max(differences) < TOLERANCE


@pytest.mark.parametrize(
    "options", [{"enable_prefix_caching": False}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 256}]
)
def test_chunks_and_shared_beginnings_change_nothing(made, note, options):
    folder = made("mspoe by parts on yarn")
    differences = largest(asked(folder, **options), expected(folder, prompts()))
    note("vLLM", f"mspoe by parts on yarn, {next(iter(options))}", differences)
    assert max(differences) < TOLERANCE


def test_the_same_cells_as_transformers(made, note, tmp_path):
    calibrated = tmp_path / "calibrated"
    steps = MsPoE(schedule="by-parts", ratio_min=2, ratio_max=4, first_layer=0, head_order="calibrated")
    recipe = calibrate_recipe(open_checkpoint("demo"), Recipe([steps]), ConvertOptions())
    convert("demo", calibrated, recipe, check=False)
    models = [str(made("yarn")), str(calibrated)]
    settings = Settings(
        tasks=("needle", "kv", "documents"),
        lengths=(512, 1024),
        depths=(0.0, 0.5, 1.0),
        samples=3,
        kv_ids="number",
        allow_beyond=True,
    )
    served = evaluate(models, settings, loading=Loading(dtype="fp32", engine="vllm", engine_arguments=SMALL))
    scored = evaluate(models, settings, loading=Loading(dtype="fp32"))
    for one, other in zip(served["models"], scored["models"], strict=True):
        cells, wanted = (
            {(cell["task"], cell["length"], cell["depth"]): cell["correct"] for cell in model["cells"]}
            for model in (one, other)
        )
        right = sum(cells.values())
        note("vLLM", f"{one['name']}: answers right, in transformers", [right, sum(wanted.values())])
        assert cells == wanted
        assert 0 < right < 3 * len(cells)


def test_verify_reads_on_to_the_last_position(made, note):
    out, model = open_checkpoint(str(made("yarn"))), model_config(open_checkpoint(str(made("yarn"))).config)
    served = {"OUT": (out.folder, {}), "SOURCE": (open_checkpoint("demo").folder, {"hf_overrides": overrides(model)})}
    rows = compare_in_engine(out, served, arguments=SMALL)
    note("vLLM", "verify, yarn and its unconverted source", [row.difference for row in rows])
    assert [row.tokens for row in rows] == 2 * [256, 1280, 2047]
    assert all(row.is_alike for row in rows)
