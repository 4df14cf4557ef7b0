"""Each check of `ctxext verify` separately, without a model: failures and allowed differences."""

import dataclasses
import hashlib
import json
import os
import pathlib
import types

import pytest

from ctxext.api import Recipe
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.files.content import stamp_of
from ctxext.methods import MsPoE, Yarn
from ctxext.recipes.registry import method_named
from ctxext.verify import conversion as conversion_module
from ctxext.verify import file_checks, isolated_checks, rotation, run
from ctxext.verify.conversion import Conversion, Finding, training_of
from ctxext.verify.isolated_checks import LoadReport
from ctxext.verify.model_process import rotary_modules
from small_llama import change_json, make_llama, read_json

COMMIT = "a" * 40


def conversion_of(folder, **options) -> Conversion:
    return Conversion(open_checkpoint(str(folder)), **options)


def digest(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["config.json", "ctxext.json"])
@pytest.mark.parametrize("key", ["recipe", "source", "revision"])
def test_a_difference_between_the_two_records_is_reported(extended, name, key):
    assert file_checks.check_record(conversion_of(extended)).status == "passed"
    content = read_json(extended / name)
    noted = content["ctxext"] if name == "config.json" else content
    if key == "recipe":
        noted["recipe"]["steps"][0]["factor"] = 8.0
    elif name == "config.json":
        noted[key] = COMMIT
    else:
        noted["source"][{"source": "name"}.get(key, key)] = COMMIT
    change_json(extended / name, **content)
    problem = f'"ctxext.json" and "config.json" differ in {key}'
    assert file_checks.check_record(conversion_of(extended)) == Finding("record", "failed", problem)


FILES = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "README.md", "model.safetensors")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["changed", "missing"])
def test_files_that_changed_or_are_missing(extended, what, name):
    """The card may be edited or missing; weights have a separate check."""
    conversion = conversion_of(extended)
    if what == "missing":
        (extended / name).unlink()
    else:
        (extended / name).write_bytes((extended / name).read_bytes() + b" ")
    finding = file_checks.check_files(conversion)
    if name == "README.md" or (what, name) == ("changed", "model.safetensors"):
        assert finding.status == "passed"
        assert ("was edited, which" in finding.detail) == ((what, name) == ("changed", "README.md"))
    else:
        assert (finding.status, finding.detail) == ("failed", f'{what}: "{name}"')


def test_unrecorded_files_are_reported(extended):
    (extended / ".gitattributes").write_text("")
    assert file_checks.check_files(conversion_of(extended)).status == "passed"
    (extended / "deep").mkdir()
    for name in ("model-2.safetensors", "deep/config.json"):
        (extended / name).write_text("")
    finding = file_checks.check_files(conversion_of(extended))
    assert finding.detail == 'not recorded: "deep/config.json", "model-2.safetensors"'


@pytest.mark.parametrize(("name", "status"), [("evaluation/report.json", "passed"), ("evaluations/x.json", "failed")])
@pytest.mark.parametrize("what", ["changed", "missing", "not recorded"])
def test_a_folder_that_is_about_to_be_written_again_is_not_checked(extended, name, status, what):
    (extended / name).parent.mkdir()
    (extended / name).write_text("{}")
    manifest = read_json(extended / "ctxext.json")
    if what != "not recorded":
        change_json(extended / "ctxext.json", files={**manifest["files"], name: "0" * 64})
    if what == "missing":
        (extended / name).unlink()
    assert file_checks.check_files(conversion_of(extended, rewritten="evaluation")).status == status
    assert file_checks.check_files(conversion_of(extended)).detail == f'{what}: "{name}"'


@pytest.fixture
def sharded(extended):
    """A checkpoint with three weight files and their stamps, `a` with a digest."""
    content = (extended / "model.safetensors").read_bytes()
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in names:
        (extended / name).write_bytes(content)
    (extended / "model.safetensors").unlink()
    return extended, names


