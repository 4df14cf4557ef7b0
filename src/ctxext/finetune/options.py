"""Options of a fine-tuning, validated in the constructor, and published recipes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any, ClassVar

from ctxext.errors import CtxextError
from ctxext.files.content import Progress, report_stage
from ctxext.files.length import read_words
from ctxext.files.output_directory import OverwriteOptions
from ctxext.files.strict import parse_yaml
from ctxext.finetune.stages import (
    QUESTIONS,
    SET_BY_STAGES,
    STAGED,
    WITHOUT_STAGES,
    adapt_stage,
    read_stages,
    resolve_stage,
    share_steps,
)
from ctxext.options import (
    MAX_COUNT,
    HubOptions,
    Rule,
    check_options,
    is_set,
    option,
    original_length_option,
    seed_option,
    share_option,
    strength_option,
    with_documented_options,
)

_OF_LORA = ("rank", "alpha", "dropout", "targets", "train_norms", "train_embeddings")
_MANY, _STEPS = 1000, 200
_MOST_STEPS = 10_000_000
"""Maximum of steps; the plan of all steps is made before the first."""
MASKED_SHARE = 0.15
"""Share of masked tokens in the training of an encoder."""
CHANGEABLE = (
    *("device", "save_every", "report_to", "steps", "micro_batch", "sequence_parallel", "checkpointing", "piece"),
    *("keep_best", "strength", "low_memory"),
)
"""Options that may change when a run is resumed."""


STAGES = "stages"
_UNSTAGED: Mapping[str, Any] = {STAGES: (), "stages_length": None, "stages_width": None}
_LENGTH, _LORA, _LOOP = "Length and positions", "Trained weights", "Training loop"


def _find_option_of_stages(options: "TrainingOptions") -> str | None:
    """Return the name of an option that is set for the whole run although stages set it."""
    names = (name for name in STAGED if is_set(options, name) and any(name in stage for stage in options.stages))
    return next((name.replace("_", "-") for name in names), None)


def _find_option_of_lora(options: "TrainingOptions") -> str | None:
    """Return the name of an option for LoRA that is set although all weights are trained."""
    # Resolved options contain the default of alpha.
    usual = ("alpha",) if options.alpha == 2.0 * options.rank else ()
    names = (name for name in _OF_LORA if options.full and name not in usual)
    return next((name.replace("_", "-") for name in names if is_set(options, name)), None)


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of a fine-tuning run. `short_length` and `piece` are not options of the command."""

    length: int | None = option(
        None, help="Tokens per sequence, for example 32k. Default: the model's context length.", kind="length", min=1
    )
    learn: str = option(
        "answers",
        help="answers: only answers, if the data marks them (prompt and completion, messages, demo); or all.",
        choices=("answers", "all"),
    )
    steps: int | None = option(
        None, help="Optimizer steps. Default: 200, or those of a preset.", min=1, max=_MOST_STEPS
    )
    epochs: float | None = option(None, help="Passes over the data, instead of --steps.", above=0)
    minutes: float | None = option(
        None, help="Minutes of training: sets the number of steps, after a few measured ones.", above=0
    )
    batch_size: int = option(8, help="Sequences per step, over all processes.", min=1, max=MAX_COUNT)

    start_length: int | None = option(
        None,
        help="Tokens per sequence at the start, doubled to the full length in equal parts of the steps. Saves time "
        "(arXiv 2310.00576).",
        panel=_LENGTH,
        kind="length",
        min=1,
        advanced=True,
    )
    original_length: int | None = original_length_option(panel=_LENGTH, min=1, advanced=True)
    short_share: float = share_option(
        0.2, help="Share of steps on sequences of the original context length, 0 to 1.", panel=_LENGTH, advanced=True
    )
    keep_short: bool = option(
        False,
        help="Distil from the source model on sequences within its original context (LongReD, arXiv 2502.07365).",
        panel=_LENGTH,
        advanced=True,
    )
    pack: str = option(
        "off",
        help="off: one document per sequence; run-on: join documents; restart: join, and restart positions at each.",
        panel=_LENGTH,
        choices=("off", "run-on", "restart"),
    )
    positions: str = option(
        "full",
        help="full, or pose: train on short windows that skip positions (PoSE, arXiv 2309.10400).",
        panel=_LENGTH,
        choices=("full", "pose"),
        advanced=True,
    )
    window: int | None = option(
        None,
        help="Tokens per window with pose. Default: the original context length.",
        panel=_LENGTH,
        kind="length",
        min=1,
        advanced=True,
    )
    method: str | None = option(
        None,
        help="Convert the source by this method first, for example yarn, unless it is already extended.",
        panel=_LENGTH,
    )
    factor: float | None = option(None, help="Factor of --method. Default: 2.", panel=_LENGTH, above=1)

    rank: int = option(16, help="Rank of the LoRA matrices.", panel=_LORA, min=1, max=MAX_COUNT)
    alpha: float | None = option(
        None, help="Scaling of the LoRA matrices (alpha). Default: twice the rank.", panel=_LORA, above=0, advanced=True
    )
    dropout: float = share_option(0.0, help="LoRA dropout.", panel=_LORA, advanced=True)
    targets: tuple[str, ...] = option(
        (),
        help="Linear layers with LoRA matrices, for example q_proj,v_proj. Default: all.",
        panel=_LORA,
        kind="names",
        advanced=True,
    )
    train_norms: bool = option(False, help="Also train the norms.", panel=_LORA, advanced=True)
    train_embeddings: bool = option(False, help="Also train the input embeddings.", panel=_LORA, advanced=True)
    full: bool = option(False, help="Train all weights, without LoRA.", panel=_LORA)
    strength: float = strength_option(panel=_LORA, advanced=True)

    micro_batch: int = option(1, help="Sequences per device at a time.", panel=_LOOP, min=1)
    learning_rate: float | None = option(
        None, help="Peak value. Default: 2e-4, or 2e-5 with --full.", panel=_LOOP, above=0
    )
    schedule: str = option(
        "cosine",
        help="cosine, linear or constant learning rate.",
        panel=_LOOP,
        choices=("cosine", "linear", "constant"),
        advanced=True,
    )
    rate_floor: float = share_option(
        0.0, help="Final learning rate with cosine, as a share of the peak.", panel=_LOOP, advanced=True
    )
    warmup: float = share_option(0.05, help="Share of the steps for learning rate warmup.", panel=_LOOP, advanced=True)
    optimizer: str = option(
        "adamw_torch_fused",
        help="Optimizer of the Trainer, for example adamw_torch, adamw_8bit or adafactor.",
        panel=_LOOP,
        advanced=True,
    )
    weight_decay: float = share_option(0.0, help="Weight decay.", panel=_LOOP, advanced=True)
    beta2: float = share_option(0.999, help="Beta2 of AdamW.", panel=_LOOP, advanced=True)
    checkpointing: bool | None = option(
        None,
        help="Recompute activations to save memory. Default: on above 4096 tokens.",
        panel=_LOOP,
        flags=("--checkpointing/--no-checkpointing",),
    )
    low_memory: bool = option(
        False,
        help="Compute feed-forward blocks in tiles, once more than otherwise (ALST, arXiv 2506.13996), and keep the "
        "activations that --checkpointing saves in the memory of the machine.",
        panel=_LOOP,
        advanced=True,
    )
    sequence_parallel: int = option(
        1,
        help="Processes that share each sequence, started by a launcher (Ulysses, arXiv 2309.14509). Needs DeepSpeed.",
        panel=_LOOP,
        min=1,
        max=MAX_COUNT,
        advanced=True,
    )
    seed: int = seed_option(panel=_LOOP)
    save_every: int = option(50, help="Steps between saves.", panel=_LOOP, min=1)
    keep_best: bool = option(False, help="Use the save with the lowest --eval-data loss.", panel=_LOOP, advanced=True)
    report_to: str = option(
        "none",
        help="none, tensorboard, wandb or trackio.",
        panel=_LOOP,
        choices=("none", "tensorboard", "wandb", "trackio"),
        advanced=True,
    )
    quantize: str = option(
        "none",
        help="none, or 4bit: frozen weights in 4 bits during training (QLoRA, arXiv 2305.14314).",
        panel=_LOOP,
        choices=("none", "4bit"),
    )
    device: str = option(
        "auto",
        help="auto or cpu.",
        panel=_LOOP,
        choices=("auto", "cpu"),
        invalid='Unknown --device "{value}" for training.',
        hint="Choose auto or cpu.",
    )
    dtype: str = option(
        "auto",
        help="Type of the frozen weights: auto, bf16, fp16 or fp32.",
        panel=_LOOP,
        choices=("auto", "bf16", "fp16", "fp32"),
    )

    stages: tuple[Mapping[str, Any], ...] = option(
        (),
        help="Stages, one after the other: a JSON list of their options, which are steps, window, start-length, "
        "short-share, learning-rate, rate-floor, warmup, checkpointing and questions.",
        panel=_LOOP,
        kind="json",
        metavar="JSON",
        advanced=True,
    )
    stages_length: int | None = option(
        None,
        help="Original context length of the model that --stages are for: windows are adapted to the trained model.",
        panel=_LOOP,
        kind="length",
        min=1,
        advanced=True,
    )
    stages_width: int | None = option(
        None,
        help="Width of that model (hidden_size): learning rates are adapted.",
        panel=_LOOP,
        min=1,
        max=MAX_COUNT,
        advanced=True,
    )

    short_length: int | None = option(
        None, help="Tokens per short sequence. Default: the original context length.", min=1, internal=True
    )
    piece: int | None = option(
        None,
        help="Positions with logits at once. Default: as many as take 24 MiB, on an accelerator 256 MiB.",
        min=1,
        internal=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda options: options.batch_size % options.micro_batch,
            "--batch-size {batch_size} is not a multiple of --micro-batch {micro_batch}.",
        ),
        Rule(
            _find_option_of_lora,
            "--full cannot be combined with --{found}, which is for LoRA.",
            "Remove one of them. If --{found} comes from a preset, add --without {found}.",
        ),
        Rule(
            lambda options: options.full and options.quantize != "none",
            "--full cannot be combined with --quantize, which is for LoRA.",
        ),
        Rule(
            lambda options: options.rate_floor and options.schedule != "cosine",
            "--rate-floor needs --schedule cosine.",
        ),
        Rule(
            lambda options: options.window and options.positions == "full",
            "--window needs --positions pose.",
            "Add --positions pose, or use only --length.",
        ),
        Rule(
            lambda options: options.pack == "restart" and options.positions != "full",
            "--pack restart needs --positions full.",
        ),
        Rule(
            lambda options: options.factor and not options.method,
            "--factor needs --method.",
            "Add --method yarn, or convert the source first.",
        ),
        Rule(_find_option_of_stages, SET_BY_STAGES, WITHOUT_STAGES),
        Rule(
            lambda options: options.minutes and options.epochs,
            "--minutes cannot be combined with --epochs.",
            "Remove one of them.",
        ),
        Rule(
            lambda options: options.stages and options.epochs,
            "--epochs cannot be combined with stages, which have --steps.",
            WITHOUT_STAGES,
        ),
        Rule(
            lambda options: options.low_memory and options.checkpointing is False,
            "--low-memory cannot be combined with --no-checkpointing.",
            "Remove one of them.",
        ),
        Rule(
            lambda options: options.sequence_parallel > 1 and options.micro_batch > 1,
            "--sequence-parallel cannot be combined with --micro-batch {micro_batch}.",
            "Remove --micro-batch: processes share one sequence at a time.",
        ),
        Rule(
            lambda options: options.sequence_parallel > 1 and options.keep_short,
            "--sequence-parallel cannot be combined with --keep-short.",
            "Use --short-share to train on short sequences.",
        ),
        Rule(
            lambda options: options.stages and options.keep_short,
            "--keep-short cannot be combined with stages.",
            WITHOUT_STAGES,
        ),
    )

    def __post_init__(self) -> None:
        read_words(self)
        stages = read_stages(self.stages)
        if stages and self.steps is not None:  # The number of all steps.
            stages = share_steps(stages, self.steps)
            object.__setattr__(self, "steps", None)
        object.__setattr__(self, "stages", stages)
        check_options(self, '{flag} must be {limits}, not "{value}".')
        _ = self.each_stage  # Checks their options.

    @cached_property
    def each_stage(self) -> "tuple[TrainingOptions, ...]":
        """The options of each stage, in order; a run without stages is one stage."""
        chosen = ({name: value for name, value in stage.items() if name != QUESTIONS} for stage in self.stages)
        stages = (
            dataclasses.replace(self, **{**_UNSTAGED, "seed": self.seed + number, **options})
            for number, options in enumerate(chosen)
        )
        return tuple(stages) if self.stages else (self,)

    @property
    def num_steps(self) -> int:
        """Number of steps in all stages."""
        return sum(stage["steps"] for stage in self.stages) if self.stages else self.steps or _STEPS

    @property
    def peak_rate(self) -> float:
        """The highest learning rate of all stages."""
        return max(stage.learning_rate or 0.0 for stage in self.each_stage)

    def resolve(self, *, window: int, trained_length: int, width: int = 0) -> "TrainingOptions":
        """Return the options with all defaults set, which depend on the base.

        Args:
            window: Its context length in tokens.
            trained_length: Its original context length.
            width: Its width; 0 if unknown.
        """
        if self.stages:
            return self._resolve_stages(window=window, trained_length=trained_length, width=width)
        length = self.length or window
        num_tokens = length if self.positions == "full" else (self.window or trained_length)
        if self.start_length and self.start_length > num_tokens:
            raise CtxextError(
                f"--start-length {self.start_length} is longer than a sequence of {num_tokens} tokens.",
                hint="Remove it to train at one length. If it comes from a preset, add --without start-length.",
            )
        return dataclasses.replace(
            self,
            length=length,
            steps=self.num_steps,
            start_length=None if self.start_length == num_tokens else self.start_length,
            learning_rate=self.learning_rate or (2e-5 if self.full else 2e-4),
            alpha=self.alpha or 2.0 * self.rank,
            window=None if self.positions == "full" else min(num_tokens, length),
            short_length=min(self.short_length or trained_length, num_tokens),
            checkpointing=(self.low_memory or num_tokens > 4096) if self.checkpointing is None else self.checkpointing,
        )

    def _resolve_stages(self, *, window: int, trained_length: int, width: int) -> "TrainingOptions":
        """Return the options with all stages resolved, and adapted to the model if their sizes are given."""
        sizes, ours = (self.stages_length or trained_length, self.stages_width or width), (trained_length, width)
        options = dataclasses.replace(
            self,
            **{**_UNSTAGED, STAGES: tuple(adapt_stage(stage, sizes, ours) for stage in self.stages)},
            length=self.length or window,
            alpha=self.alpha or 2.0 * self.rank,
        )
        resolved = [stage.resolve(window=window, trained_length=trained_length) for stage in options.each_stage]
        pairs = zip(options.stages, resolved, strict=True)
        return dataclasses.replace(options, stages=tuple(resolve_stage(*pair) for pair in pairs))

    @property
    def sequence_length(self) -> int:
        """Number of tokens in a sequence, of the longest stage: the window with PoSE, otherwise the length."""
        if self.stages:
            return max(stage.sequence_length for stage in self.each_stage)
        length = self.window or self.length
        assert length is not None, "the options are not resolved"
        return length

    @property
    def warmup_steps(self) -> int:
        """Number of steps with a rising learning rate."""
        return math.ceil(self.warmup * self.num_steps)

    def is_short(self, step: int) -> bool:
        """Return whether a step trains at the short length, without skipped positions; such steps are spread evenly."""
        useful = self.short_length != self.sequence_length or self.positions != "full"
        return useful and int((step + 1) * self.short_share) > int(step * self.short_share)

    def find_stage(self, step: int) -> "tuple[TrainingOptions, int]":
        """Return the options of the stage of a step, and the step's number in it, both counted from 0."""
        for stage in self.each_stage:
            if step < stage.num_steps:
                return stage, step
            step -= stage.num_steps
        return stage, stage.num_steps  # After the last step.

    def rate_of_step(self, step: int) -> float:
        """Return the learning rate of a step, as the schedulers of transformers compute it."""
        stage, step = self.find_stage(step)
        peak, warmup = stage.learning_rate or 0.0, stage.warmup_steps
        if step < warmup:
            return peak * step / warmup
        done = (step - warmup) / max(1, stage.num_steps - warmup)
        share = {"constant": 1.0, "linear": max(0.0, 1 - done), "cosine": (1 + math.cos(math.pi * done)) / 2}
        return peak * (stage.rate_floor + (1 - stage.rate_floor) * share[stage.schedule])

    def length_of_step(self, step: int) -> int:
        """Return the number of tokens of a sequence in a step, counted from 0."""
        if self.stages:
            stage, step = self.find_stage(step)
            return stage.length_of_step(step)
        assert self.short_length is not None, "the options are not resolved"
        lengths = [self.start_length or self.sequence_length]
        while 2 * lengths[-1] < self.sequence_length:
            lengths.append(2 * lengths[-1])
        if lengths[-1] < self.sequence_length:
            lengths.append(self.sequence_length)
        # Round up, so that the last step has the full length even in short runs.
        length = lengths[-(-(step + 1) * len(lengths) // self.num_steps) - 1]
        return min(length, self.short_length) if self.is_short(step) else length

    def count_sequences(self) -> dict[int, int]:
        """Return the number of sequences that all steps need, by length."""
        if self.epochs:
            # With epochs, use all sequences of every length of a long run.
            lengths = map(dataclasses.replace(self, steps=_MANY, epochs=None).length_of_step, range(_MANY))
            return dict.fromkeys([self.sequence_length, *lengths], 1 << 40)
        counts = {self.sequence_length: 0}
        for length in map(self.length_of_step, range(self.num_steps)):
            counts[length] = counts.get(length, 0) + self.batch_size * (self.sequence_length // length)
        return {length: max(1, count) for length, count in counts.items()}

    def for_data(self, num_sequences: int) -> "TrainingOptions":
        """Return the options with epochs converted to steps, for data with `num_sequences` of the full length."""
        if not self.epochs:
            return self
        return dataclasses.replace(
            self, steps=max(1, math.ceil(self.epochs * num_sequences / self.batch_size)), epochs=None
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the options as written to reports."""
        return {**dataclasses.asdict(self), "targets": list(self.targets)}


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class RunOptions(OverwriteOptions, HubOptions):
    """Options of a single call, without effect on the trained weights."""

    merge: bool = option(True, help="Write a full checkpoint, or only the adapter.", flags=("--merge/--no-merge",))
    resume: bool = option(False, help="Resume a stopped run.", kept=False)
    overwrite: bool = option(False, help="Replace OUT if created by ctxext, and its unfinished run.", kept=False)


@dataclass(frozen=True, kw_only=True)
class Reporter:
    """Callbacks of a run.

    Attributes:
        progress: Called with the current activity, the amount done and the total.
        notify: Called with additional information, one line each.
    """

    progress: Progress | None = None
    notify: Callable[[str], None] | None = None

    def report_stage(self, stage: str) -> None:
        """Report the beginning of a stage that may take long."""
        report_stage(self.progress, stage)


@dataclass(frozen=True)
class Preset:
    """A published training recipe.

    Attributes:
        description: Description of the training.
        source: Publication.
        memory: Required memory.
        options: Options of `ctxext finetune` by name.
    """

    description: str
    source: str
    memory: str
    options: Mapping[str, Any]

    @property
    def stages(self) -> Sequence[Mapping[str, Any]]:
        """The options of each stage; empty if there is only one."""
        stages: Sequence[Mapping[str, Any]] = self.options.get(STAGES, ())
        return stages

    def lines(self) -> list[str]:
        """Return the lines of its description: source, options and memory."""
        plain = {word: value for word, value in self.options.items() if word != STAGES}
        stages = [f"stage {number}  {_list_words(stage)}" for number, stage in enumerate(self.stages, 1)]
        return [
            self.description,
            f"source   {self.source}",
            f"options  {_list_words(plain)}",
            *stages,
            f"memory   {self.memory}",
        ]


def _list_words(options: Mapping[str, Any]) -> str:
    """Return options as on the command line."""
    values = {word: ",".join(map(str, value)) if isinstance(value, list) else value for word, value in options.items()}
    return " ".join(f"--{word}" if value is True else f"--{word} {value}" for word, value in values.items())


def presets() -> dict[str, Preset]:
    """Read the recipes of the package, by name."""
    folder = resources.files("ctxext.finetune") / "presets"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return {
        file.name.removesuffix(".yaml"): Preset(**parse_yaml(file.read_text(encoding="utf-8"), file.name))
        for file in files
    }
