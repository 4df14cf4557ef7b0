"""Effects of training options: lengths and steps, the Trainer's arguments, the adapter, and messages."""

import contextlib
import dataclasses
import json
import math
import random
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.finetune import prepare, step_log
from ctxext.finetune.base import check_fits
from ctxext.finetune.batches import ModelInputs, draw_pose_positions, make_restarting_positions
from ctxext.finetune.data import DataReport, sequence_file
from ctxext.finetune.documents import Source, parse_source
from ctxext.finetune.dry_run import Plan, StepMeasurements
from ctxext.finetune.loss import PositionLosses
from ctxext.finetune.options import CHANGEABLE, Reporter, TrainingOptions
from ctxext.finetune.prepare import add_adapter, count_tokens, format_data_lines
from ctxext.finetune.run import _collect_settings, _make_notes
from ctxext.finetune.saves import Saves, find_newest_save
from ctxext.finetune.step_log import LiveLine
from ctxext.finetune.stopping import StopAfterStep
from ctxext.finetune.trainer import open_held_out
from ctxext.merge import run as card
from ctxext.report.colours import series_style
from ctxext.report.pictures import as_png, draw_training, smooth_training
from tiny_base import SIZES, arguments_of, make_base


def resolve(**choices) -> TrainingOptions:
    return TrainingOptions(**choices).resolve(window=1024, trained_length=128)


SETTLED = [
    ({}, {"length": 1024, "short_length": 128, "alpha": 32.0, "learning_rate": 2e-4, "window": None}),
    ({"full": True}, {"learning_rate": 2e-5}),
    ({"learning_rate": 0.5, "rank": 3, "alpha": 1.5}, {"learning_rate": 0.5, "alpha": 1.5}),
    ({"rank": 3}, {"alpha": 6.0}),
    ({"length": 64}, {"length": 64, "short_length": 64}),
    ({"short_length": 32}, {"short_length": 32}),
    ({"short_length": 5000}, {"short_length": 1024}),
    ({"positions": "pose"}, {"length": 1024, "window": 128, "short_length": 128}),
    ({"positions": "pose", "window": 4096}, {"window": 1024}),
    ({"positions": "pose", "length": 9000}, {"window": 128, "checkpointing": False}),
    ({"length": 4096}, {"checkpointing": False}),
    ({"length": 4097}, {"checkpointing": True}),
    ({"length": 4097, "checkpointing": False}, {"checkpointing": False}),
    ({"start_length": 1023}, {"start_length": 1023}),
    ({"start_length": 1024}, {"start_length": None}),
]


@pytest.mark.parametrize(("choices", "expected"), SETTLED)
def test_what_depends_on_the_base(choices, expected):
    options = resolve(**choices)
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"start_length": 1025}, "is longer than a sequence of 1024 tokens"),
        ({"start_length": 1025}, "If it comes from a preset, add --without start-length"),
        ({"rate_floor": 0.1, "schedule": "linear"}, "--rate-floor needs --schedule cosine"),
        ({"start_length": 129, "positions": "pose"}, "is longer than a sequence of 128 tokens"),
        ({"full": True, "targets": ("q_proj",)}, "for LoRA"),
        ({"batch_size": 6, "micro_batch": 4}, "not a multiple of --micro-batch"),
        ({"epochs": 0.0}, "above 0"),
        *(({name: 1.0}, "share from 0 to 1") for name in ("short_share", "warmup", "dropout", "beta2")),
        ({"rank": 0}, "--rank must be at least 1"),
        ({"learning_rate": -1.0}, "above 0"),
        ({"window": 64}, "--positions pose"),
        ({"full": True, "quantize": "4bit"}, "is for LoRA"),
        ({"pack": "restart", "positions": "pose"}, "restart needs --positions full"),
    ],
)
def test_choices_that_contradict_each_other(choices, message):
    with pytest.raises(CtxextError) as refused:
        resolve(**choices)
    assert message in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.parametrize("share", [0.0, 0.2, 0.3, 0.9])