@pytest.mark.parametrize("known", [(), (0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("touched", [(), (0,), (1,), (2,)])
def test_weights_by_digest_or_by_stamp(sharded, known, touched):
    """The digest decides; files without one are compared by size and timestamp."""
    folder, names = sharded
    stamps = {name: stamp_of(folder / name) for name in names}
    for number in touched:
        stamps[names[number]][1] -= 5_000_000_000
    weights = {name: digest(folder / name) if number in known else None for number, name in enumerate(names)}
    change_json(folder / "ctxext.json", weights=weights, stamps=stamps)
    finding = file_checks.check_weights(conversion_of(folder))
    if {*touched} - {*known}:
        assert finding.status == "failed"
        assert finding.detail.startswith("modified after they were recorded")
        assert [name in finding.detail for name in names] == [number in touched for number in range(3)]
    elif len(known) < 3:
        assert finding.status == "not checked"
        assert f"recorded for {3 - len(known)} of 3 file(s)" in finding.detail
    else:
        assert (finding.status, finding.detail) == ("passed", "3 file(s) match the record")
    for number in known:
        change_json(folder / "ctxext.json", weights={**weights, names[number]: "0" * 64})
        finding = file_checks.check_weights(conversion_of(folder))
        assert (finding.status, finding.detail) == ("failed", f'changed: "{names[number]}"')


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("against", ["nothing", "a copy", "itself", "a folder without it"])
def test_what_is_compared_in_full_may_be_newer_but_not_larger(converted, llama_source, tmp_path, against, size):
    folder, name = converted("yarn"), "model.safetensors"
    then = stamp_of(folder / name)
    weights = {name: None}
    change_json(folder / "ctxext.json", weights=weights, stamps={name: [then[0] + size, then[1] - 5_000_000_000]})
    places = {"a copy": llama_source, "itself": folder}
    if against == "a folder without it":
        places[against] = make_llama(tmp_path / "other")
        (places[against] / name).rename(places[against] / "pytorch_model.safetensors")
    source = open_checkpoint(str(places[against])) if against in places else None
    finding = file_checks.check_weights(conversion_of(folder, source=source))
    assert finding.status == ("not checked" if against == "a copy" and not size else "failed")


def planned(source, recipe) -> dict:
    """Return the config.json of a conversion."""
    return make_plan(open_checkpoint(str(source)), recipe).model.config


@pytest.mark.parametrize("key", ["auto_map", "ctxext_code", "rope_scaling", "rope_parameters", "hidden_act"])
def test_a_configuration_that_lacks_what_the_recipe_makes(originals, key):
    config = read_json(originals["mspoe"] / "config.json")
    assert file_checks.check_configuration(Conversion(Checkpoint("out", originals["mspoe"], config))).status == "passed"
    conversion = Conversion(Checkpoint("out", originals["mspoe"], {k: v for k, v in config.items() if k != key}))
    (finding,) = run.run_checks([file_checks.check_configuration], conversion)
    assert finding.status == "failed"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"AutoModelForCausalLM": "evil.Model"}, True),
        ({"AutoModelForTokenClassification": "other.Class"}, True),
        ({"AutoModelForTokenClassification": None}, False),
        ({"AutoConfig": "evil.Config"}, True),
    ],
)
def test_classes_of_heads_may_differ_by_version_and_no_others(originals, changes, named):
    config = read_json(originals["mspoe"] / "config.json")
    named_classes = {**config["auto_map"], **changes}
    config["auto_map"] = {auto: place for auto, place in named_classes.items() if place is not None}
    conversion = Conversion(Checkpoint("out", originals["mspoe"], config))
    finding = file_checks.check_configuration(conversion)
    assert f'"auto_map.{next(iter(changes))}" is' in finding.detail  # The record names all classes.
    vars(conversion)["manifest"] = {}
    finding = file_checks.check_configuration(conversion)
    assert ("auto_map" in finding.detail) == (finding.status == "failed") == named


def test_configurations_are_compared_key_by_key():
    """Differences are reported by their key at any depth; a missing key is no null, and true is no 1."""
    config = {"a": {"b": {"c": 1, "d": [1, 2]}}, "e": None, "f": True, "g": float("nan")}
    assert file_checks._differences(config, json.loads(json.dumps(config))) == {}
    changed = {"a": {"b": {"c": 2, "d": [2, 1]}, "x": "y" * 99}, "f": 1, "g": 0.5}
    different = file_checks._differences(changed, config)
    assert list(different) == ["a.b.c", "a.b.d", "a.x", "f", "g", "e"]
    line = file_checks._format(different)
    assert line.startswith('"a.b.c" is 2, not 1; "a.b.d" is [2, 1], not [1, 2]; "a.x" is "yyyy')
    assert line.endswith('…, not missing; "f" is 1, not true; "g" is 0.5, not NaN and 1 more')


