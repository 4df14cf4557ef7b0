"""Configurations of other trainers: each value of a run arrives there, is listed as missing, or is refused."""

import ast
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainingArguments

from ctxext.api import Recipe, TrainingData, TrainingOptions, convert
from ctxext.errors import CtxextError
from ctxext.finetune.base import open_model
from ctxext.finetune.prepare import add_adapter
from ctxext.finetune.trainers.export import TRAINERS, export_config
from ctxext.finetune.trainers.run import make_run, training_arguments
from ctxext.methods import AdjustedBase, DynamicNtk, Llama3, LongRope, SelfExtend, Yarn
from pages import ROOT, blocks
from small_llama import change_json
from tiny_base import save_llama

CHAT = {"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}]}
RECORDS = {
    "chats.jsonl": CHAT,
    "more.jsonl": CHAT,
    "tools.jsonl": {**CHAT, "tools": []},
    "texts.jsonl": {"body": "w3 w4"},
    "sharegpt.jsonl": {"conversations": [{"from": "human", "value": "w3"}, {"from": "gpt", "value": "w4"}]},
    "alpaca.jsonl": {"instruction": "w3", "output": "w4"},
    "pairs.jsonl": {"prompt": "w3", "completion": "w4"},
}
OPTIONS = {
    **{"length": 96, "steps": 41, "batch_size": 6, "micro_batch": 2, "rank": 7, "alpha": 21.0, "dropout": 0.125},
    **{"targets": ("q_proj", "v_proj"), "learning_rate": 3e-4, "rate_floor": 0.1, "warmup": 0.1, "weight_decay": 0.05},
    **{"beta2": 0.95, "seed": 5, "save_every": 13, "checkpointing": True, "optimizer": "adamw_8bit"},
}
HF = {
    **{"max_steps": 41, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "learning_rate": 3e-4},
    **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 5},
    **{
        "optim": "adamw_8bit",
        "weight_decay": 0.05,
        "adam_beta2": 0.95,
        "seed": 5,
        "save_steps": 13,
        "output_dir": "out",
    },
}
PEFT = {"r": 7, "lora_alpha": 21, "lora_dropout": 0.125, "target_modules": ["q_proj", "v_proj"]}
EXPECTED = {
    "axolotl": {
        **{"base_model": "base", "output_dir": "out", "sequence_len": 96, "lora_r": 7, "lora_alpha": 21},
        **{"lora_dropout": 0.125, "lora_target_modules": ["q_proj", "v_proj"], "max_steps": 41, "micro_batch_size": 2},
        **{"gradient_accumulation_steps": 3, "learning_rate": 3e-4, "lr_scheduler": "cosine_with_min_lr"},
        **{"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "warmup_steps": 5, "optimizer": "adamw_8bit"},
        **{"weight_decay": 0.05, "adam_beta2": 0.95, "seed": 5, "save_steps": 13, "gradient_checkpointing": True},
        **{"train_on_inputs": False, "sample_packing": False, "bf16": True, "adapter": "lora"},
    },
    "trl": {**HF, **PEFT, "model": "base", "max_length": 96, "assistant_only_loss": True, "packing": False},
    "unsloth": {
        **{**HF, **PEFT, "model_name": "base", "max_seq_length": 96, "max_length": 96, "random_state": 5},
        **{"use_gradient_checkpointing": "unsloth", "load_in_4bit": False, "assistant_only_loss": True},
    },
    "llama-factory": {
        **{**HF, "model_name_or_path": "base", "cutoff_len": 96, "lora_rank": 7, "lora_alpha": 21},
        **{"lora_dropout": 0.125, "lora_target": "q_proj,v_proj", "stage": "sft", "packing": False},
        **{"disable_gradient_checkpointing": False, "finetuning_type": "lora"},
    },
    "ms-swift": {
        **{**HF, "model": "base", "max_length": 96, "lora_rank": 7, "lora_alpha": 21, "lora_dropout": 0.125},
        **{"target_modules": ["q_proj", "v_proj"], "loss_scale": "default", "packing": False, "tuner_type": "lora"},
        **{"gradient_checkpointing": True, "data_seed": 5, "torch_dtype": "bfloat16"},
    },
}
"""Names and values by each trainer's own source, for the releases that it names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints and records that no test changes, in the working folder."""
    folder = tmp_path_factory.mktemp("trainers")
    save_llama(folder / "source")
    steps = {"base": Yarn(factor=4), "dynamic": DynamicNtk(factor=4), "code": SelfExtend(factor=4)}
    steps |= {"llama3": Llama3(factor=4), "abf": AdjustedBase(factor=4, theta=500000.0)}
    steps["longrope"] = LongRope(factor=4, long_factor=(4.0,) * 4)
    for name, step in steps.items():
        convert(str(folder / "source"), folder / name, Recipe([step]), check=False)
    # As model cards of Qwen3 describe it: the schedule is written, the length is not.
    schedule = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    change_json(save_llama(folder / "short") / "config.json", rope_parameters=schedule)
    for name, record in RECORDS.items():
        (folder / name).write_text(json.dumps(record) + "\n")
    for split in ("train", "test"):
        (folder / "splits").mkdir(exist_ok=True)
        (folder / "splits" / f"{split}.jsonl").write_text(json.dumps(CHAT) + "\n")
    (folder / "plain.txt").write_text("w3 w4\nw5\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def make(data=("chats.jsonl",), model="base", others=(), **options):
    names = {field.name for field in dataclasses.fields(TrainingData)}
    of_data = {name: value for name, value in options.items() if name in names}
    training = TrainingOptions(**{name: value for name, value in options.items() if name not in names})
    base, resolved = open_model(model, training, None, None)
    return make_run(base, Path("out"), resolved, TrainingData(tuple(data), **of_data), others)


def export(trainer, *args, **named):
    return export_config(TRAINERS[trainer], make(*args, **named))


def read_values(trainer, text):
    """The values of a configuration: YAML, or the arguments of all calls of a script."""
    if trainer not in ("trl", "unsloth"):
        return yaml.safe_load(text)
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    pairs = [keyword for call in calls for keyword in call.keywords if keyword.arg]
    values = {pair.arg: pair.value for pair in reversed(pairs)}
    return {
        name: ast.literal_eval(node) for name, node in values.items() if not isinstance(node, ast.Name | ast.Attribute)
    }


@pytest.mark.parametrize("trainer", TRAINERS)
def test_values_arrive(folder, trainer):
    values = read_values(trainer, export(trainer, **OPTIONS, short_share=0).text)
    expected = EXPECTED[trainer]
    assert {name: values.get(name) for name in expected} == expected
    assert not {name for name in values if "rope" in name or "model_max" in name or name == "max_model_len"}


CHANGES = {
    **{"length": 64, "learn": "all", "steps": 9, "epochs": 2.0, "minutes": 3.0, "batch_size": 4, "start_length": 16},
    **{"strength": 0.5, "sequence_parallel": 2, "low_memory": True},
    **{"short_share": 0.0, "keep_short": True, "pack": "restart", "positions": "pose", "method": "yarn", "rank": 3},
    **{"alpha": 5.0, "dropout": 0.25, "targets": ("q_proj",), "train_norms": True, "train_embeddings": True},
    **{"full": True, "micro_batch": 4, "learning_rate": 0.5, "schedule": "linear", "rate_floor": 0.25, "warmup": 0.5},
    **{"optimizer": "adafactor", "weight_decay": 0.25, "beta2": 0.5, "checkpointing": True, "seed": 9},
    **{"save_every": 7, "keep_best": True, "report_to": "wandb", "quantize": "4bit", "device": "cpu"},
    **{"dtype": "fp16", "stages": ({"steps": 3}, {"steps": 4})},
    **{"words": ("more.jsonl",), "split": "test", "skip_bad_rows": True, "questions": 0.5},
}
WITHOUT_EFFECT = {
    # Of the conversion, of resolved defaults, of memory alone, of the format that is found, and of stages' models.
    *("original_length", "factor", "window", "short_length", "piece", "record_format", "text_field", "records"),
    *("stages_length", "stages_width"),
}


def test_every_option_is_tried():
    fields = {field.name for owner in (TrainingOptions, TrainingData) for field in dataclasses.fields(owner)}
    assert fields == CHANGES.keys() | WITHOUT_EFFECT


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_option_is_lost(folder, trainer, name):
    """A value other than the default changes the configuration, or is listed; nothing is left out silently."""
    value = CHANGES[name]
    if name == "words":
        changed = export(trainer, value)
    elif name == "split" and trainer != "llama-factory":  # It refuses folders; a file has one split.
        changed = export(trainer, ("splits",), split=value)
        assert (f"split={value}" in changed.text.replace('"', "").replace(": ", "=")) == (trainer != "ms-swift")
    elif name == "split":
        return
    elif name == "method":
        changed = export(trainer, model="source", method=value)
    else:
        changed = export(trainer, **{name: value})
    assert changed.text != export(trainer).text
    listed = [line.partition(":")[0] for line in changed.missing]
    assert all(f"# No equivalent of {line}" in changed.text.splitlines() for line in changed.missing)
    word = {"positions": "positions pose", "device": "device cpu", "report_to": "report-to"}.get(
        name, name.replace("_", "-")
    )
    only = {
        "positions": ("axolotl",),
        "low_memory": ("axolotl",),
        "report_to": ("trl", "unsloth", "llama-factory", "ms-swift"),
    }
    only["split"] = ("axolotl", "trl", "unsloth")
    if name in ("stages", "questions", "keep_short", "start_length", "minutes", "device", "keep_best", "skip_bad_rows"):
        assert word in listed
    elif name in only:
        assert (word in listed) != (trainer in only[name])


@pytest.mark.parametrize(
    ("pack", "kind", "expected"),
    [
        ("run-on", "texts", {"trl": {"packing_strategy": "wrapped"}, "llama-factory": {"packing": True}}),
        ("restart", "chats", {
            "axolotl": {"sample_packing": True, "attn_implementation": "flash_attention_2"},
            "trl": {"packing": True, "packing_strategy": "bfd"},
            "unsloth": {"packing": True, "packing_strategy": "bfd"},
            "llama-factory": {"neat_packing": True, "flash_attn": "fa2", "cutoff_len": 129},
            "ms-swift": {"packing": True, "attn_impl": "flash_attention_2"},
        }),
        ("restart", "texts", {"trl": {"packing_strategy": "bfd_split"}}),
    ],
)  # fmt: skip
def test_packing(folder, pack, kind, expected):
    for trainer in TRAINERS:
        if trainer not in expected and (pack, kind) == ("restart", "texts"):
            continue
        exported = export(trainer, (f"{kind}.jsonl",), pack=pack, text_field="body")
        listed = any(line.startswith(f"pack {pack}") for line in exported.missing)
        assert listed == (trainer not in expected)
        values = read_values(trainer, exported.text)
        wanted = expected.get(trainer, {})
        assert {name: values.get(name) for name in wanted} == wanted


def test_formats(folder):
    """Keys of the data, by each trainer's own source."""
    for name in ("texts", "sharegpt", "alpaca"):
        for trainer in TRAINERS:
            text = export(trainer, (f"{name}.jsonl",), text_field="body").text
            values = read_values(trainer, text)
            if trainer == "axolotl":
                kind = {"texts": "completion", "sharegpt": "chat_template", "alpaca": "alpaca"}[name]
                assert values["datasets"][0]["type"] == kind
            elif trainer == "llama-factory":
                info = next(iter(json.loads(text.partition("same folder: ")[2].partition("\n")[0]).values()))
                assert info["file_name"] == f"{name}.jsonl"
                assert values["stage"] == ("pt" if name == "texts" else "sft")
                assert info.get("columns", {}).get("prompt") == {"texts": "body", "alpaca": "instruction"}.get(name)
            elif trainer == "ms-swift":
                assert values.get("columns") == ({"body": "response"} if name == "texts" else None)
                assert ("swift pt FILE" in text) == (name == "texts")
            else:
                assert ("def to_messages" in text) == (name != "texts")
                assert values.get("dataset_text_field") == ("body" if name == "texts" else None)
    assert "completion_only_loss=True" in export("trl", ("pairs.jsonl",)).text


@pytest.mark.parametrize("name", ["sharegpt", "alpaca"])
def test_records_become_messages(folder, name):
    """The function of a script gives the messages that ctxext trains on."""
    from ctxext.finetune.chats import RecordReader

    text = export("trl", (f"{name}.jsonl",)).text
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.Assign)][:2]
    module = ast.Module(
        [node for node in functions if "load_dataset" not in ast.unparse(node) and "SFT" not in ast.unparse(node)], []
    )
    names: dict = {}
    exec(compile(module, "script", "exec"), names)
    expected = RecordReader().read(RECORDS[f"{name}.jsonl"], "here")["messages"]
    made = names["to_messages"](RECORDS[f"{name}.jsonl"])["messages"]
    assert made == [{key: message[key] for key in ("role", "content")} for message in expected]