@pytest.mark.parametrize("start", [None, 200, 300])
@pytest.mark.parametrize("steps", [1, 7, 40])
def test_every_step_has_its_length(share, start, steps):
    """Lengths double in equal parts of the steps up to the full one; short steps are spread evenly."""
    options = resolve(short_share=share, start_length=start, steps=steps, batch_size=3)
    grown = {None: [1024], 200: [200, 400, 800, 1024], 300: [300, 600, 1024]}[start]
    shorts = [step for step in range(steps) if math.floor((step + 1) * share) > math.floor(step * share)]
    full = [grown[math.ceil((step + 1) * len(grown) / steps) - 1] for step in range(steps)]
    lengths = [min(128, length) if step in shorts else length for step, length in enumerate(full)]
    assert [options.length_of_step(step) for step in range(steps)] == lengths
    assert full[-1] == 1024
    wanted = Counter()
    for length in lengths:
        wanted[length] += 3 * (1024 // length)
    assert options.count_sequences() == {1024: max(1, wanted[1024]), **{n: c for n, c in wanted.items() if n != 1024}}


def test_short_steps_help_if_they_differ():
    assert not any(resolve(length=128, short_share=0.5).is_short(step) for step in range(10))
    pose = resolve(positions="pose", short_share=0.5)
    assert [pose.is_short(step) for step in range(4)] == [False, True, False, True], "without skips"


@pytest.mark.parametrize(
    ("epochs", "sequences", "steps"), [(1.0, 16, 2), (1.0, 17, 3), (2.5, 16, 5), (0.01, 16, 1), (None, 16, 200)]
)
def test_epochs_come_to_whole_steps(epochs, sequences, steps):
    options = resolve(epochs=epochs).for_data(sequences)
    assert (options.steps, options.epochs) == (steps, None)
    if epochs:
        assert resolve(epochs=epochs).count_sequences() == {1024: 1 << 40, 128: 1 << 40}


@pytest.mark.parametrize(("length", "target"), [(4, 7), (4, 4), (1, 3), (5, 2)])
def test_pose_draws_every_cut_and_skip(length, target):
    seen = {tuple(draw_pose_positions(length, target, random.Random(seed))) for seed in range(400)}
    skips = range(max(0, target - length) + 1)
    cuts = range(1, max(1, length - 1) + 1)
    assert seen == {tuple(p if p < cut else p + skip for p in range(length)) for cut in cuts for skip in skips}


def test_pose_skips_are_uniform():
    """Section 3.2: up to 48 of them, so 24 in the mean."""
    skips = [draw_pose_positions(16, 64, random.Random(seed))[-1] - 15 for seed in range(2000)]
    assert (min(skips), max(skips)) == (0, 48)
    assert abs(sum(skips) / len(skips) - 24) < 1.5


def test_positions_restart_in_sequences_that_begin_within_a_document():
    assert make_restarting_positions([False, False, True, False, True, True]) == [0, 1, 0, 1, 0, 0]


def tiny(**changes):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


CHOSEN = {
    **{"steps": 30, "batch_size": 12, "micro_batch": 3, "learning_rate": 0.25, "schedule": "linear", "warmup": 0.11},
    **{"optimizer": "adafactor", "weight_decay": 0.5, "beta2": 0.8, "seed": 9},
    **{"save_every": 7, "report_to": "none", "device": "cpu", "dtype": "fp32", "length": 64},
}


def test_every_choice_is_the_trainer_s(tmp_path):
    made = arguments_of(tmp_path, 2, **CHOSEN)
    expected = {
        **{"max_steps": 30, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "learning_rate": 0.25},
        **{"warmup_steps": 4, "weight_decay": 0.5, "adam_beta1": 0.9, "adam_beta2": 0.8},
        **{"seed": 9, "save_steps": 7, "save_total_limit": 2, "logging_steps": 1, "logging_nan_inf_filter": False},
        **{"bf16": False, "fp16": False, "remove_unused_columns": False, "output_dir": str(tmp_path)},
    }
    assert {name: getattr(made, name) for name in expected} == expected
    assert (made.lr_scheduler_type.value, made.optim.value) == ("linear", "adafactor")
    constant = arguments_of(tmp_path, **{**CHOSEN, "schedule": "constant"})
    assert constant.lr_scheduler_type.value == "constant_with_warmup"
    assert constant.gradient_accumulation_steps == 4


@pytest.mark.parametrize(
    ("choices", "processes", "message"),
    [
        ({"batch_size": 6, "micro_batch": 2}, 2, "Use a multiple of 4"),
        ({"batch_size": 2}, 4, "Use a multiple of 4"),
        ({"optimizer": "adamw_torhc"}, 1, "adamw_torch"),
    ],
)
def test_what_cannot_be_shared_among_processes(choices, processes, message, tmp_path):
    with pytest.raises(CtxextError) as refused:
        arguments_of(tmp_path, processes, **choices)
    assert message in f"{refused.value.message} {refused.value.hint}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chosen", [True, False])