@pytest.mark.parametrize(("length", "status"), [(512, "passed"), (512.0, "failed"), (512.5, "failed")])
def test_a_length_is_a_whole_number(originals, length, status):
    config = {**read_json(originals["yarn"] / "config.json"), "max_position_embeddings": length}
    (finding,) = run.run_checks([file_checks.check_lengths], Conversion(Checkpoint("out", originals["yarn"], config)))
    assert finding.status == status


@pytest.mark.parametrize("kind", ["yarn", "mspoe"])
@pytest.mark.parametrize("name", ["mspoe.py", "modeling_ctxext.py", "helper.py", "deep/method.py"])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_code_that_is_ours_and_code_that_is_not(converted, kind, name, is_recorded):
    """Unneeded files with names of ctxext's code belong to the source if recorded; otherwise they are stray."""
    folder = converted(kind)
    needed = {path.name for path in folder.glob("*.py")}
    assert file_checks.check_code(conversion_of(folder)).status == "passed"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x = 1\n")
    manifest = read_json(folder / "ctxext.json")
    files = {**manifest["files"], **({name: "0" * 64} if is_recorded else {})}
    change_json(folder / "ctxext.json", files=files)
    finding = file_checks.check_code(conversion_of(folder))
    if name in needed:
        assert finding.status == "failed"
        assert f'differs from this version\'s code: "{name}"' in finding.detail
    elif name in ("mspoe.py", "modeling_ctxext.py") and name not in files:
        detail = f'the recipe needs no code, but the checkpoint contains "{name}"'
        assert (finding.status, finding.detail) == ("failed", detail)
    else:
        assert finding.status == "passed"
        assert finding.detail.endswith(f'; also contains code of its source: "{name}"')


def test_each_file_of_code_must_be_there(converted):
    folder = converted("mspoe")
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        path.unlink()
        finding = file_checks.check_code(conversion_of(folder))
        assert finding.status == "failed"
        assert f'missing: "{path.name}"' in finding.detail
        path.write_bytes(content)


# Expected values for loaded models

RIGHT, WRONG = "right", "wrong"


