"""The configuration of another trainer for a run: what it cannot express, and what would be silently wrong there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import read
from ctxext.errors import CtxextError
from ctxext.finetune.documents import DEMO
from ctxext.finetune.trainers import axolotl, llama_factory, ms_swift, scripts
from ctxext.finetune.trainers.run import Run
from ctxext.finetune.trainers.trainer import Trainer
from ctxext.recipes.encodings.rotary import Rotary

TRAINERS = {
    trainer.name: trainer
    for trainer in (axolotl.TRAINER, scripts.TRL, scripts.UNSLOTH, llama_factory.TRAINER, ms_swift.TRAINER)
}


@dataclass(frozen=True)
class _Missing:
    """An option without an equivalent in most trainers.

    Attributes:
        option: Its name, with a value if only that value is meant.
        is_used: Whether a run uses it.
        effect: The difference of the exported run.
    """

    option: str
    is_used: Callable[[Run], Any]
    effect: str


_MISSING = (
    _Missing("stages", lambda run: run.options.stages, "one stage with all steps and the highest learning rate"),
    _Missing("positions pose", lambda run: run.options.positions == "pose", "whole sequences of --length"),
    _Missing("questions", lambda run: _share_of_questions(run), "none; ctxext questions writes them to a file"),
    _Missing("keep-short", lambda run: run.options.keep_short, "no distillation from the source"),
    _Missing("short-share", lambda run: _has_short_steps(run), "no steps at the original context length"),
    _Missing("strength", lambda run: run.options.strength != 1, "the whole change; see ctxext merge --strength"),
    _Missing("low-memory", lambda run: run.options.low_memory, "it may need more memory"),
    _Missing("sequence-parallel", lambda run: run.options.sequence_parallel > 1, "each process has whole sequences"),
    _Missing("start-length", lambda run: _has_start(run), "full length from the first step"),
    _Missing("minutes", lambda run: run.options.minutes, "a fixed number of steps"),
    _Missing("pack run-on", lambda run: run.options.pack == "run-on", "documents are not joined"),
    _Missing("weights of --data", lambda run: run.sources[0].weight, "every record once per pass"),
    _Missing("split", lambda run: any(source.split != "train" for source in run.sources), "the split train"),
    _Missing("tools", lambda run: any(source.has_tools for source in run.sources), "tools of records are not rendered"),
    _Missing("skip-bad-rows", lambda run: run.data.skip_bad_rows, "the trainer's own rule"),
    _Missing("eval-data", lambda run: "eval-data" in run.others, "no loss on other data during the training"),
    _Missing("eval", lambda run: "eval" in run.others, "ctxext eval measures the result"),
    _Missing("keep-best", lambda run: run.options.keep_best, "the last save"),
    _Missing("device cpu", lambda run: run.options.device == "cpu", "the trainer's own choice"),
    _Missing("dtype fp32", lambda run: run.options.dtype == "fp32", "the saved type"),
    _Missing("report-to", lambda run: run.options.report_to in ("wandb", "trackio"), "no report"),
)


@dataclass(frozen=True)
class _Refusal:
    """A run that would be silently wrong, or that a trainer cannot read.

    Attributes:
        applies: Whether it is one.
        message: The reason, with {trainer} and the values of `_describe`.
        hint: What to do.
    """

    applies: Callable[[Trainer, Run], Any]
    message: str
    hint: str


_FAST_UNSLOTH = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
"""Families with unsloth's own rotary embedding; it uses transformers' classes for all others."""

_REFUSALS = (
    _Refusal(
        lambda trainer, run: run.has_code,
        '"{model}" needs the Python code in it, which is not loaded or not used for every attention by {trainer}.',
        "Train it with ctxext finetune, or convert by a method without code, for example yarn.",
    ),
    _Refusal(
        lambda trainer, run: run.base.is_masked,
        '"{model}" predicts masked tokens, for which {trainer} has no training.',
        "Train it with ctxext finetune.",
    ),
    _Refusal(
        lambda trainer, run: run.model == DEMO,
        f'"{DEMO}" is part of ctxext, and not a model for {{trainer}}.',
        f"Convert it to a folder first: ctxext convert {DEMO} my-model --method yarn --factor 2",
    ),
    _Refusal(
        lambda trainer, run: run.data.is_demo,
        f"--data {DEMO} is generated during the training, so {{trainer}} cannot read it.",
        "Use a file.",
    ),
    _Refusal(
        lambda trainer, run: any(source.is_plain for source in run.sources),
        "A text file is one document; {trainer} would read each of its lines as one.",
        'Write it as JSON lines, a document per line: {{"text": "..."}}',
    ),
    _Refusal(
        lambda trainer, run: (
            trainer.name == "llama-factory" and any(Path(source.path).is_dir() for source in run.sources)
        ),
        "{trainer} reads all files of a folder, those of other splits too.",
        "Pass the files: --data a.jsonl --data b.jsonl",
    ),
    _Refusal(
        lambda trainer, run: _find_other_format(trainer, run),
        "{trainer} has no equivalent of records in the format {format}.",
        "Convert them to messages, or train with ctxext finetune.",
    ),
    _Refusal(
        lambda trainer, run: not trainer.mixes_formats and len({source.kind for source in run.sources}) > 1,
        "{trainer} reads all data of a run in one format.",
        "Convert the data to one format, or train with ctxext finetune.",
    ),
    _Refusal(
        lambda trainer, run: trainer.whole_alpha and not run.options.full and isinstance(run.alpha, float),
        "{trainer} accepts only an integer as --alpha, not {alpha:g}.",
        "Round it.",
    ),
    _Refusal(
        lambda trainer, run: trainer.name == "llama-factory" and run.kind == "text" and run.options.pack == "restart",
        "{trainer} has no --pack restart for texts: each would attend to those before it.",
        "Join documents with --pack run-on.",
    ),
    _Refusal(
        lambda trainer, run: _is_ignored_by_unsloth(trainer, run),
        "{trainer} does not apply the schedule {rope_type} of {family}: the training would be without it.",
        "Train with ctxext finetune or another trainer.",
    ),
    _Refusal(
        lambda trainer, run: _is_replaced_by_unsloth(trainer, run),
        "{trainer} would replace the schedule by a linear one: config.json declares {declared} tokens, fewer than "
        "--length {length}.",
        "Convert the source with ctxext, which declares the new length, or reduce --length.",
    ),
)


@dataclass(frozen=True)
class Exported:
    """The configuration of another trainer.

    Attributes:
        trainer: The trainer.
        model: The folder or Hub id that it loads.
        text: The configuration, with a comment that names the version, the command and what is missing.
        missing: Options without an equivalent, with their effect.
    """

    trainer: Trainer
    model: str
    text: str
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the content for `--json`."""
        return {
            "trainer": self.trainer.name,
            "version": self.trainer.version,
            "model": self.model,
            "configuration": self.text,
            "no_equivalent": list(self.missing),
        }