def test_every_choice_is_the_adapter_s(chosen, tied, monkeypatch):
    monkeypatch.setattr(prepare, "get_peft_model", lambda model, config: config)
    more = {"train_norms": True, "train_embeddings": True, "targets": ("q_proj",)}
    options = resolve(rank=3, alpha=7.0, dropout=0.25, **(more if chosen else {}))
    config = add_adapter(tiny(tie_word_embeddings=tied), options, whole=("down_proj.weight",))
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 7.0, 0.25)
    assert (config.use_rslora, config.use_dora, config.ensure_weight_tying) == (False, False, chosen and tied)
    assert (config.fan_in_fan_out, config.task_type) == (False, "CAUSAL_LM")
    whole = {f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)}
    norms = {
        "model.norm",
        *(f"model.layers.{n}.{name}_layernorm" for n in (0, 1) for name in ("input", "post_attention")),
    }
    assert set(config.modules_to_save) == whole | (norms | {"model.embed_tokens"} if chosen else set())
    if chosen:
        assert config.target_modules == {"q_proj"}
    else:
        assert len(config.target_modules) == 14
        assert not [name for name in config.target_modules if "lm_head" in name]


def test_norms_or_embeddings_alone(monkeypatch):
    monkeypatch.setattr(prepare, "get_peft_model", lambda model, config: config)
    assert add_adapter(tiny(), resolve(train_embeddings=True)).modules_to_save == ["model.embed_tokens"]
    assert len(add_adapter(tiny(), resolve(train_norms=True)).modules_to_save) == 5
    assert add_adapter(tiny(), resolve()).modules_to_save is None
    for target in ("proj", "o_prj", "elf_attn.q_proj"):
        with pytest.raises(CtxextError, match="matches no linear layer"):
            add_adapter(tiny(), resolve(targets=(target,)))


def data_report(**changes) -> DataReport:
    usual = {"num_documents": 10, "num_tokens": 2000, "num_sequences": 100, "num_shorter": {}, "num_learned": 102400}
    return DataReport(**{**usual, "num_short": 0, "num_long": 0, "num_dropped": 7, **changes})


FIRST = "data: 10 documents, 2,000 tokens → 100 sequences of 1,024; 7 tokens dropped"
LINES = [
    ({}, {"steps": 1}, [FIRST]),
    ({"num_in_all": 10, "num_tokens_in_all": 9999}, {"steps": 1}, [FIRST]),
    (
        {"num_in_all": 1000, "num_tokens_in_all": 9999},
        {"steps": 1},
        [
            "data: 10 of 1,000 documents (1.0 %), 2,000 of about 9,999 tokens → 100 sequences of 1,024; "
            "7 tokens dropped",
            "      less than a tenth of the documents is used; raise --steps or --batch-size to use more",
        ],
    ),
    (
        {"num_shorter": {"128": 50, "256": 0}, "num_learned": 54400, "num_padding": 10880},
        {"steps": 100, "short_share": 0.0},
        [
            FIRST,
            "      and 50 of 128, 0 of 256 tokens",
            "      loss computed on 50.0 % of tokens",
            "      no sequences of 256 tokens: those steps use 1,024",
            "      each sequence is used 8.0 times",
        ],
    ),
    ({"num_padding": 10240}, {"steps": 1}, [FIRST]),
    (
        {"num_padding": 10241},
        {"steps": 1},
        [FIRST, "      10 % padding; use --pack restart to pack documents"],
    ),
    ({"num_padding": 20480}, {"steps": 1, "pack": "run-on"}, [FIRST, "      20 % padding"]),
    (
        {"num_bad": 2, "first_bad": "line 3 is odd", "unused_fields": {"z": 1, "a": 2}, "num_short": 3, "num_long": 4},
        {"steps": 1},
        [
            FIRST,
            "      2 bad records skipped, the first: line 3 is odd",
            "      ignored fields: a, z",
            "      3 documents too short for a sequence; use --pack run-on to join them",
            "      4 documents with marked answers too long for a sequence",
        ],
    ),
]


