"""rotary_classes.json against the classes of transformers; classes that were not measured have no entry."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from ctxext.api import Recipe
from ctxext.checkpoint.families import FAMILIES
from ctxext.methods import AdjustedBase, DynamicNtk, Llama3, LongRope, Ntk, NtkByParts, PositionInterpolation, Yarn
from ctxext.recipes.model_config import model_config
from ctxext.verify import rotary_classes, rotation

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from measure_rotary_classes import agreeing, is_plain

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}
RECORDED = sorted({entry["family"] for entry in rotary_classes.read_measurements().values()})
PACKAGE = Path(transformers.__file__).parent


def measured(model_type):
    """The entry of the installed version of a class."""
    return rotary_classes.read_measurements().get(rotary_classes.digest_of(model_type))


of_a_measured_version = pytest.mark.skipif(
    measured("llama") is None, reason=f"transformers {transformers.__version__}: unmeasured"
)


@pytest.fixture
def unimported(monkeypatch):
    """As in a process that has not imported the classes."""
    monkeypatch.setattr(rotary_classes, "is_imported", lambda _: False)


def converted(step, **changes):
    """What a step makes of a small Llama, and what the check is given."""
    source = {**LLAMA, **changes}
    plain = model_config(source)
    recipe = Recipe([step]).resolve(plain)
    return recipe, source, plain, recipe.edit(plain)


STEPS = [
    AdjustedBase(factor=4, theta=5e5),
    Ntk(factor=4),
    PositionInterpolation(factor=4),
    DynamicNtk(factor=4),
    Yarn(factor=4),
    NtkByParts(factor=4),
    Llama3(factor=4),
    LongRope(factor=4, long_factor=tuple(1.0 + i for i in range(8))),
]


@of_a_measured_version
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_answered_as_the_class_answers(unimported, monkeypatch, step):
    recipe, source, plain, stock = converted(step)
    with monkeypatch.context() as patch:
        patch.setattr(rotation, "rotations", None)  # No class is run.
        known = rotation.check_rotation(recipe, source, plain, stock)
    assert known < 1e-9
    monkeypatch.setattr(rotation, "measured_rotations", lambda *_: None)
    assert abs(rotation.check_rotation(recipe, source, plain, stock) - known) < rotary_classes.TOLERANCE


@of_a_measured_version
@pytest.mark.parametrize(
    "model_type", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in RECORDED if name != "llama")]
)
@pytest.mark.thorough
def test_every_class_rotates_as_recorded(model_type):
    """Schedules that the sweep did not draw, so that an entry for another version of ctxext's formulas shows too."""
    if (entry := measured(model_type)) is None:
        pytest.skip(f"transformers {transformers.__version__}: unmeasured")
    rope_types, left_out = agreeing(model_type, draws=3, seed=1)
    assert (entry["family"], entry["rope_types"]) == (model_type, rope_types), left_out


@of_a_measured_version
@pytest.mark.thorough
def test_edited_code_is_not_answered_for_but_another_version_is(unimported, monkeypatch, tmp_path):
    """A release that changes other code, as 5.24 renamed the cache, keeps its answers."""
    stock = converted(Yarn(factor=4))[-1]
    assert rotary_classes.measured_rotations(stock.config, stock.family, [64])
    (tmp_path / "__init__.py").write_text('__version__ = "99.0"\n')
    files = [*rotary_classes._SHARED, "models/llama/configuration_llama.py", "models/llama/modeling_llama.py"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / name)
    spec = importlib.util.spec_from_file_location("transformers", tmp_path / "__init__.py")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert rotary_classes.measured_rotations(stock.config, stock.family, [64])
    modeling = (tmp_path / files[-1]).read_text()
    for old, new in {"k_proj": "key_proj", "class LlamaMLP": "# Renamed.\nclass LlamaFeedForward"}.items():
        assert old in modeling
        (tmp_path / files[-1]).write_text(modeling.replace(old, new))
        assert rotary_classes.measured_rotations(stock.config, stock.family, [64]), new
    for old, new in {
        "emb.cos()": "emb.sin()",
        "LlamaRotaryEmbedding(config=config)": "LlamaRotaryEmbedding(config=other)",
        "class LlamaRotaryEmbedding(nn.Module)": "class LlamaRotaryEmbedding(Base)",
        "class LlamaMLP": "class OtherRotary(nn.Module):\n    pass\n\nclass LlamaMLP",
        "self.layers = ": "self.rotary_emb.inv_freq = 0\n        self.layers = ",
    }.items():
        assert old in modeling
        (tmp_path / files[-1]).write_text(modeling.replace(old, new))
        assert rotary_classes.measured_rotations(stock.config, stock.family, [64]) is None, new
    (tmp_path / files[-1]).write_text(modeling)
    for name in files:
        with (tmp_path / name).open("a") as file:
            file.write("\ntheta = 1\n")
        assert rotary_classes.measured_rotations(stock.config, stock.family, [64]) is None, name
        shutil.copy(PACKAGE / name, tmp_path / name)
    (tmp_path / files[-1]).unlink()
    assert rotary_classes.measured_rotations(stock.config, stock.family, [64]) is None


