"""Every option of every command reaches what the command runs, at a value other than its default.

Each command's work is replaced by a recorder; what arrives is compared with what these tables say, word by word. An
option that no table names fails `test_every_option_is_in_a_table`.
"""

import dataclasses
import json
import shlex
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from ctxext.api import Recipe
from ctxext.cli.app import app
from ctxext.cli.methods import option_owners
from ctxext.cli.output import resuming_command
from ctxext.compare.candidates import CompareOptions
from ctxext.converters.convert import convert, plan_conversion
from ctxext.converters.options import Calibration, ConvertOptions
from ctxext.files.output_directory import OverwriteOptions
from ctxext.finetune.documents import TrainingData
from ctxext.finetune.options import RunOptions, TrainingOptions
from ctxext.finetune.question_file import QuestionOptions
from ctxext.merge.options import MergeOptions
from ctxext.methods import MsPoE, Yarn
from ctxext.models.model import Loading
from ctxext.publish.upload_plan import PushOptions, UploadPlan
from ctxext.search.options import SearchOptions, StudyPlace
from ctxext.server.client import ServerOptions
from ctxext.tasks.settings import Settings

OUTPUT = {"as_json", "quiet", "verbose", "help", "help_all"}
TOKEN = "hf_GivenGiven"
HUB = ("--revision", "v1", "--token", TOKEN)
GIVEN = {"revision": "v1", "token": TOKEN}