@pytest.mark.parametrize(("counts", "choices", "lines"), LINES)
def test_the_report_of_the_data(counts, choices, lines):
    report = data_report(**counts)
    shorter = 50 * 128 if "num_shorter" in counts else 0
    assert count_tokens(report, 1024) == 102400 + shorter
    if shorter:
        report = dataclasses.replace(report, num_learned=(102400 + shorter) // 2)
    assert format_data_lines(report, resolve(**{"short_share": 0.0, **choices})) == lines
    joined = [line.replace("--pack restart", "--pack run-on") for line in lines]
    assert format_data_lines(report, resolve(**{"short_share": 0.0, **choices}), "run-on") == joined


@pytest.mark.parametrize(
    ("choices", "left"),
    [
        ({}, "checkpointing low-memory quantize positions length"),
        ({"micro_batch": 2, "checkpointing": True}, "micro-batch low-memory quantize positions length"),
        ({"full": True, "length": 9000}, "low-memory LoRA positions length"),
        ({"quantize": "4bit", "positions": "pose", "low_memory": True}, "length"),
        ({"pack": "restart", "checkpointing": True}, "low-memory quantize length"),
    ],
)
def test_remedies_that_are_left(choices, left):
    options = resolve(**choices)
    facts = {field.name: 0 for field in dataclasses.fields(Plan)} | {"options": options}
    named = [text.lstrip("-").split()[0].strip(":,") for text in Plan(**facts).remedies]
    assert named == left.split()
    assert [Plan(**{**facts, "peak_memory": n, "available_memory": 5}).fits for n in (4, 5, 6)] == [True, True, False]


def test_memory_at_another_length():
    cost = SimpleNamespace(logit_bytes=lambda length: 1000 * length)
    rising = StepMeasurements((10, 30), (50 + 10_000, 90 + 30_000), before=0, seconds=1.0)
    assert rising.peak_at(80, cost) == 90 + 2 * 50 + 80_000
    falling = dataclasses.replace(rising, peaks=(90 + 10_000, 50 + 30_000))
    assert falling.peak_at(80, cost) == 50 + 80_000, "more tokens never take less"
    assert dataclasses.replace(rising, before=10**9).peak_at(80, cost) == 10**9


def fitting(positions="rotary", learned=(), masked=False, feature="yarn"):
    encoding = SimpleNamespace(learned_tensors=learned, feature=feature)
    model = SimpleNamespace(family=SimpleNamespace(positions=positions), encoding=encoding)
    return SimpleNamespace(model=model, is_masked=masked)


@pytest.mark.parametrize(
    ("choices", "refusing"),
    [
        ({"keep_short": True}, "alibi table masked"),
        ({"restart": True}, "table masked"),
        ({}, ""),
    ],
)
def test_which_models_have_no_use_for_a_choice(choices, refusing):
    bases = {"rotary": fitting(), "alibi": fitting("alibi"), "masked": fitting(masked=True)}
    bases |= {"table": fitting("learned", ("wpe.weight",)), "dynamic": fitting(feature="dynamic")}
    for name, base in bases.items():
        is_refused = pytest.raises(CtxextError) if name in refusing.split() else contextlib.nullcontext()
        with is_refused:
            check_fits(base, restart="restart" in choices, keep_short="keep_short" in choices)


def test_sources_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("odd:0.5").touch()
    expected = {
        **{"a.txt": Source("a.txt"), "a.txt:0.7": Source("a.txt", 0.7), "odd:0.5": Source("odd:0.5")},
        **{"a:b": Source("a:b"), ":0.5": Source(":0.5"), "0.5": Source("0.5")},
    }
    assert {word: parse_source(word) for word in expected} == expected
    for weight in ("0", "-1", "inf", "nan"):
        with pytest.raises(CtxextError, match="must be above 0"):
            parse_source(f"a.txt:{weight}")


def state(step=3, last=10, first=True):
    return SimpleNamespace(global_step=step, max_steps=last, is_world_process_zero=first)


def test_the_line_of_a_step(tmp_path, monkeypatch):
    shown, clock = [], iter([100.0, 108.0])
    monkeypatch.setattr(step_log.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(step_log, "peak_memory", lambda device: 3 << 29)
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in (1, 2, 3)) + '{"step": 2\n')
    options = TrainingOptions(length=100, batch_size=10, steps=10)
    line = LiveLine(Reporter(progress=lambda *given: shown.append(given)), options, path, PositionLosses())
    line.on_train_begin(None, state(2), None)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    logs = {"loss": 1.5, "learning_rate": 0.1, "grad_norm": 2.0, "epoch": 1}
    line.on_log(SimpleNamespace(device="cpu"), state(6), None, logs)
    assert shown == [("step 6 / 10 · loss 1.500 · 500 tokens/s · 1.5 GiB · 8 s left", 6, 10)]
    expected = {"step": 6, "loss": 1.5, "learning_rate": 0.1, "grad_norm": 2.0, "tokens_per_second": 500.0}
    assert json.loads(path.read_text().splitlines()[-1]) == {**expected, "memory": 3 << 29, "seconds": 8.0}
    line.on_log(None, state(6), None, {"eval_loss": 1.0})
    line.on_log(None, state(6, first=False), None, {"loss": 1.0})
    assert len(shown) == 1
    for loss in (math.nan, math.inf, -math.inf):
        with pytest.raises(CtxextError, match="not finite at step 6"):
            line.on_log(None, state(6), None, {"loss": loss})