REFUSED = [
    ("axolotl", {"model": "code"}, "needs the Python code"),
    ("trl", {"model": "source", "method": "self-extend"}, "needs the Python code"),
    ("trl", {"model": "demo"}, "is part of ctxext"),
    ("trl", {"data": ("demo",)}, "generated during the training"),
    ("ms-swift", {"data": ("plain.txt",)}, "each of its lines"),
    ("axolotl", {"data": ("pairs.jsonl",)}, "no equivalent of records in the format prompt-completion"),
    ("unsloth", {"data": ("chats.jsonl", "texts.jsonl"), "text_field": "body"}, "in one format"),
    ("axolotl", {"alpha": 2.5}, "only an integer"),
    ("llama-factory", {"alpha": 2.5}, "only an integer"),
    ("llama-factory", {"data": ("texts.jsonl",), "text_field": "body", "pack": "restart"}, "no --pack restart"),
    ("llama-factory", {"data": ("splits",)}, "all files of a folder"),
    ("unsloth", {"model": "dynamic"}, "does not apply the schedule dynamic of llama"),
    ("unsloth", {"model": "longrope"}, "does not apply the schedule longrope of llama"),
    ("unsloth", {"model": "short"}, "declares 32 tokens, fewer than --length 128"),
]


@pytest.mark.parametrize(("trainer", "run", "reason"), REFUSED)
def test_silently_wrong_runs_are_refused(folder, trainer, run, reason):
    with pytest.raises(CtxextError, match=reason) as refused:
        export(trainer, **run)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("trainer", "run"),
    [
        *(("unsloth", {"model": model}) for model in ("base", "llama3", "abf")),
        *(("axolotl", {"model": model}) for model in ("dynamic", "longrope", "short")),
        ("axolotl", {"data": ("chats.jsonl", "texts.jsonl"), "text_field": "body"}),
        ("trl", {"alpha": 2.5}),
    ],
)
def test_right_runs_are_not_refused(folder, trainer, run):
    assert export(trainer, **run).text