@pytest.mark.parametrize(
    ("modules", "status"),
    [
        ([("model.rotary_emb", "", RIGHT)], "passed"),
        ([("model.rotary_emb", "", WRONG)], "failed"),
        ([("model.rotary_emb", "", RIGHT), ("model.other.rotary_emb", "", WRONG)], "failed"),
        ([("model.rotary_emb", "", "longer")], "failed"),
        ([("model.rotary_emb", "", "shorter")], "failed"),
        ([("model.rotary_emb", "", "louder")], "failed"),
        ([("model.rotary_emb", "", "no number")], "failed"),
        ([("model.rotary_emb", "full_attention", WRONG)], "failed"),
        ([("model.rotary_emb", "full_attention", RIGHT), ("model.rotary_emb", "sliding_attention", WRONG)], "passed"),
        ([("model.rotary_emb", "sliding_attention", WRONG)], "not checked"),
        *(([(f"model.{tower}.rotary_emb", "", WRONG)], "not checked") for tower in ("vision", "visual", "audio")),
        ([("model.rotary_emb_local", "", WRONG), ("model.rotary_emb", "", RIGHT)], "passed"),
        ([], "not checked"),
    ],
)
def test_which_rotary_embeddings_are_compared(originals, monkeypatch, modules, status):
    conversion = conversion_of(originals["yarn"])
    wanted, scaling = run.expected_rotation(conversion.recipe, conversion.plain_model, conversion.expected_model, 128)
    made = {
        RIGHT: (wanted, scaling),
        WRONG: ([*wanted[:-1], 1.0001 * wanted[-1]], scaling),
        "longer": ([*wanted, wanted[-1]], scaling),
        "shorter": (wanted[:-1], scaling),
        "louder": (wanted, 1.0001 * scaling),
        "no number": ([*wanted[:-1], float("nan")], scaling),
    }
    entries = [
        {"module": name, "layer_type": kind, "frequencies": made[what][0], "scaling": made[what][1]}
        for name, kind, what in modules
    ]
    report = LoadReport(name="LlamaForCausalLM", rotary=entries)
    monkeypatch.setattr(conversion_module, "load_isolated", lambda *_args, **_options: report)
    assert run.check_frequencies(conversion).status == status


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({}, ""),
        ({"at": "long"}, "would differ from yarn ×4 by"),
        ({"at": "short"}, "would differ from yarn ×4 by"),
        ({"scaling": 1.001}, "would differ from yarn ×4 by 1.0e-03"),
        ({"frequency": float("nan")}, "would differ from yarn ×4 by inf"),
        ({"scaling": float("nan")}, "would differ from yarn ×4 by inf"),
        ({"lacks": True}, "would differ from yarn ×4 by inf"),
        ({"as_before": True}, "yarn ×4 would have no effect"),
        ({"none": True}, "it has no rotary embedding"),
        ({"sliding": 1.0}, ""),
        ({"sliding": 1.01}, "of its sliding layers would change too"),
        ({"local": 1.01}, "of its sliding layers would change too"),
        ({"other": 1.01}, "would differ from yarn ×4 by"),
    ],
)
def test_what_transformers_makes_of_a_schedule_is_held_against_the_recipe(originals, monkeypatch, what, told):
    """Inside the length and at its end, all embeddings change except those of sliding layers."""
    conversion = conversion_of(originals["yarn"])
    recipe, plain, stock = conversion.recipe, conversion.plain_model, conversion.expected_model
    before = tuple(sorted(rotation.expected_frequencies((), plain.rotary, 128)[0]))

    def rotations(config, lengths):
        assert lengths == [64, 512]
        if what.get("none"):
            return {length: [] for length in lengths}
        is_source, by_length = config is plain.config, {}
        for length in lengths:
            wanted, factor = rotation.expected_rotation(recipe, plain, stock, length)
            row, factor = sorted(wanted), factor * what.get("scaling", 1.0)
            if what.get("at") == {64: "short", 512: "long"}[length]:
                row[0] *= 1.01
            row[-1] *= what.get("frequency", 1.0)
            if is_source or what.get("as_before"):
                row, factor = before, 1.0
            rows = [rotation.Rotation("model.rotary_emb", "", tuple(row[: -1 if what.get("lacks") else None]), factor)]
            names = {"sliding": ("model.rotary_emb", "sliding_attention"), "local": ("model.rotary_emb_local", "")}
            for kind, place in {**names, "other": ("model.second", "")}.items():
                if kind in what:
                    rest = tuple(one * (1.0 if is_source else what[kind]) for one in before)
                    rows.append(rotation.Rotation(*place, rest, 1.0))
            by_length[length] = rows
        return by_length

    monkeypatch.setattr(rotation, "rotations", rotations)
    if told:
        with pytest.raises(CtxextError, match=told):
            rotation.check_rotation(recipe, plain.config, plain, stock)
    else:
        assert rotation.check_rotation(recipe, plain.config, plain, stock) < 1e-9
    code_alone = Recipe([MsPoE(first_layer=0, head_order="fixed")])
    assert rotation.check_rotation(code_alone, plain.config, plain, plain) is None


def compared(source, monkeypatch, answer, *, free=2**40, code=0, errors="", output="loaded\n"):
    """Compare a checkpoint with a recipe by a fake result of the process."""
    result = types.SimpleNamespace(returncode=code, stdout=output + json.dumps(answer), stderr=errors)
    monkeypatch.setattr(isolated_checks, "run_isolated", lambda *_: result)
    monkeypatch.setattr(isolated_checks.psutil, "virtual_memory", lambda: types.SimpleNamespace(available=free))
    checkpoint = open_checkpoint(str(source))
    plan = make_plan(checkpoint, Recipe([method_named("self-extend")(factor=4)]))
    return isolated_checks.compare_logits(source, checkpoint, plan.recipe, plan.model, plan.stock)


def test_memory_for_two_copies_in_float32(llama_source, monkeypatch):
    needed = 2 * 4 * open_checkpoint(str(llama_source)).num_parameters
    answer = {"difference": 0.0, "scale": 1.0, "change": 2.0, "attention": 0.0, "decoding": ""}
    for free, is_skipped in ((needed / 0.8 * 0.99, True), (needed / 0.8 * 1.01, False), (needed, True)):
        assert bool(compared(llama_source, monkeypatch, answer, free=free).skipped) == is_skipped