def test_a_second_ctrl_c_raises_keyboard_interrupt():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        stop, control = StopAfterStep(), SimpleNamespace(should_save=False, should_training_stop=False)
        with stop:
            stop.on_step_end(None, None, control)
            assert not control.should_training_stop
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            stop.on_step_end(None, None, control)
            assert (control.should_save, control.should_training_stop) == (True, True)
        with StopAfterStep():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_losses_by_position_begin_again_after_each_evaluation(tmp_path):
    sums, lines = PositionLosses(), []
    device = torch.device("cpu")
    for part, total, count in ((0, 4.0, 2), (0, 2.0, 1), (3, 5.0, 10)):
        sums.add(part, torch.tensor(total), count)
    line = LiveLine(Reporter(notify=lines.append), TrainingOptions(length=8), tmp_path / "steps.jsonl", sums)
    line.on_evaluate(SimpleNamespace(device=device), state(), None, {"eval_loss": 1.25})
    assert lines == ["step 3: loss 1.250 on the evaluation data (2.000, –, –, 0.500 by position)"]
    assert sums.take(device) == [None] * 4
    written = {"step": 3, "eval_loss": 1.25, "eval_loss_by_position": [2.0, None, None, 0.5]}
    assert json.loads((tmp_path / "steps.jsonl").read_text()) == written
    line.on_evaluate(SimpleNamespace(device=device), state(first=False), None, {"eval_loss": 1.25})
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == len(lines) == 1


