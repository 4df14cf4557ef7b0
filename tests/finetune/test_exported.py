"""--to: the same run as a configuration of another trainer, held against its own schema where it is installed."""

import json

import pytest
import yaml

LORA = ("--length", "64", "--rank", "8", "--alpha", "4", "--targets", "q_proj,v_proj", "--dora", "--steps", "30")
LOOP = ("--batch-size", "6", "--micro-batch", "2", "--learning-rate", "1e-3", "--warmup", "0.12", "--beta2", "0.95")
UNSAID = ("--keep-short", "--perturb-positions", "--start-length", "16", "--train-norms", "--save-minutes", "5")
RECORDS = {
    "text": {"text": "w2 w3"},
    "chat": {"messages": [{"role": "user", "content": "w2"}, {"role": "assistant", "content": "w3"}]},
    "prompt-completion": {"prompt": "w2", "completion": "w3"},
    "sharegpt": {"conversations": [{"from": "human", "value": "w2"}, {"from": "gpt", "value": "w3"}]},
    "alpaca": {"instruction": "w2", "output": "w3"},
}


@pytest.fixture
def exported(base, run, tmp_path, monkeypatch):
    """The configuration that a command line writes, and what is said of it."""
    monkeypatch.chdir(tmp_path)

    def export(trainer, *words, form="text"):
        (tmp_path / "data.jsonl").write_text(json.dumps(RECORDS[form]) + "\n")
        command = ("finetune", base, "out", "--data", "data.jsonl", "--to", trainer, *words, "--overwrite", "--json")
        said = json.loads(run(*command).stdout)
        return yaml.safe_load((tmp_path / f"out.{trainer}.yaml").read_text()), said["otherwise"]

    return export


def check(trainer, content):
    """Load it as the trainer does, if it is here; it must know every word."""
    if trainer == "axolotl":
        schema = pytest.importorskip("axolotl.utils.schemas.config").AxolotlInputConfig
        assert set(content) <= set(schema.model_fields)
        loaded = schema(**content)
        return {name: getattr(loaded, name) for name in content}
    trl = pytest.importorskip("trl")
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig))
    # Without an accelerator its default, bf16, is refused.
    words = ["--config", "out.trl.yaml", "--use_cpu", "true", "--bf16", "false"]
    parsed = parser.parse_args_and_config(words, fail_with_unknown_args=True)
    return {name: getattr(part, name) for part in parsed for name in content if hasattr(part, name)}


def test_every_choice_is_said_or_named(exported):
    numbers = {"gradient_accumulation_steps": 3, "learning_rate": 1e-3, "adam_beta2": 0.95, "max_steps": 30}
    lora = {"lora_r": 8, "lora_alpha": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    theirs = {
        "axolotl": {"sequence_len": 64, "micro_batch_size": 2, "peft_use_dora": True, "warmup_ratio": 0.12},
        "trl": {"max_length": 64, "per_device_train_batch_size": 2, "use_dora": True, "warmup_steps": 4},
    }
    for trainer, own in theirs.items():
        content, otherwise = exported(trainer, *LORA, *LOOP, *UNSAID)
        wanted = numbers | lora | own
        assert {name: content[name] for name in wanted} == wanted
        lost = [line.removesuffix(" cannot be said there") for line in otherwise if line.startswith("--")]
        names = ["--start-length 16", "--short-share 0.2", "--keep-short", "--perturb-positions", "--train-norms"]
        assert sorted(lost) == sorted([*names, "--save-minutes 5.0"])


@pytest.mark.parametrize("trainer", ["axolotl", "trl"])
def test_the_trainer_reads_it(exported, trainer):
    for form in RECORDS:
        if trainer == "trl" and form in ("alpaca", "sharegpt"):
            continue
        content, _ = exported(trainer, *LORA, *LOOP, form=form)
        loaded = check(trainer, content)
        for name in ("learning_rate", "max_steps", "lora_r", "gradient_accumulation_steps", "adam_beta2"):
            assert float(loaded[name]) == content[name]
    check(trainer, exported(trainer, "--full", "--epochs", "2", "--rate-floor", "0.1", "--pack", "restart")[0])


def test_skipped_positions_are_axolotls_too(exported):
    words = ("--length", "128", "--positions", "pose", "--window", "32", "--serve-factor", "8")
    content, otherwise = exported("axolotl", *words)
    assert (content["use_pose"], content["pose_max_context_len"], content["sequence_len"]) == (True, 128, 32)
    assert otherwise[:2] == ["--short-share 0.2 cannot be said there", "--serve-factor 8.0 cannot be said there"]
    assert "--positions pose cannot be said there" in exported("trl", *words)[1]
    assert "--positions random cannot be said there" in exported("axolotl", "--positions", "random")[1]


def test_nothing_of_the_run_is_dropped_silently(exported, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"text": "Another text."}\n')
    content, otherwise = exported(
        "trl", "--dtype", "fp32", "--eval", "short", "--eval-data", "other.jsonl", form="chat"
    )
    assert content["report_to"] == "none"
    for words in (
        "--dtype fp32 cannot",
        "--eval short cannot",
        "--eval-data other.jsonl cannot",
        "the weight of a mess",
    ):
        assert any(line.startswith(words) for line in otherwise), (words, otherwise)
    # With --full nothing is said of numbers that only LoRA has.
    assert not [line for line in exported("axolotl", "--full")[1] if line.startswith("--alpha")]


def test_records_that_the_trainer_would_misread_are_refused(exported, base, run, tmp_path):
    exported("trl")
    asked = {"prompt": RECORDS["chat"]["messages"][:1], "completion": RECORDS["chat"]["messages"][1:]}
    for trainer, other, record, message in (
        ("axolotl", "trl", asked, "as texts, and they are lists of messages"),
        ("trl", "axolotl", RECORDS["sharegpt"], 'TRL leaves the role "human"'),
    ):
        (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
        refused = run("finetune", base, "it", "--data", "data.jsonl", "--to", trainer)
        assert message in str(refused.exception) + refused.stderr
        assert run("finetune", base, "it", "--data", "data.jsonl", "--to", other).exit_code == 0


def test_a_folder_called_dot_names_the_file(exported, base, run, tmp_path, monkeypatch):
    exported("trl")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert run("finetune", base, ".", "--data", "../data.jsonl", "--to", "trl").exit_code == 0
    assert (tmp_path / "here.trl.yaml").is_file()


def test_what_cannot_be_written_is_refused(exported, base, run):
    exported("trl")
    for words, message in (
        (("trl",), "is there already"),
        (("it",), '--to "it" is not known'),
        (("trl", "--overwrite", "--format", "alpaca"), "reads no records of alpaca"),
        (("trl", "--overwrite", "--text-field", "body"), "are is not known"),
        (("trl", "--overwrite", "--data", "data.tsv"), '"data.tsv" would be read with commas there'),
    ):
        refused = run("finetune", base, "out", "--data", "data.jsonl", "--to", *words)
        assert refused.exit_code == 1
        assert message in str(refused.exception) + refused.stderr