@pytest.mark.parametrize(
    ("difference", "scale", "attention", "refused"),
    [
        (1e-3, 20.0, 0.0, ""),
        (1e-3, 5.0, 0.0, "logits of the converted model differ from the reference by 2.0e-04"),
        (1e-5, 0.0, 0.0, ""),
        (2e-4, 0.0, 0.0, "logits of the converted model differ from the reference by 2.0e-04"),
        (1e-5, 1.0, 9e-5, ""),
        (1e-5, 1.0, 2e-4, "attention outputs of the converted model differ from the reference by 2.0e-04"),
        (1.0, 1.0, 1.0, "logits of the converted model differ from the reference by 1.0e\\+00"),
        (float("nan"), 1.0, 0.0, "logits of the converted model differ from the reference by nan"),
        (0.0, 1.0, float("nan"), "attention outputs of the converted model differ from the reference by nan"),
    ],
)
def test_differences_are_relative_and_the_larger_counts(
    llama_source, monkeypatch, difference, scale, attention, refused
):
    answer = {"difference": difference, "scale": scale, "change": 0.5, "attention": attention, "decoding": ""}
    if refused:
        with pytest.raises(CtxextError, match=refused):
            compared(llama_source, monkeypatch, answer)
    else:
        verification = compared(llama_source, monkeypatch, answer)
        assert verification.difference == max(difference / (scale or 1.0), attention)
        assert verification.change == 0.5


def test_the_error_names_the_checkpoint_or_the_check(llama_source, monkeypatch):
    """The checkpoint if it did not load; otherwise the check itself."""
    with pytest.raises(CtxextError, match="does not load in a clean process: why"):
        compared(llama_source, monkeypatch, {}, code=1, errors="first\nwhy\n", output="")
    with pytest.raises(CtxextError, match="The expected logits could not be computed: why"):
        compared(llama_source, monkeypatch, {}, code=1, errors="first\nwhy\n", output="loaded\n")
    with pytest.raises(CtxextError, match='"llama" does not support self-extend: of norms'):
        compared(llama_source, monkeypatch, {"refused": "of norms"})


@pytest.mark.parametrize("length", [128, 1024, 2**20])
def test_positions_of_the_tokens_of_the_check(llama_source, length):
    """Most are where the method's rules change, the others are pairs over the whole context."""
    checkpoint = open_checkpoint(str(llama_source))
    plan = make_plan(checkpoint, Recipe([method_named("self-extend")(factor=length / 32)]))
    steps, reach = plan.model.code["steps"], plan.model.rotary.context_length
    positions = isolated_checks._positions(plan.recipe, plan.model.rotary, steps)
    places = isolated_checks.reference_of(plan.recipe.steps[0]).places(steps[0], reach)
    assert positions == sorted({*positions})
    assert {*places[:48]} <= {*positions}
    room = 64 - len({*places[:48]})
    assert room >= 16
    spread = [reach * number // room for number in range(0, room, 2)]
    assert all({place, place + 1} <= {*positions} for place in spread)
    yarn = make_plan(checkpoint, Recipe([Yarn(factor=4)]))
    assert isolated_checks._positions(yarn.recipe, yarn.model.rotary, []) == list(range(64))


# Passed arguments, and errors of checks


def test_revision_and_token_are_passed_on(llama_source, monkeypatch):
    """The revision is that of OUT; the token is used for both."""
    calls, local = [], open_checkpoint(str(llama_source))

    def opened(name, **options):
        calls.append((name, options.get("revision"), options.get("token")))
        return dataclasses.replace(local, name=name)

    monkeypatch.setattr(run, "open_checkpoint", opened)
    run.verify("me/out", against="you/source", revision="v1", token="hf_x", load=False)
    assert calls == [("me/out", "v1", "hf_x"), ("you/source", None, "hf_x")]


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError, OSError])
def test_what_cannot_be_read_is_a_failure_of_its_check(llama_source, error):
    def check_strings(_):
        raise error(5, "Input/output error", "model.safetensors")

    def check_none(_):
        return None

    def check_words(_):
        raise CtxextError("No words.")

    findings = run.run_checks([check_strings, check_none, check_words], conversion_of(llama_source))
    read = Finding("strings", "failed", '"model.safetensors" cannot be read: Input/output error')
    assert findings == [read, Finding("words", "failed", "No words.")]
    passed = [Finding("a", status, "") for status in ("passed", "not checked")]
    assert run.failures([*passed, read]) == [read]


@pytest.mark.parametrize(
    ("recorded", "noted", "training"),
    [
        ({"steps": 3}, {"steps": 4}, {"steps": 3}),
        (None, {"steps": 4}, {"steps": 4}),
        ({"steps": 3}, None, {"steps": 3}),
        (None, None, {}),
    ],
)
def test_a_training_is_known_from_either_record(extended, recorded, noted, training):
    change_json(extended / "ctxext.json", finetune=recorded)
    change_json(extended / "config.json", ctxext={**read_json(extended / "config.json")["ctxext"], "finetune": noted})
    assert training_of(conversion_of(extended)) == training