def test_the_newest_save_that_is_whole(tmp_path):
    """By its number, for any number of steps of the earlier run; a save beyond the run is an error."""

    def saved(step, text):
        save = tmp_path / f"checkpoint-{step}"
        (save / "global_step1").mkdir(parents=True)  # As of DeepSpeed, whose other files are not read.
        (save / "trainer_state.json").write_text(text)

    for step, last in ((8, 20), (9, 20), (10, 20), (11, 30)):
        log = [{"step": n, "loss": 1.0} for n in range(1, step + 1)]
        whole = {"global_step": step, "max_steps": last, "epoch": 1.0, "log_history": log, "stateful_callbacks": {}}
        saved(step, json.dumps(whole))
    broken = [{**whole, "global_step": 12, **changes} for changes in ({"eval_st[]": 1}, {"log_history": []})]
    for step, text in enumerate([*map(json.dumps, (*broken, whole)), "{}", '{"half'], start=12):
        saved(step, text)
    (tmp_path / "checkpoint-20").mkdir()
    saves = find_newest_save(tmp_path, 40)
    assert saves.newest.name == "checkpoint-12"
    assert saves.notes[-1] == "ignored in checkpoint-12: eval_st[] of another version of transformers"
    assert [note.partition(":")[0] for note in saves.notes[:-1]] == [
        f"skipped checkpoint-{n}" for n in (20, 16, 15, 14, 13)
    ]
    assert find_newest_save(tmp_path, 10).newest.name == "checkpoint-10"
    with pytest.raises(CtxextError, match="already at step 8, beyond --steps 7"):
        find_newest_save(tmp_path, 7)
    assert find_newest_save(tmp_path / "empty", 7) == Saves(None, ())


def test_what_is_held_out_is_read_once_at_the_full_length(tmp_path):
    options = resolve(length=256, short_share=0.5, start_length=32, batch_size=4, micro_batch=2)
    torch.arange(3 * 256, dtype=torch.int32).numpy().tofile(sequence_file(tmp_path, 256))
    sequences = open_held_out(tmp_path, options, 3, ModelInputs())
    assert len(sequences) == 3
    assert {entry["input_ids"].shape for entry in (sequences[0], sequences[1], sequences[2])} == {(1, 256)}
    assert len({int(sequences[n]["input_ids"][0, 0]) for n in range(3)}) == 3


