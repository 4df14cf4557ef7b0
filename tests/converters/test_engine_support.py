"""The table of engines contains measurements only: engine_support.json has a cell for each measured combination."""

import copy

import pytest

from ctxext.api import METHODS, Recipe
from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters import engine_support
from ctxext.converters.engine_support import (
    EXACT,
    TOLERANCE,
    UNKNOWN,
    WRONG,
    read_measurements,
    schedules_of,
    serving_of,
    source_commands,
    vllm_arguments,
    worst_difference,
)
from ctxext.methods import AdjustedBase, Ntk, PositionInterpolation, Yarn
from ctxext.recipes.model_config import model_config
from ctxext.recipes.registry import method_named

RUN = ("vLLM", "vLLM's transformers backend", "llama.cpp", "MLX")
MODEL = model_config(open_checkpoint("demo").config)
MEASURED = [method for method in METHODS if method.name in read_measurements()["cells"]]


def model_of(*steps, recipe=True, drop=()):
    """The checkpoint in the package under a recipe, with the note of it or without."""
    model = model_config(open_checkpoint("demo").config)
    edited = Recipe(steps).resolve(model).edit(model)
    config = copy.deepcopy(edited.config)
    for dialect in ("rope_parameters", "rope_scaling"):
        for key in drop:
            config[dialect].pop(key)
    if recipe:
        config["ctxext"] = {"recipe": Recipe(steps).to_dict(), "trained_length": 512}
    return model_config(config)


def step_of(name, **numbers):
    method = method_named(name)
    lists = {"long_factor": (2.0,) * 16, "short_factor": (2.0,) * 16} if name == "longrope" else {}
    return method(**{**method.example, **lists, **numbers})


def row(model, engine):
    return next(row for row in serving_of(model) if row.engine == engine)


@pytest.mark.parametrize("method", MEASURED, ids=lambda method: method.name)
def test_a_method_that_was_measured_has_a_cell_for_every_engine(method):
    """Run tools/measure_engines.py where one is missing."""
    cells = read_measurements()["cells"]
    assert set(RUN) <= set(cells[method.name])
    for engine in RUN:
        cell = cells[method.name][engine]
        assert "refused" in cell or len(cell["differences"]) == len(read_measurements()["prompts"]) == 4
    assert schedules_of(model_of(step_of(method.name))) == (method.name,)


@pytest.mark.parametrize("method", MEASURED, ids=lambda method: method.name)
def test_a_tick_is_a_cell(method):
    model = model_of(step_of(method.name))
    for engine in ("vLLM", "MLX"):
        status = worst_difference(method.name, engine)
        is_right = status is not None and status <= TOLERANCE
        assert (row(model, engine).status != WRONG) == is_right, engine


@pytest.fixture
def cells(monkeypatch):
    """The measured cells, of which a test may take some away."""
    data = copy.deepcopy(dict(read_measurements()))
    monkeypatch.setattr(engine_support, "read_measurements", lambda: data)
    return data["cells"]


def test_a_cell_without_a_run_is_not_known_and_never_another_method_s(cells):
    del cells["mrrope"]["vLLM"]
    served = row(model_of(step_of("mrrope")), "vLLM")
    assert (served.status, served.remark) == (UNKNOWN, "mrrope is untested")
    assert row(model_of(step_of("longrope")), "vLLM").status == EXACT


def test_an_unmeasured_method_is_not_known(cells):
    del cells["mrrope"]
    for engine in ("vLLM", "llama.cpp", "MLX"):
        assert row(model_of(step_of("mrrope")), engine).status == UNKNOWN


@pytest.mark.parametrize(
    ("name", "keys"), [("mrrope", ("short_mscale", "long_mscale")), ("ntk-by-parts", ("mscale", "mscale_all_dim"))]
)
def test_without_the_redundant_keys(name, keys):
    engine = "MLX" if name == "ntk-by-parts" else "vLLM"
    assert row(model_of(step_of(name)), engine).status == EXACT
    bare = row(model_of(step_of(name), drop=keys), engine)
    assert bare.status == WRONG
    assert "convert again" in bare.remark


def test_config_json_without_a_recipe_is_read():
    assert schedules_of(model_of(Yarn(factor=4), recipe=False)) == ("yarn",)
    assert schedules_of(model_of(step_of("ntk-by-parts"), recipe=False)) == ("ntk-by-parts",)
    assert schedules_of(model_of(step_of("pi"), recipe=False)) == ("pi",)
    assert schedules_of(model_of(step_of("mrrope"), recipe=False)) == ("longrope with attention_factor",)
    both = (AdjustedBase(theta=3e5, factor=2), Yarn(factor=2))
    assert schedules_of(model_of(*both)) == ("abf", "yarn")
    assert row(model_of(Yarn(factor=4, truncate=False)), "MLX").remark == "yarn without truncate is untested"