def export_config(trainer: Trainer, run: Run) -> Exported:
    """Return the configuration of a trainer for a run.

    Raises:
        CtxextError: The trainer cannot read the checkpoint or the data, or would train something else silently.
    """
    for refusal in _REFUSALS:
        if refusal.applies(trainer, run):
            values = _describe(trainer, run)
            raise CtxextError(refusal.message.format(**values), hint=refusal.hint.format(**values))
    missing = tuple(
        f"{entry.option}: {entry.effect}"
        for entry in _MISSING
        if entry.is_used(run) and entry.option not in trainer.extras
    )
    stage = "pt" if run.kind == "text" else "sft"
    head = [f"{trainer.title} {trainer.version}: {trainer.command.format(stage=stage)}"]
    head += [f"No equivalent of {line}" for line in missing]
    return Exported(trainer, run.model, "".join(f"# {line}\n" for line in head) + trainer.write(run), missing)


def _describe(trainer: Trainer, run: Run) -> dict[str, Any]:
    """Return the values for messages."""
    return {
        "trainer": trainer.title,
        "model": run.base.checkpoint.name,
        "format": _find_other_format(trainer, run),
        "alpha": run.alpha,
        "rope_type": run.rope_type,
        "family": run.base.model.family.model_type,
        "declared": _get_declared_length(run),
        "length": run.length,
    }


def _share_of_questions(run: Run) -> float:
    return max([run.data.questions or 0.0, *(stage.get("questions") or 0.0 for stage in run.options.stages)])


def _has_short_steps(run: Run) -> bool:
    options = run.options
    return any(stage.is_short(step) for stage in options.each_stage for step in range(stage.num_steps))


def _has_start(run: Run) -> bool:
    return any(stage.start_length for stage in run.options.each_stage)


def _find_other_format(trainer: Trainer, run: Run) -> str | None:
    """Return the first format that the trainer does not read as ctxext does."""
    return next((source.kind for source in run.sources if source.kind not in trainer.formats), None)


def _get_declared_length(run: Run) -> int:
    """Return the context length in tokens that config.json declares."""
    declared = read(run.base.model.config, run.base.model.family, "max_position_embeddings")
    return declared if isinstance(declared, int) else run.length


def _is_ignored_by_unsloth(trainer: Trainer, run: Run) -> bool:
    """Return whether unsloth's rotary embedding leaves out a schedule.

    It computes the inverse frequencies once, without the number of tokens, and those of Gemma without any schedule.
    """
    kind, encoding = run.base.model.family.model_type, run.base.model.encoding
    if trainer.name != "unsloth" or kind not in _FAST_UNSLOTH or run.rope_type == "default":
        return False
    return (isinstance(encoding, Rotary) and encoding.depends_on_length) or kind.startswith("gemma")


def _is_replaced_by_unsloth(trainer: Trainer, run: Run) -> bool:
    return trainer.name == "unsloth" and run.rope_type != "llama3" and run.length > _get_declared_length(run)