def test_what_describes_far_more_than_it_holds_is_not_loaded(extended, monkeypatch):
    """Checked first, so that it is not loaded even if its code may run."""
    change_json(extended / "config.json", hidden_size=32_768, intermediate_size=100_000, num_hidden_layers=400)
    monkeypatch.setattr(isolated_checks, "run_script", None)
    for leave in (False, True):
        assert "describes far more weights" in conversion_of(extended, trust_remote_code=leave).load_report.error


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
def test_logits_are_compared_with_the_steps_that_transformers_supports(converted, monkeypatch, leave, is_own):
    """Yarn besides code of ctxext remains in the stock configuration, and third-party code runs from its folder."""
    folder, asked = converted("mspoe"), []
    recipe = Recipe([Yarn(factor=4), MsPoE(first_layer=0, head_order="fixed")])
    model = recipe.edit(conversion_of(folder).plain_model)
    conversion = Conversion(Checkpoint("out", folder, model.config), trust_remote_code=leave)
    monkeypatch.setattr(conversion_module, "runs_only_own_code", lambda _: is_own)
    monkeypatch.setattr(conversion_module, "load_isolated", lambda *_args, **_options: LoadReport())

    def compare(*given, **options):
        asked.append((*given, options))
        return isolated_checks.Verification(difference=1e-6)

    vars(conversion)["recipe"], vars(conversion)["expected_model"] = recipe, model
    vars(conversion)["may_load"], vars(conversion)["load_report"] = True, LoadReport()
    monkeypatch.setattr(run, "compare_logits", compare)
    monkeypatch.setattr(Conversion, "has_recipe", True)
    assert run.check_logits(conversion).status == "passed"
    ((where, source, steps, result, stock, options),) = asked
    assert (where, source, steps, result) == (folder, conversion.checkpoint, recipe, model)
    assert options == {"foreign": leave and not is_own}
    assert (stock.rotary.rope_type, stock.rotary.parameters["factor"], stock.code) == ("yarn", 4.0, {})


# Weights against a source