def test_the_reason_for_mlx_names_an_alternative():
    served = row(model_of(step_of("mrrope")), "MLX")
    assert served.status == WRONG
    assert "yarn and ntk-by-parts are exact" in served.remark
    assert row(model_of(step_of("self-extend")), "MLX").status == WRONG


RIGHT, OFF = {"differences": [1e-5, 9e-4]}, {"differences": [1e-5, 2.0]}
FAMILY = {
    "right": ({"plain": RIGHT, "yarn": RIGHT, "ntk": RIGHT}, (EXACT, "")),
    "off": ({"plain": RIGHT, "yarn": OFF}, (WRONG, "log-probabilities differ by up to 2")),
    "refused": ({"plain": RIGHT, "yarn": {"refused": "it is new"}}, (WRONG, "it is new")),
    "off without it, too": (
        {"plain": OFF, "yarn": OFF},
        (UNKNOWN, "untested with seed_oss: without a schedule, log-probabilities differ by up to 2"),
    ),
    "off only without it": ({"plain": OFF, "yarn": RIGHT}, (EXACT, "")),
    "off in its own model": (
        {"plain": RIGHT, "yarn": OFF, "backend": RIGHT},
        (EXACT, "its own model: log-probabilities differ by up to 2"),
    ),
    "another rope type": ({"plain": RIGHT, "ntk": RIGHT}, (UNKNOWN, "yarn is untested with seed_oss")),
    "nothing": ({}, (UNKNOWN, "untested with seed_oss")),
}


@pytest.mark.parametrize("name", FAMILY)
def test_a_family_s_cell_for_the_rope_type_counts(name, monkeypatch):
    """Run tools/measure_families.py to add one."""
    measured, wanted = FAMILY[name]
    rows = {method: {"vLLM": cell} for method, cell in measured.items() if method != "backend"}
    if "backend" in measured:
        rows["yarn"]["vLLM's transformers backend"] = measured["backend"]
    data = {**read_measurements(), "families": {"seed_oss": rows}}
    monkeypatch.setattr(engine_support, "read_measurements", lambda: data)
    served = row(in_family("seed_oss", Yarn(factor=4)), "vLLM")
    assert (served.status, served.remark) == wanted
    assert row(in_family("seed_oss", Yarn(factor=4)), "MLX").remark == "untested with seed_oss"


def test_mlx_ignores_the_schedules_of_glm4_moe():
    """Measured: it differs exactly as much as the schedule changes the model."""
    yarn, ntk = (row(in_family("glm4_moe", method(factor=4)), "MLX") for method in (Yarn, Ntk))
    assert (yarn.status, yarn.remark) == (WRONG, "ignores schedules; reads a changed base")
    assert (ntk.status, ntk.remark) == (UNKNOWN, "a changed base is untested with glm4_moe")