EVAL = (
    *("eval", "one", "two", "--task", "kv,needle", "-t", "graphwalks", "-t", "passkey,ruler-qa-1,ruler-qa-2"),
    *("-t", "documents,perplexity,longppl,nolima,babilong-qa1,longbench-v2,ruler2-qa-hard"),
    *("--lengths", "2k,1k", "--depths", "0,30", "--num-processes", "1"),
    *("--samples", "3", "--seed", "5", "--allow-beyond", "--original-length", "4k", "--needles", "7"),
    *("--kv-ids", "number", "--haystack", "hay.txt", "--documents", "asked.jsonl", "--data", "me/texts"),
    *("--filler", "prose", "--repeat-question", "--reason", "--evaluator", "it", "--key-tokens", "keys"),
    *("-t", "niah-single-2", "--essays", "essays.json", "--squad", "squad.json", "--hotpot", "hotpot.json"),
    *("--words", "words.json", "--nolima", "books", "--babilong", "facts"),
    *("--longbench-v2", "choices", "--chain-of-thought", "--ruler2", "sets"),
    *("--stride", "9", "--harness", "longbench,other", "--generate", "--no-chat-template", "--batch-size", "6"),
    *("--device", "cpu", "--dtype", "bf16", "--attn", "eager", "--trust-remote-code", "--engine", "vllm"),
    *("--engine-args", '{"seed": 2}', "--out", "there", "--resume", "--overwrite", *HUB),
)
EVAL_IN_TIME = ("eval", "one", "--minutes", "2.5")
EVAL_IN_CHAT = ("eval", "one", "--prompt", "chat", "--no-think")
COMPARE_IN_CHAT = ("compare", "one", "--target-length", "1k", "--prompt", "chat", "--no-think")
URL = "http://127.0.0.1:1/v1"
SERVER = ("--server", URL, "--model", "it", "--api-key", TOKEN, "--timeout", "9")
EVAL_SERVER = ("eval", "one", *SERVER, "--num-concurrent", "3", "--max-retries", "7", "--out", "there")
VERIFY_SERVER = ("verify", "out", *SERVER, "--minutes", "5", "--trust-remote-code", *HUB)
OF_SERVER = {"server": URL, "model": "it", "api_key": TOKEN, "timeout": 9.0}
_ENGINE = ("--allow-beyond", "--engine", "vllm", "--engine-args", '{"seed": 2}')
_ASKED = tuple(word for word in EVAL[3:] if word not in _ENGINE)
COMPARE = ("compare", "one", "--target-length", "64k", "--methods", "yarn,dca", "--methods", "mine.yaml", *_ASKED)
SEARCH = (
    *("search", "some", "best.yaml", "--target-length", "64k", "--trials", "3", "--minutes", "2"),
    *("--methods", "yarn,pi", "--original-length", "4k", "--keep-short", "0.5", "--samples", "4"),
    *("--lengths", "8k,4k", "--data", "me/texts", "--checked", "9", "--seed", "5", "--no-chat-template"),
    *("--study", "mine", "--storage", "journal", "--resume", "--overwrite", "--device", "cpu", "--dtype", "fp32", *HUB),
)
PUSH = (
    *("push", "out", "me/name", "--private", "--revision", "v1", "--create-pr", "--message", "Longer"),
    *("--report", "there", "--adapter", "--base", "me/base", "--license", "mit", "--no-verify", "--token", TOKEN),
)
VERIFY = (
    *("verify", "out", "--against", "some", "--no-load", "--trust-remote-code", "--engine", "vllm"),
    *("--engine-args", '{"max_model_len": 64}', *HUB),
)
MERGE = ("merge", "some", "adapter", "out", "--strength", "0.5", "--overwrite", "--overwrite-anything", *HUB)
INSPECT = ("inspect", "some", "--original-length", "4k", *HUB)
CONVERT = (
    *("convert", "some", "out", "-m", "mspoe", "--head-order", "calibrated", "--overwrite", "--overwrite-anything"),
    *("--replace-scaling", "--allow-shorter", "--original-length", "4k", "--link", "hard", "--digest"),
    *("--no-verify", "--calibration-text", "me/texts", "--device", "cpu", "--dtype", "fp32", *HUB),
)
AUTO = (
    *("convert", "some", "-m", "auto", "--target-length", "64k", "--original-length", "4k"),
    *("--device", "cpu", "--dtype", "fp32", *HUB, "--trials", "3", "--minutes", "2"),
)
TRAININGS = (
    {
        **{"length": 512, "start_length": 64, "original_length": 128, "learn": "all", "steps": 7, "epochs": 2.0},
        **{"batch_size": 6, "pack": "run-on", "short_share": 0.3, "positions": "pose", "window": 256, "rank": 3},
        **{"alpha": 5.0, "dropout": 0.1, "targets": ("q_proj", "v_proj")},
        **{"train_norms": True, "train_embeddings": True, "micro_batch": 3},
        **{"learning_rate": 0.01, "schedule": "linear", "warmup": 0.2, "optimizer": "adafactor", "weight_decay": 0.1},
        **{"beta2": 0.9, "checkpointing": True, "seed": 4, "save_every": 20},
        **{"keep_best": True, "report_to": "tensorboard", "quantize": "4bit"},
        **{"device": "cpu", "dtype": "bf16", "rate_floor": 0.1, "minutes": 3.0, "method": "yarn", "factor": 4.0},
    },
    {
        **{"full": True, "strength": 0.25, "keep_short": True, "stages_length": 1024, "stages_width": 64},
        "stages": ({"steps": 2, "learning_rate": 0.1}, {"steps": 3, "rate_floor": 0.2}),
    },
    {"sequence_parallel": 4, "low_memory": True},
)
"""What options of a training make; in three parts, as some cannot stand together."""


def words_of(options):
    """The options of a command line that make these."""
    texts = {name: ",".join(value) if name == "targets" else str(value) for name, value in options.items()}
    texts |= {name: json.dumps(value) for name, value in options.items() if name == "stages"}
    pairs = [(f"--{name.replace('_', '-')}", text) for name, text in texts.items()]
    return [word for flag, text in pairs for word in ((flag,) if text == "True" else (flag, text))]