def weights(folder, files) -> Checkpoint:
    """Write a checkpoint of small tensors: tensors by name, by file name."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, numbers in files.items():
        held = {tensor: torch.tensor([float(number)]) for tensor, number in numbers.items()}
        (save_file if name.endswith(".safetensors") else torch.save)(held, folder / name)
    return open_checkpoint(str(folder))


ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(
    ("files", "status", "trained", "told"),
    [
        ({"model.safetensors": {"a": 1, "b": 2}}, "passed", "passed", "all 2 tensors"),
        ({ONE: {"b": 2}, TWO: {"a": 1}}, "passed", "passed", "all 2 tensors"),
        ({"model.safetensors": {"a": 1, "b": 3}}, "failed", "passed", "1 of 2 tensors differ: b"),
        ({"model.safetensors": {"a": 1}}, "failed", "failed", 'missing: "b"'),
        ({"model.safetensors": {"a": 1, "b": 2, "c": 3}}, "failed", "failed", 'added: "c"'),
        ({ONE: {"a": 1, "b": 2}, TWO: {"b": 2}}, "failed", "failed", "which another file contains too"),
        ({"model.safetensors": {"a": 1, "b": 2}, "pytorch_model.bin": {"a": 9}}, "passed", "passed", "all 2 tensors"),
        ({"pytorch_model.bin": {"a": 1, "b": 2}}, "passed", "passed", "all 2 tensors"),
        ({"pytorch_model.bin": {"a": 1, "b": 3}}, "failed", "passed", "1 of 2 tensors differ: b"),
    ],
)
def test_which_tensors_count_and_which_may_differ(tmp_path, files, status, trained, told, is_trained):
    source = weights(tmp_path / "source", {"model.safetensors": {"a": 1, "b": 2}})
    out = weights(tmp_path / "out", files)
    if is_trained:
        out.config["ctxext"] = {"finetune": {"steps": 3}}
    (finding,) = run.run_checks([file_checks.check_against], Conversion(out, source))
    assert (finding.status, told in finding.detail) == (trained if is_trained else status, True), finding


@pytest.mark.parametrize(
    ("files", "status", "told"),
    [
        ({"a": 3, "b": 2}, "passed", "rewritten by the recipe: a"),
        ({"a": 3}, "failed", 'missing: "b"'),
        ({"a": 3, "b": 3}, "failed", "2 of 2 tensors differ"),
        ({"a": 3, "b": 2, "c": 1}, "failed", 'added: "c"'),
    ],
)
def test_a_recipe_that_writes_a_tensor_excuses_no_other(tmp_path, monkeypatch, files, status, told):
    source = weights(tmp_path / "source", {"model.safetensors": {"a": 1, "b": 2}})
    out = weights(tmp_path / "out", {"model.safetensors": files})
    monkeypatch.setattr(Conversion, "new_tensors", ["a"])
    finding = file_checks.check_against(Conversion(out, source))
    assert (finding.status, told in finding.detail) == (status, True), finding


@pytest.mark.parametrize("extra", ["nothing", "in the result", "in the source"])
def test_files_shared_on_disk_are_equal_if_no_other_weights_exist(tmp_path, extra):
    source = weights(tmp_path / "source", {ONE: {"a": 1}, TWO: {"b": 2}})
    out = weights(tmp_path / "out", {})
    for name in (ONE, TWO):
        if (name, extra) != (TWO, "in the source"):
            os.link(source.folder / name, out.folder / name)
    if extra == "in the result":
        other = weights(tmp_path / "other", {"model.safetensors": {"c": 3}})
        (other.folder / "model.safetensors").rename(out.folder / "model.safetensors")
    finding = file_checks.check_against(Conversion(open_checkpoint(str(out.folder)), source))
    assert finding.status == ("passed" if extra == "nothing" else "failed")
    assert {"nothing": "the same files", "in the result": 'added: "c"', "in the source": 'missing: "b"'}[
        extra
    ] in finding.detail


# Results of a clean process for a loaded model


@pytest.mark.parametrize(
    ("code", "output", "errors", "told"),
    [
        (-9, "", "half a line", "loading was stopped by signal 9, possibly out of memory"),
        (1, "", "Traceback\nValueError: why\n", "it does not load: ValueError: why"),
        (1, "", "", "it does not load: no message"),
        (0, 'noise\n{"name": "X", "parameters": 3}\n', "warning", ""),
    ],
)
def test_how_a_clean_process_ended(llama_source, monkeypatch, code, output, errors, told):
    calls = []

    def answer(*words):
        calls.append(json.loads(pathlib.Path(words[1]).read_text()))
        return types.SimpleNamespace(returncode=code, stdout=output, stderr=errors)

    monkeypatch.setattr(isolated_checks, "run_isolated", answer)
    for foreign in (True, False):
        report = isolated_checks.load_isolated(open_checkpoint(str(llama_source)), foreign=foreign)
        assert report == (LoadReport(told) if told else LoadReport(name="X", parameters=3))
    expected = {"check": "load", "auto": "AutoModelForCausalLM"}
    assert [call.pop("folder") == str(llama_source.resolve()) for call in calls] == [True, False]
    assert calls == [{**expected, "trust": trust} for trust in (True, False)]


def test_every_rotary_embedding_is_reported_with_its_frequencies():
    """By layer type if a module serves several; other buffers and tables are not inverse frequencies."""
    import torch

    def module(**values):
        built = torch.nn.Module()
        for name, value in values.items():
            if isinstance(value, list):
                built.register_buffer(name, torch.tensor(value))
            else:
                setattr(built, name, value)
        return built

    model = torch.nn.Module()
    model.plain = module(inv_freq=[1.0, 0.5], original_inv_freq=[2.0], attention_scaling=1.5)
    model.bare = module(inv_freq=[0.25])
    model.none = module(inv_freq=[0.125], attention_scaling=None)
    model.table = module(inv_freq=[[1.0, 2.0]])
    model.typed = module(
        full_attention_inv_freq=[4.0],
        full_attention_attention_scaling=3.0,
        sliding_attention_inv_freq=[8.0],
        sliding_attention_attention_scaling=1.0,
        attention_scaling=9.0,
    )
    entries = [tuple(entry.values()) for entry in rotary_modules(model)]
    assert entries == [
        ("plain", "", [1.0, 0.5], 1.5),
        ("bare", "", [0.25], 1.0),
        ("none", "", [0.125], 1.0),
        ("typed", "full_attention", [4.0], 3.0),
        ("typed", "sliding_attention", [8.0], 1.0),
    ]