def test_arguments_are_those_of_transformers(folder):
    """The installed TrainingArguments take the shared arguments, and PEFT the adapter's."""
    arguments = training_arguments(make(**OPTIONS))
    made = TrainingArguments(**{**arguments, "bf16": False}, use_cpu=True)
    names = {name: value for name, value in HF.items() if name != "lr_scheduler_type"}
    assert {name: getattr(made, name) for name in names} == names
    assert made.lr_scheduler_type == "cosine_with_min_lr"
    call = next(
        node
        for node in ast.walk(ast.parse(export("trl", **OPTIONS).text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LoraConfig"
    )
    adapter = LoraConfig(**{pair.arg: ast.literal_eval(pair.value) for pair in call.keywords})
    assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (7, 21, {"q_proj", "v_proj"})


def test_modules_to_save_are_those_of_finetune(folder):
    options = TrainingOptions(train_norms=True, train_embeddings=True, alpha=32.0)
    run = make(train_norms=True, train_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    saved = add_adapter(model, options).peft_config["default"].modules_to_save
    assert set(run.whole) == {name.rsplit(".", 1)[-1] for name in saved}
    assert "modules_to_save" in export("trl", train_norms=True).text
    assert run.whole
    assert not make(train_norms=False).whole


def test_the_command_prints_a_configuration(folder, run):
    words = ("finetune", "source", "out", "--data", "chats.jsonl", "--method", "yarn", "--factor", 4)
    done = run(*words, "--eval-data", "more.jsonl", "--export-config", "axolotl")
    assert done.exit_code == 0
    assert yaml.safe_load(done.stdout)["base_model"] == "source-yarn-128"
    assert "Convert first: ctxext convert source source-yarn-128 --method yarn --factor 4" in done.stderr
    assert "no equivalent in axolotl of eval-data" in done.stderr
    assert "ctxext merge source-yarn-128 out MERGED" in done.stderr
    assert not (folder / "out").exists()
    content = json.loads(run(*words, "--export-config", "trl", "--json").stdout)
    assert content["trainer"] == "trl"
    assert content["no_equivalent"]
    for more, message in ((["axolotol"], 'Unknown trainer "axolotol"'), (["trl", "--dry-run"], "cannot be combined")):
        refused = run(*words, "--export-config", *more)
        assert refused.exit_code == 1
        assert message in str(refused.exception)


def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "source", max_position_embeddings=8192)
    convert("source", tmp_path / "my-model-32k", Recipe([Yarn(factor=4)]), check=False)
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    shown = [block.text for block in blocks(ROOT / "docs" / "trainers.md") if block.kind in ("yaml", "python")]
    assert shown == [export(trainer, model="my-model-32k").text for trainer in TRAINERS]