FINETUNE = (
    *("finetune", "some", "out", "--data", "a.txt:0.7", "--data", "b.txt:0.3", "--format", "text"),
    *("--text-field", "body", "--split", "mine", "--skip-bad-rows", "--eval-data", "c.txt", "--questions", "0.3"),
    *("--no-merge", "--resume", "--overwrite", "--overwrite-anything", *HUB),
)
QUESTIONS = (
    *("questions", "some", "a.txt", "out.jsonl", "--length", "4k", "--count", "7", "--seed", "5"),
    *("--overwrite", "--overwrite-anything", *HUB),
)
MERGED = (*(word for word in FINETUNE if word != "--no-merge"), "--eval", "short")
OTHERS = (
    ("convert", "--recipe", "--dry-run", "--copy"),
    ("push", "--dry-run"),
    ("demo", "--samples"),
    ("compare", "--minutes"),
    ("finetune", "--config", "--preset", "--without", "--schema", "--dry-run", "--export-config"),
)
"""Options that have tests of their own."""


class Arrived(Exception):
    """Ends a command where its work would begin."""


def arriving(*words, **named):
    raise Arrived(words, named)


@pytest.fixture
def arrived(run, tmp_path, monkeypatch):
    """Run a command line whose work is a recorder; gives what the recorder was called with."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "c.txt"):
        Path(name).write_text(name)
    for name in ("books", "facts", "choices", "sets"):
        Path(name).mkdir()

    def call(words, place):
        module, _, name = place.rpartition(".")
        monkeypatch.setattr(import_module(module), name, arriving)
        with pytest.raises(Arrived) as caught:
            run(*words)
        return caught.value.args

    return call


@pytest.mark.parametrize(
    "command", ["eval", "compare", "search", "push", "verify", "merge", "inspect", "convert", "finetune", "questions"]
)
def test_every_option_is_in_a_table(command):
    lines = (
        EVAL,
        EVAL_IN_TIME,
        EVAL_IN_CHAT,
        COMPARE_IN_CHAT,
        EVAL_SERVER,
        VERIFY_SERVER,
        COMPARE,
        SEARCH,
        PUSH,
        VERIFY,
        MERGE,
        INSPECT,
        CONVERT,
        AUTO,
        FINETUNE,
        MERGED,
        QUESTIONS,
        *OTHERS,
    )
    words = {word for line in lines if line[0] == command for word in line}
    words |= {word for options in TRAININGS for word in words_of(options)} if command == "finetune" else set()
    of_methods = set(option_owners()) if command == "convert" else set()
    missing = [
        one.name
        for one in typer.main.get_command(app).commands[command].params
        if one.param_type_name == "option" and one.name not in OUTPUT | of_methods
        if not words & {*one.opts, *one.secondary_opts}
    ]
    assert missing == []


WHAT_IS_ASKED = {
    "tasks": (
        *("kv", "needle", "graphwalks", "passkey", "ruler-qa-1", "ruler-qa-2", "documents", "perplexity", "longppl"),
        *("nolima", "babilong-qa1", "longbench-v2", "ruler2-qa-hard", "niah-single-2"),
    ),
    **{"lengths": (1024, 2048), "depths": (0.0, 0.3), "samples": 3, "seed": 5},
    **{name: Path(f"{name}.json") for name in ("essays", "squad", "hotpot", "words")},
    **{
        "repeat_question": True,
        "reason": True,
        "evaluator": "it",
        "key_tokens": Path("keys"),
        "nolima": Path("books"),
        "babilong": Path("facts"),
        "longbench_v2": Path("choices"),
        "chain_of_thought": True,
        "ruler2": Path("sets"),
        "num_needles": 7,
        "kv_ids": "number",
        "haystack": Path("hay.txt"),
        "data": "me/texts",
    },
    **{"documents": Path("asked.jsonl"), "stride": 9, "generate": True, "batch_size": 6},
    **{"harness": ("longbench", "other"), "original_length": 4096},
}


def test_compare(arrived):
    (source,), named = arrived(COMPARE, "ctxext.compare.run.compare")
    assert source == "one"
    options = {**WHAT_IS_ASKED, "target_length": 65536, "methods": ("yarn", "dca", "mine.yaml")}
    assert named.pop("options") == CompareOptions(**options)
    assert callable(named.pop("progress"))
    assert callable(named.pop("notify"))
    loading = Loading("cpu", "bf16", False, "eager", True, **GIVEN)
    assert named == {"loading": loading, "out": Path("there"), "resume": True, "overwrite": True}
    _, named = arrived(("compare", "one", "--target-length", "1k", "--minutes", "7"), "ctxext.compare.run.compare")
    assert named["options"] == CompareOptions(target_length=1024, minutes=7.0)
    assert named["out"] == Path("report")


def test_eval(arrived):
    (models, settings), named = arrived(EVAL, "ctxext.evaluate.run.evaluate")
    assert models == ["one", "two"]
    assert settings == Settings(**WHAT_IS_ASKED, allow_beyond=True)
    progress = named.pop("progress")
    assert callable(progress)
    loading = Loading("cpu", "bf16", False, "eager", True, "vllm", {"seed": 2}, **GIVEN)
    assert named == {"loading": loading, "out": Path("there"), "resume": True, "overwrite": True, "minutes": None}


def test_eval_within_a_time_limit(arrived):
    assert arrived(EVAL_IN_TIME, "ctxext.evaluate.run.evaluate")[1]["minutes"] == 2.5


def test_the_form_of_prompts(arrived):
    (_, settings), _ = arrived(EVAL_IN_CHAT, "ctxext.evaluate.run.evaluate")
    assert settings == Settings(prompt="chat", no_think=True)
    _, named = arrived(COMPARE_IN_CHAT, "ctxext.compare.run.compare")
    assert named["options"] == CompareOptions(target_length=1024, prompt="chat", no_think=True)


@pytest.mark.parametrize(
    ("words", "tokens"), [(("--reason",), 4096), (("--reason", "900"), 900), (("--reason", "8k", "--seed", "1"), 8192)]
)
def test_reasoning_may_have_a_number_of_tokens(arrived, words, tokens):
    (models, settings), _ = arrived(("eval", *words, "one"), "ctxext.evaluate.run.evaluate")
    assert models == ["one"]
    assert settings.reason == tokens


def test_eval_of_a_server(arrived):
    _, named = arrived(EVAL_SERVER, "ctxext.evaluate.run.evaluate")
    assert named["loading"] == Loading(server=ServerOptions(**OF_SERVER, num_concurrent=3, max_retries=7))


def test_a_folder_is_chosen_by_default(arrived):
    Path("report").mkdir()
    Path("report-2").mkdir()
    (_, settings), named = arrived(("eval", "one"), "ctxext.evaluate.run.evaluate")
    assert settings == Settings(), "evaluate chooses the tasks"
    assert (named["out"], named["resume"], named["overwrite"]) == (Path("report-3"), False, False)


@pytest.mark.parametrize(("words", "processes"), [((), "2"), (("--resume",), "1")])
def test_a_run_that_others_join_must_name_its_folder(run, monkeypatch, words, processes):
    monkeypatch.setenv("WORLD_SIZE", processes)
    result = run("eval", "one", "--task", "needle", *words)
    assert result.exception.message == "Missing option --out."


def test_search(arrived):
    (source, options), named = arrived(SEARCH, "ctxext.cli.search.search")
    assert source == "some"
    assert options == SearchOptions(
        target_length=65536,
        trials=3,
        minutes=2.0,
        methods=("yarn", "pi"),
        keep_short=0.5,
        samples=4,
        lengths=(4096, 8192),
        data="me/texts",
        seed=5,
        checked=9,
        original_length=4096,
    )
    assert callable(named.pop("watch"))
    assert named == {
        "out": Path("best.yaml"),
        "study": StudyPlace(name="mine", storage="journal"),
        "resume": True,
        "overwrite": True,
        "loading": Loading("cpu", "fp32", chat_template=False, revision="v1", token=TOKEN),
    }


def test_a_stopped_search_resumes_with_its_settings(run, arrived, monkeypatch):
    """The command that it shows asks the same of the same model; a token is not shown."""

    def stopped(*given, **named):
        raise KeyboardInterrupt

    line = [word for word in SEARCH if word not in ("--resume", "--overwrite")]
    first, named = arrived([word for word in line if word not in ("--token", TOKEN)], "ctxext.cli.search.search")
    monkeypatch.setattr(import_module("ctxext.cli.search"), "search", stopped)
    (shown,) = [one for one in run(*line).stderr.splitlines() if one.startswith("Stopped. Resume with: ctxext ")]
    again, more = arrived(shlex.split(shown)[4:], "ctxext.cli.search.search")
    assert again == first
    assert {**more, "watch": None} == {**named, "watch": None, "resume": True}


def test_a_command_to_repeat_contains_no_secret(monkeypatch):
    secrets = ["--token", TOKEN, f"--token={TOKEN}", "--api-key", TOKEN, f"--api-key={TOKEN}"]
    monkeypatch.setattr("sys.argv", ["ctxext", "eval", *secrets, "demo", "--overwrite", "--samples=2"])
    assert resuming_command("--out", "r") == ["ctxext", "eval", "demo", "--samples=2", "--out", "r", "--resume"]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ((), StudyPlace(path=Path("best.db"))),
        (("--study", "mine.sqlite"), StudyPlace(path=Path("mine.sqlite"))),
        (("--storage", "mysql://host/x"), StudyPlace(name="best", storage="mysql://host/x")),
    ],
)
def test_the_option_study_sets_the_storage(arrived, words, place):
    _, named = arrived(("search", "some", "best.yaml", "--target-length", "2k", *words), "ctxext.cli.search.search")
    assert named["study"] == place
    assert (named["resume"], named["overwrite"]) == (False, False)


def test_push(arrived, monkeypatch):
    (folder, name, options), named = arrived(PUSH, "ctxext.publish.push.prepare")
    assert (folder, name) == (Path("out"), "me/name")
    assert callable(named.pop("progress"))
    assert named == {}
    assert options == PushOptions(
        private=True,
        revision="v1",
        create_pr=True,
        message="Longer",
        adapter=True,
        base="me/base",
        license="mit",
        report=Path("there"),
        check=False,
    )
    _, named = arrived((*PUSH, "--dry-run"), "ctxext.publish.push.prepare")
    assert callable(named.pop("progress"))
    assert named == {}, "a dry run verifies the same"
    plan = UploadPlan(Path("out"), (), {}, warnings=("Mind this.",))
    monkeypatch.setattr(import_module("ctxext.publish.push"), "prepare", lambda *given, **more: plan)
    given, named = arrived(PUSH, "ctxext.publish.push.send")
    assert given == (plan, "me/name", options)
    assert named.pop("token") == TOKEN
    assert all(map(callable, named.values()))
    assert named.keys() == {"progress", "notify"}


def test_each_option_of_push_arrives(arrived):
    (_, _, options), _ = arrived(("push", "out", "me/name"), "ctxext.publish.push.prepare")
    assert options == PushOptions()
    for word, name in (("--private", "private"), ("--create-pr", "create_pr"), ("--adapter", "adapter")):
        (_, _, options), _ = arrived(("push", "out", "me/name", word), "ctxext.publish.push.prepare")
        assert options == PushOptions(**{name: True})


def test_verify(arrived, monkeypatch):
    monkeypatch.setattr(import_module("ctxext.engines.vllm"), "vllm_version", lambda: "1")
    (folder,), named = arrived(VERIFY, "ctxext.verify.run.verify")
    assert callable(named.pop("progress"))
    assert (folder, named) == ("out", {"against": "some", "load": False, "trust_remote_code": True, **GIVEN})
    monkeypatch.setattr(import_module("ctxext.verify.run"), "verify", lambda *given, **more: [])
    opened = []
    monkeypatch.setattr("ctxext.cli.verify.open_checkpoint", lambda name, **more: opened.append((name, more)) or name)
    given, named = arrived(VERIFY, "ctxext.cli.verify._in_engine")
    assert opened == [("out", GIVEN), ("some", {"token": TOKEN})], "the revision is that of OUT"
    assert (given, named) == (("out", "some"), {"trust_remote_code": True, "arguments": {"max_model_len": 64}})


def test_verify_of_a_server(arrived, monkeypatch):
    opened = []
    monkeypatch.setattr("ctxext.cli.verify.open_checkpoint", lambda name, **more: opened.append((name, more)) or name)
    (checkpoint, server, minutes, _), named = arrived(VERIFY_SERVER, "ctxext.cli.verify_server.verify_server")
    assert (checkpoint, server, minutes) == ("out", ServerOptions(**OF_SERVER), 5)
    assert opened == [("out", GIVEN)]
    assert named == {"trust_remote_code": True}
    (_, _, minutes, _), _ = arrived(("verify", "out", "--server", URL), "ctxext.cli.verify_server.verify_server")
    assert minutes == 3


def test_merge(arrived):
    given, named = arrived(MERGE, "ctxext.merge.run.merge")
    assert callable(named.pop("progress"))
    assert given == ("some", Path("adapter"), Path("out"))
    assert named == {**GIVEN, "options": MergeOptions(strength=0.5, overwrite=True, overwrite_anything=True)}
    _, named = arrived((*MERGE[:4], "--overwrite"), "ctxext.merge.run.merge")
    assert named["options"] == MergeOptions(overwrite=True)


def test_inspect(arrived):
    expected = ("some",), {**GIVEN, "weights": False, "original_length": 4096}
    assert arrived(INSPECT, "ctxext.cli.inspect.open_checkpoint") == expected


def test_convert(arrived):
    (source, out, recipe), named = arrived(CONVERT, "ctxext.cli.convert.run")
    assert (source, out, recipe.to_dict()) == ("some", Path("out"), Recipe([MsPoE(head_order="calibrated")]).to_dict())
    assert callable(named.pop("progress"))
    assert callable(named.pop("notify"))
    options = ConvertOptions(
        overwrite=True,
        overwrite_anything=True,
        link="hard",
        digest=True,
        check=False,
        replace_scaling=True,
        allow_shorter=True,
        original_length=4096,
        calibration=Calibration(text=Path("me/texts"), device="cpu", dtype="fp32"),
    )
    assert named == {**GIVEN, "options": options}
    (source, out, recipe), named = arrived((*CONVERT, "--dry-run"), "ctxext.cli.convert.plan_conversion")
    assert (source, out, recipe.to_dict()) == ("some", Path("out"), Recipe([MsPoE(head_order="calibrated")]).to_dict())
    assert callable(named.pop("notify"))
    assert named == {**GIVEN, "options": options}
    unlinked = [word for word in CONVERT if word not in ("--link", "hard")]
    assert arrived((*unlinked, "--copy"), "ctxext.cli.convert.run")[1]["options"].link == "copy"
    assert arrived(CONVERT[:7], "ctxext.cli.convert.run")[1]["options"] == ConvertOptions()


def test_each_option_of_a_conversion_does_its_part(monkeypatch):
    """What `convert` makes of its options: one object, or its fields as keywords."""
    calls, checkpoint = {}, SimpleNamespace(folder=Path("folder"))
    waiting, recipe = Recipe([MsPoE(head_order="calibrated")]), Recipe([Yarn(factor=4)])

    def record(name, result):
        def recorder(*given, **named):
            calls[name] = (given, named)
            return result

        monkeypatch.setattr(import_module("ctxext.converters.convert"), name, recorder)

    record("open_checkpoint", checkpoint)
    record("check_out", None)
    record("calibrate_recipe", recipe)
    monkeypatch.setattr(import_module("ctxext.converters.convert"), "make_plan", arriving)
    fields = {"overwrite": True, "replace_scaling": True, "allow_shorter": True, "original_length": 4096}
    options = ConvertOptions(**fields)
    for given in ({"options": options}, fields, {"options": ConvertOptions(overwrite=True), **fields}):
        with pytest.raises(Arrived) as planned:
            convert("some", "out", waiting, **given, **GIVEN)
        assert planned.value.args == ((checkpoint, recipe), {"replace_scaling": True, "allow_shorter": True})
        assert calls["open_checkpoint"] == (("some",), {**GIVEN, "original_length": 4096})
        assert calls["check_out"] == ((Path("out"), Path("folder"), options), {})
        assert calls["calibrate_recipe"] == ((checkpoint, waiting, options, None), {})
    with pytest.raises(Arrived) as planned:
        plan_conversion("some", "out", recipe, options=options, **GIVEN)
    assert planned.value.args == ((checkpoint, recipe), {"replace_scaling": True, "allow_shorter": True})
    assert calls["open_checkpoint"] == (("some",), {**GIVEN, "weights": False, "original_length": 4096})
    with pytest.raises(TypeError, match="overwite"):
        convert("some", "out", recipe, overwite=True)


@pytest.mark.parametrize(
    ("words", "budget"),
    [
        (("--trials", "3", "--minutes", "2"), (3, 1.2)),
        (("--trials", "3"), (3, None)),
        (("--minutes", "2"), (None, 1.2)),
        ((), (None, 3.0)),
    ],
)
def test_convert_by_a_search(arrived, monkeypatch, words, budget):
    (source, options), named = arrived((*AUTO[:-4], *words), "ctxext.search.run.search")
    assert source == "some"
    expected = {"target_length": 65536, "trials": budget[0], "minutes": budget[1], "original_length": 4096}
    assert options == SearchOptions(**expected), "what is left is for comparing, should that be too little"
    assert callable(named.pop("watch"))
    assert named == {"loading": Loading("cpu", "fp32", revision="v1", token=TOKEN)}


@pytest.mark.parametrize("expected", TRAININGS)
def test_finetune(arrived, monkeypatch, expected):
    planned, words = [], words_of(expected)
    base = SimpleNamespace(conversion=None)
    import_module("ctxext.finetune.dry_run")  # Imported later, it would keep the replaced function.
    monkeypatch.setattr(import_module("ctxext.finetune.base"), "open_model", lambda *given: (base, given[1]))
    monkeypatch.setattr(import_module("ctxext.evaluate.plan"), "plan_questions", lambda *given: planned.append(given))
    monkeypatch.setattr(TrainingData, "reader", lambda self, options: (self, options))
    monkeypatch.setattr(TrainingOptions, "rules", ())
    (model, out, chosen, options), named = arrived((*FINETUNE, *words), "ctxext.finetune.run.finetune")
    assert (model, out) == ("some", Path("out"))
    assert options == TrainingOptions(**expected)
    assert chosen == TrainingData(("a.txt:0.7", "b.txt:0.3"), "text", "body", "mine", True, 0.3)
    assert named.pop("eval_data") == TrainingData(("c.txt",), "text", "body", None, True)
    assert callable(named.pop("progress"))
    assert callable(named.pop("notify"))
    flags = dict.fromkeys(("resume", "overwrite", "overwrite_anything"), True)
    assert named == {"run": RunOptions(**GIVEN, **flags, merge=False)}
    assert planned == []
    _, named = arrived((*MERGED, *words), "ctxext.finetune.run.finetune")
    assert named["run"].merge
    asked = Settings(
        tasks=("short",), **{name: expected[name] for name in ("seed", "original_length") if name in expected}
    )
    assert planned == [(["some"], asked, Loading(**GIVEN))]
    (model, reader, options), named = arrived((*FINETUNE, *words, "--dry-run"), "ctxext.finetune.dry_run.plan_training")
    assert (model, options) == ("some", TrainingOptions(**expected))
    assert reader == [(chosen, stage) for stage in options.each_stage]
    assert callable(named.pop("reporter").notify)
    assert named == {**GIVEN, "merge": False}


def test_questions(arrived):
    words, named = arrived(QUESTIONS, "ctxext.finetune.question_file.write_questions")
    assert words == ("some", "a.txt", Path("out.jsonl"), QuestionOptions(length=4096, count=7, seed=5))
    assert callable(named.pop("progress"))
    assert named == {**GIVEN, "overwrite": OverwriteOptions(overwrite=True, overwrite_anything=True)}
    words, _ = arrived(QUESTIONS[:4], "ctxext.finetune.question_file.write_questions")
    assert words[3] == QuestionOptions(length=2048, count=300, seed=0)


def test_every_choice_of_a_training_is_made_here():
    """By a value other than its default; two that no option names are worked out from the model and its data."""
    made = {name: value for expected in TRAININGS for name, value in expected.items()}
    fields = {field.name: field.default for field in dataclasses.fields(TrainingOptions)}
    assert fields.keys() - made.keys() == {"short_length", "piece"}
    assert [name for name, value in made.items() if value == fields[name]] == []


def test_a_result_and_its_base_answer_the_same_questions(run, tmp_path, monkeypatch):
    """With the seed of the training, and only where there is a checkpoint to ask."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(import_module("ctxext.evaluate.plan"), "plan_questions", lambda *given: planned.append(given))
    monkeypatch.setattr(import_module("ctxext.finetune.run"), "finetune", lambda *given, **more: SimpleNamespace())
    results = []
    monkeypatch.setattr("ctxext.cli.finetune.print_result", lambda *given, **more: results.append(more))
    planned, asked, sealed = [], [], []

    def plan_run(models, settings, *, loading, out, minutes, progress):
        asked.append((models, settings, loading, out))
        return SimpleNamespace(report=lambda: {"models": [], "settings": {}})

    monkeypatch.setattr(import_module("ctxext.evaluate.run"), "plan_run", plan_run)
    upload_plan = import_module("ctxext.publish.upload_plan")
    monkeypatch.setattr(upload_plan, "pack", lambda out, name, options: (out, options.report))
    monkeypatch.setattr(upload_plan, "seal", sealed.append)
    line = ("finetune", "some", "out", "--data", "demo")
    run(*line, "--eval", "short,needle", "--seed", "7", "--revision", "v1")
    run(*line, "--no-merge")
    questions = (Settings(tasks=("short", "needle"), seed=7), Loading(revision="v1"))
    assert planned == [(["some"], *questions)]
    assert asked == [(["some", "out"], *questions, Path("out/evaluation"))]
    assert sealed == [(Path("out"), Path("out/evaluation"))], "the results are in the card"
    assert results == [{"merge": True, "report": {"models": [], "settings": {}}}, {"merge": False, "report": None}]


def test_the_whole_context_is_evaluated_with_the_same_options(run, tmp_path):
    """The next step of a short evaluation repeats the command with the context length, and with a new folder."""
    options = ["--task", "kv", "--kv-ids", "number", "--samples", "1", "--depths", "2"]
    line = ["eval", "demo", "--lengths=256", *options, "--seed", "7"]
    typed = [*line, "--out", str(tmp_path / "out"), "--overwrite"]
    (shown,) = [one for one in run(*typed).stderr.splitlines() if one.startswith("Evaluate the whole context: ")]
    expected = ["ctxext", *[word for word in line if word != "--lengths=256"], "--lengths", "512"]
    assert shlex.split(shown)[4:] == expected