def in_family(model_type, *steps, **changes):
    """A small model of another family under a recipe."""
    config = {"model_type": model_type, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"head_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 512, **changes}
    model = model_config(config)
    return Recipe(steps).resolve(model).edit(model)


@pytest.mark.parametrize("family", sorted(read_measurements()["families"]))
def test_every_measured_family_has_all_prompts(family):
    rows = read_measurements()["families"][family]
    assert "plain" in rows
    for cells in rows.values():
        assert all("refused" in cell or len(cell["differences"]) == 4 for cell in cells.values())


def test_several_position_axes_in_vllm():
    """Seen in its models: Qwen3.5's position axes know only yarn."""
    text = {"model_type": "qwen3_5_text", "hidden_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    whole = {"model_type": "qwen3_5", "text_config": text}
    model = model_config(whole)
    for step, status in ((Yarn(factor=4), EXACT), (Ntk(factor=4), EXACT), (PositionInterpolation(factor=4), WRONG)):
        served = row(Recipe([step]).resolve(model).edit(model), "vLLM")
        assert served.status == status
        assert ("several position axes" in served.remark) == (status == WRONG)


def test_families_with_a_wrong_vllm_model_need_an_argument():
    """Gpt-oss has yarn in its code; the transformers backend is right, by every way to start vLLM."""
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    for step, arguments in ((Yarn(factor=4), ""), (Ntk(factor=4), "--model-impl transformers")):
        model = in_family("gpt_oss", step, **plain)
        served = row(model, "vLLM")
        assert (served.status, served.arguments) == (EXACT, arguments)
        assert served.remark == ("its own model always applies yarn" if arguments else "")
        assert vllm_arguments(served) == ({"model_impl": "transformers"} if arguments else {})
        assert source_commands("ORG/NAME", model, serving_of(model))["vLLM"].endswith(f"2048 {arguments}".rstrip())
    assert vllm_arguments(None) == {}
    quantized = in_family("gpt_oss", Ntk(factor=4), **plain, quantization_config={"quant_method": "mxfp4"})
    served = row(quantized, "vLLM")
    assert (served.status, served.remark) == (WRONG, "its own model always applies yarn")


def test_methods_with_code_and_linear_attention():
    """vLLM's own models of these families run relation maps; its transformers backend cannot run the others."""
    source = {"model_type": "qwen3_next", "hidden_size": 128, "num_hidden_layers": 4, "max_position_embeddings": 512}
    source |= {"num_attention_heads": 2, "num_key_value_heads": 2, "architectures": ["Qwen3NextForCausalLM"]}
    model = model_config(source)
    for step, status in ((step_of("self-extend"), EXACT), (step_of("mspoe", head_order="fixed"), WRONG)):
        served = row(Recipe([step]).resolve(model).edit(model), "vLLM")
        assert served.status == status
        assert ("relation maps only" in served.remark) == (status == WRONG)


def test_a_whole_model_has_the_cells_of_its_text_part():
    text = {"model_type": "gemma3_text", "hidden_size": 128, "num_hidden_layers": 6, "max_position_embeddings": 512}
    model = model_config({"model_type": "gemma3", "text_config": text})
    assert "gemma3" not in read_measurements()["families"]
    assert row(Recipe([Yarn(factor=4)]).resolve(model).edit(model), "vLLM").status == EXACT


def test_what_vllm_reads_above_the_schedule():
    """Its Ministral 3 leaves the schedule's `llama_4_scaling_beta` unread: off by 0.64 beyond the original length."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "original_max_position_embeddings": 64}
    config = {"model_type": "ministral3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 16, "num_hidden_layers": 2, "max_position_embeddings": 64}
    model = model_config({**config, "rope_parameters": {**rope, "llama_4_scaling_beta": 0.1}})
    for step in (Yarn(factor=4), Ntk(factor=4)):
        written = step.resolve(model.rotary).edit(model).config
        scaling = {"original_max_position_embeddings": 64, "beta": 0.1}
        assert written["llama_4_scaling"] == scaling
        assert written["rope_parameters"].items() >= {"llama_4_scaling_beta": 0.1}.items()
        assert written["rope_parameters"]["original_max_position_embeddings"] == 64
    assert "llama_4_scaling" not in Yarn(factor=4).resolve(MODEL.rotary).edit(MODEL).config


def test_methods_with_code_that_were_tried_alone_are_not_known_together():
    steps = [step_of("mspoe", head_order="fixed"), step_of("self-extend")]
    assert [row(model_of(step, recipe=False), "vLLM").status for step in steps] == [EXACT, EXACT]
    both = row(model_of(*steps, recipe=False), "vLLM")
    assert (both.status, both.remark) == (UNKNOWN, "the combination of mspoe and self-extend is untested")


def test_what_was_only_read_in_sglangs_source_is_not_exact():
    served = row(model_of(Yarn(factor=4)), "SGLang")
    assert (served.status, served.remark) == (UNKNOWN, engine_support.BY_SOURCE)
    assert row(model_of(Yarn(factor=4)), "vLLM").status == EXACT


def test_sglang_reads_the_temperature_of_ntk_by_parts_from_two_keys():
    served = row(model_of(step_of("ntk-by-parts")), "SGLang")
    assert (served.status, served.remark) == (UNKNOWN, engine_support.BY_SOURCE)
    served = row(model_of(step_of("ntk-by-parts"), drop=("mscale_all_dim",)), "SGLang")
    assert (served.status, "convert again" in served.remark) == (WRONG, True)
    assert row(model_of(step_of("ntk-by-parts"), drop=("mscale_all_dim",)), "MLX").status == EXACT


def test_an_attention_factor_of_1_alone_is_not_by_parts():
    """Without a note of ctxext; ntk-by-parts, asked above, writes an mscale of 0 beside it."""
    yarn = model_of(Yarn(factor=4, attention_factor=1.0), recipe=False)
    assert schedules_of(yarn)[-1].startswith("yarn with attention_factor")