def test_a_class_imported_in_this_process_is_run():
    stock = converted(Yarn(factor=4))[-1]
    rotation.rotations(stock.config, [64])  # Imports it.
    assert rotary_classes.measured_rotations(stock.config, stock.family, [64]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": None},
        {"rope_theta": 10001.0},
        {"partial_rotary_factor": 0.5},
        {"rope_local_base_freq": 1e4},
        {"position_embedding_type": "none"},
        {"text_config": {}},
        {"head_dim": 15},
        {"head_dim": None},
        {"num_attention_heads": 5},
        {"max_position_embeddings": 256.0},
        {"original_max_position_embeddings": 128},
        {"schedule": {"rope_type": "proportional"}},
        {"schedule": {"factor": 0.5}},
        {"schedule": {"factor": 2000.0}},
        {"schedule": {"factor": "4"}},
        {"schedule": {"factor": True}},
        {"schedule": {"factor": float("nan")}},
        {"schedule": {"factor": None}},
        {"schedule": {"factor": ...}},
        {"schedule": {"original_max_position_embeddings": ...}},
        {"schedule": {"beta_fast": 1000}},
        {"schedule": {"unknown": 1}},
        {"schedule": {"truncate": 1}},
        {"schedule": {"original_max_position_embeddings": 8}},
        {"schedule": {"rope_theta": 10.0}},
        {"schedule": {"full_attention": {}}},
    ],
    ids=str,
)
def test_what_was_not_measured_is_not_answered_for(unimported, change):
    config = converted(Yarn(factor=4))[-1].config
    assert rotary_classes.flat_rotary(config) is not None
    if "schedule" in change:
        parameters = {**config["rope_parameters"], **change["schedule"]}
        schedule = {key: value for key, value in parameters.items() if value is not ...}
        beside = {key: value for key, value in schedule.items() if key != "rope_theta"}
        change = {"rope_parameters": schedule, "rope_scaling": beside, "rope_theta": schedule["rope_theta"]}
    assert rotary_classes.flat_rotary({**config, **change}) is None


def test_longrope_by_two_lengths_and_by_its_factor_must_agree(unimported):
    config = converted(STEPS[-1])[-1].config
    assert rotary_classes.flat_rotary(config) is not None
    assert rotary_classes.flat_rotary({**config, "max_position_embeddings": 300}) is None
    assert rotary_classes.flat_rotary({key: config[key] for key in config if not key.startswith("original_")}) is None
    short = {**config["rope_scaling"], "long_factor": [1.0] * 7}
    parameters = {**short, "rope_theta": 1e4}
    assert rotary_classes.flat_rotary({**config, "rope_scaling": short, "rope_parameters": parameters}) is None


def test_what_differs_from_the_reference_is_left_to_the_class(unimported, monkeypatch):
    recipe, source, plain, stock = converted(Yarn(factor=4))
    asked = []
    monkeypatch.setattr(rotation, "rotations", lambda *_: asked.append(1) or {32: [], 256: []})
    monkeypatch.setattr(rotation, "expected_rotation", lambda *_: ([1.0] * 8, 1.0))
    with pytest.raises(Exception, match="no rotary embedding"):
        rotation.check_rotation(recipe, source, plain, stock)
    assert asked


@of_a_measured_version
@pytest.mark.thorough
def test_converting_the_demo_imports_neither_torch_nor_transformers(tmp_path):
    script = (
        "import sys\nfrom ctxext.api import Recipe, convert\nfrom ctxext.methods import Yarn\n"
        f"done = convert('demo', {str(tmp_path / 'out')!r}, Recipe([Yarn(factor=4)]))\n"
        "assert done.verification.of == 'frequencies' and done.verification.difference < 1e-9\n"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_only_flat_schedules_are_recorded():
    assert {*RECORDED} >= {"llama", "mistral", "qwen2", "qwen3"}
    assert all(is_plain(FAMILIES[name]) for name in RECORDED)
    assert not any(is_plain(FAMILIES[name]) for name in ("gemma3_text", "phi3", "gpt_neox", "deepseek_v3"))
    assert json.loads(rotary_classes.RECORD.read_text()) == rotary_classes.read_measurements()


def test_the_version_of_the_constraints_is_measured():
    """So that the tests above run with it."""
    measured_versions = {entry["transformers"] for entry in rotary_classes.read_measurements().values()}
    text = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert re.search(r"^transformers==(.+)$", text, re.MULTILINE)[1] in measured_versions