def test_a_run_is_known_by_its_model_data_and_choices(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(bytes(2 << 20))
    source = SimpleNamespace(
        folder=tmp_path, weight_files=[Path("model.bin")], size_of=lambda path: 2 << 20, public_name="me/base"
    )
    base, options = SimpleNamespace(checkpoint=source), resolve()
    first = _collect_settings(base, options, {"name": "books"})
    assert first["data"] == {"name": "books"}
    assert {name: value for name, value in first.items() if name not in ("model", "data")} == {
        name: value for name, value in options.to_dict().items() if name not in CHANGEABLE
    }
    (tmp_path / "model.bin").write_bytes(bytes([1]) + bytes((2 << 20) - 1))
    second = _collect_settings(base, options, {"name": "books"})
    assert second["model"]["name"] == first["model"]["name"] == "me/base"
    assert second["model"]["digest"] != first["model"]["digest"], "a weight was changed"
    (tmp_path / "config.json").write_text("{ }")
    assert _collect_settings(base, options, {"name": "books"})["model"]["digest"] != second["model"]["digest"]


@pytest.mark.parametrize(
    ("choices", "masked", "table", "expected"),
    [
        ({}, False, (), {"trained": "LoRA rank 16, alpha 32", "learned": "answers, if the data marks them"}),
        (
            {"learn": "all", "train_norms": True, "quantize": "4bit", "start_length": 64},
            *(True, ("wpe.weight",)),
            {
                "trained": "LoRA rank 16, alpha 32, base in 4bit while training, position embeddings, norms",
                "learned": "every token; 15 % of them masked",
                "length": "64 doubling to 1024",
            },
        ),
        ({"full": True, "seed": 5}, False, ("wpe",), {"trained": "all weights", "seed": 5, "learning_rate": 2e-5}),
        (
            {"positions": "pose", "train_embeddings": True, "short_share": 0.3, "batch_size": 2},
            *(False, ()),
            {
                **{"trained": "LoRA rank 16, alpha 32, embeddings", "positions": "pose, windows of 128"},
                **{"short_share": 0.3, "batch_size": 2, "steps": 200, "length": 1024, "data": "books"},
            },
        ),
    ],
)
def test_a_published_file_describes_the_training(choices, masked, table, expected):
    base = fitting(learned=table, masked=masked)
    notes = _make_notes(base, SimpleNamespace(options=resolve(**choices)), {"name": "books"})
    assert {name: notes[name] for name in expected} == expected


def test_each_length_has_its_own_curve():
    (axes,) = draw_training([(1, 4.0), (2, 3.0), (3, 9.0), (4, 1.0)], [64, 64, 8, 64]).axes
    curves = [(line.get_label(), [*line.get_xdata()], [*line.get_ydata()]) for line in axes.lines]
    assert [one[1:] for one in curves[::2]] == [([1, 2, 4], [4.0, 3.0, 1.0]), ([3], [9.0])], "points"
    assert [one[0] for one in curves[1::2]] == ["64 tokens", "8 tokens"]
    assert smooth_training([1, 2, 3, 4, 5], [0.0, 0.0, 9.0, 0.0, 0.0]) == [0.0, 3.0, 3.0, 3.0, 0.0]
    slope = [float(step) for step in range(1, 201)]
    assert smooth_training(range(1, 201), slope) == pytest.approx(slope)
    assert smooth_training(range(1, 82), [1.0, *[0.0] * 80])[:3] == [1.0, 1 / 3, 1 / 5], (
        "no wider than the way to its end"
    )


def reading_of(forward, positions="full"):
    encoding, family = SimpleNamespace(first_index=2), SimpleNamespace(model_type="some")
    base = SimpleNamespace(model=SimpleNamespace(encoding=encoding, family=family), is_masked=False)
    model = SimpleNamespace(base_model=SimpleNamespace(forward=forward))
    return prepare._get_reading(base, model, None, positions)


def test_positions_begin_at_the_first_index_of_the_family():
    assert reading_of(lambda input_ids, position_ids: None).first_index == 2
    assert reading_of(lambda input_ids: None).first_index is None
    with pytest.raises(CtxextError, match="computes positions internally"):
        reading_of(lambda input_ids: None, "pose")


def test_cards_of_a_training_list_its_data(tmp_path, monkeypatch):
    facts = []
    monkeypatch.setattr(card, "card_metadata", lambda checkpoint: {"license": "mit"})
    monkeypatch.setattr(card, "cautions_of", lambda checkpoint, recipe, model: ("Mind the gap.",))
    monkeypatch.setattr(card, "render", lambda card_facts: facts.append(card_facts) or "card")
    folder = make_base(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["ctxext"] |= {"source": "me/llama", "revision": "abc"}
    base = Checkpoint("me/long", folder, config, revision="def")
    assert card.render_card(base, {"steps": 3}) == "card"
    expected = {"source": "me/llama", "revision": "abc", "inherited": {"license": "mit"}, "training": {"steps": 3}}
    assert {name: getattr(facts[0], name) for name in expected} == expected
    assert facts[0].cautions == ("Mind the gap.",)
    del config["ctxext"]
    card.render_card(Checkpoint("me/long", folder, config, revision="def"), {})
    assert (facts[1].source, facts[1].revision, facts[1].recipe) == ("me/long", "def", None)


def test_the_card_of_an_adapter_describes_its_base(tmp_path):
    folder = make_base(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["ctxext"]["source"] = "me/llama"
    text = card.render_adapter_card(Checkpoint("me/long", folder, config, revision="def"))
    assert 'base_model: "me/long"' in text
    assert "ctxext convert me/llama long --method yarn --factor 4" in " ".join(text.replace("\\", " ").split())
    assert "yaml" not in text
    steps = [{"method": "yarn", "factor": 2.0}, {"method": "adaptive", "factor": 2.0}]
    config["ctxext"]["recipe"] = {"steps": steps, "description": "twice"}
    text = card.render_adapter_card(Checkpoint("me/long", folder, config, revision="def"))
    assert "with this `recipe.yaml`:\n\n```yaml\ndescription: twice\nsteps:\n- method: yarn\n" in text
    del config["ctxext"]
    assert "convert" not in card.render_adapter_card(Checkpoint("me/long", folder, config, revision="def"))


@pytest.mark.thorough
def test_sixteen_curves_are_distinct_and_a_single_step_is_drawn():
    assert len({series_style(number) for number in range(16)}) == 16
    assert as_png(draw_training([(1, 2.0)], [64]))
    many = draw_training([(step, 2.0) for step in range(1, 41)], [2 ** (step // 3) for step in range(40)])
    assert as_png(many).startswith(b"\x89PNG")
