"""The options of `ctxext finetune`."""

from typing import Annotated

import typer

_DATA, _LENGTH, _LORA, _LOOP = "Data", "Length and positions", "What is trained", "How it is trained"

DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="A file or folder of text, JSON, CSV or parquet, or the id of a data set; several with their weights, as "
        "--data books.jsonl:0.7 --data chats.jsonl:0.3. demo makes documents on the fly.",
        show_default=False,
    ),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        help="What records are: auto, text, chat, prompt-completion, sharegpt or alpaca.",
        rich_help_panel=_DATA,
    ),
]
TextFieldOption = Annotated[
    str, typer.Option("--text-field", help="The field that holds a text.", rich_help_panel=_DATA)
]
SplitOption = Annotated[
    str, typer.Option("--split", help="The split of a folder or data set that is read.", rich_help_panel=_DATA)
]
SkipBadRowsOption = Annotated[
    bool,
    typer.Option(
        "--skip-bad-rows", help="Count records that cannot be learned from instead of stopping.", rich_help_panel=_DATA
    ),
]
EvalDataOption = Annotated[
    str | None,
    typer.Option(
        "--eval-data",
        help="Data on which the loss is measured while training; of folders and data sets the split that is held out.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
LongShareOption = Annotated[
    float | None,
    typer.Option(
        "--long-share",
        help="Share of the tokens that come from documents of at least half the length. Default: as they come.",
        rich_help_panel=_DATA,
        show_default=False,
    ),
]
LengthOption = Annotated[
    str | None,
    typer.Option(
        "--length", help="Tokens of a sequence, as 32k. Default: the model's context length.", show_default=False
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", help="Optimizer steps.")]
EpochsOption = Annotated[
    float | None,
    typer.Option("--epochs", help="How often all data is seen, in place of --steps.", show_default=False),
]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", help="Sequences per step, over all processes.")]
MicroBatchOption = Annotated[
    int, typer.Option("--micro-batch", help="Sequences that one device computes at once.", rich_help_panel=_LOOP)
]
LearnOption = Annotated[
    str,
    typer.Option(
        "--learn",
        help="answers: where the data marks answers (prompt and completion, messages, demo) only those; or all.",
    ),
]

StartLengthOption = Annotated[
    str | None,
    typer.Option(
        "--start-length",
        help="Tokens of the first sequences, which double up to the length in equal parts of the steps. Saves time.",
        rich_help_panel=_LENGTH,
        show_default=False,
    ),
]
ShortShareOption = Annotated[
    float,
    typer.Option(
        "--short-share",
        help="Share of steps on sequences of the original context length, 0 to 1.",
        rich_help_panel=_LENGTH,
    ),
]
KeepShortOption = Annotated[
    bool,
    typer.Option(
        "--keep-short",
        help="Stay close to what the source says of sequences inside the trained window.",
        rich_help_panel=_LENGTH,
    ),
]
PackOption = Annotated[
    str,
    typer.Option(
        "--pack",
        help="off: each sequence comes from one document; run-on: documents are joined; restart: joined, and positions "
        "start again with each.",
        rich_help_panel=_LENGTH,
    ),
]
PositionsOption = Annotated[
    str,
    typer.Option(
        "--positions",
        help="full, or pose: train for the length on short windows that skip positions.",
        rich_help_panel=_LENGTH,
    ),
]
WindowOption = Annotated[
    str | None,
    typer.Option(
        "--window",
        help="With pose: tokens of a window. Default: the original context length.",
        rich_help_panel=_LENGTH,
        show_default=False,
    ),
]
AttentionOption = Annotated[
    str,
    typer.Option("--attention", help="full, or shifted: LongLoRA's groups while training.", rich_help_panel=_LENGTH),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group",
        help="With shifted: tokens of a group. Default: a quarter of a sequence.",
        rich_help_panel=_LENGTH,
        show_default=False,
    ),
]

RankOption = Annotated[int, typer.Option("--rank", help="Rank of the LoRA matrices.", rich_help_panel=_LORA)]
AlphaOption = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        help="Weight of the LoRA matrices. Default: twice the rank.",
        rich_help_panel=_LORA,
        show_default=False,
    ),
]
DropoutOption = Annotated[
    float, typer.Option("--dropout", help="Share of a LoRA input that is dropped.", rich_help_panel=_LORA)
]
TargetsOption = Annotated[
    str | None,
    typer.Option(
        "--targets",
        help="Linear layers that get LoRA matrices, as q_proj,v_proj. Default: all.",
        rich_help_panel=_LORA,
        show_default=False,
    ),
]
RsloraOption = Annotated[
    bool, typer.Option("--rslora", help="Divide alpha by the root of the rank.", rich_help_panel=_LORA)
]
DoraOption = Annotated[bool, typer.Option("--dora", help="Train magnitudes beside directions.", rich_help_panel=_LORA)]
TrainNormsOption = Annotated[bool, typer.Option("--train-norms", help="Train the norms too.", rich_help_panel=_LORA)]
TrainEmbeddingsOption = Annotated[
    bool, typer.Option("--train-embeddings", help="Train the input embeddings too.", rich_help_panel=_LORA)
]
MlmProbabilityOption = Annotated[
    float,
    typer.Option(
        "--mlm-probability", help="Encoders: share of the tokens that they must guess.", rich_help_panel=_LOOP
    ),
]
FullOption = Annotated[bool, typer.Option("--full", help="Train every weight, without LoRA.", rich_help_panel=_LORA)]

LearningRateOption = Annotated[
    float | None,
    typer.Option(
        "--learning-rate",
        help="Its peak. Default: 2e-4, and 2e-5 with --full.",
        rich_help_panel=_LOOP,
        show_default=False,
    ),
]
ScheduleOption = Annotated[
    str, typer.Option("--schedule", help="How the rate falls: cosine, linear, constant.", rich_help_panel=_LOOP)
]
WarmupOption = Annotated[
    float, typer.Option("--warmup", help="Share of the steps in which the rate rises.", rich_help_panel=_LOOP)
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        "--optimizer",
        help="By the Trainer's own name, as adamw_torch, adamw_8bit or adafactor; or muon.",
        rich_help_panel=_LOOP,
    ),
]
WeightDecayOption = Annotated[
    float, typer.Option("--weight-decay", help="Share that a weight loses per unit of rate.", rich_help_panel=_LOOP)
]
Beta1Option = Annotated[
    float, typer.Option("--beta1", help="How long AdamW remembers gradients.", rich_help_panel=_LOOP)
]
Beta2Option = Annotated[
    float, typer.Option("--beta2", help="How long AdamW remembers their squares.", rich_help_panel=_LOOP)
]
NeftuneOption = Annotated[
    float | None,
    typer.Option("--neftune", help="Noise on the embeddings, as 5.", rich_help_panel=_LOOP, show_default=False),
]
CheckpointingOption = Annotated[
    bool | None,
    typer.Option(
        "--checkpointing/--no-checkpointing",
        help="Compute activations twice to save memory. Default: above 4096 tokens.",
        rich_help_panel=_LOOP,
        show_default=False,
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Decides order, weights and skips.", rich_help_panel=_LOOP)]
SaveEveryOption = Annotated[int, typer.Option("--save-every", help="Steps between two saves.", rich_help_panel=_LOOP)]
EvalEveryOption = Annotated[
    int | None,
    typer.Option(
        "--eval-every",
        help="Steps between two evaluations on --eval-data. Default: at every save.",
        rich_help_panel=_LOOP,
        show_default=False,
    ),
]
KeepBestOption = Annotated[
    bool,
    typer.Option("--keep-best", help="Take the save that was best on --eval-data.", rich_help_panel=_LOOP),
]
PatienceOption = Annotated[
    int | None,
    typer.Option(
        "--patience",
        help="Stop after so many evaluations without a better one, and take the best.",
        rich_help_panel=_LOOP,
        show_default=False,
    ),
]
ReportToOption = Annotated[
    str, typer.Option("--report-to", help="none, tensorboard, wandb or trackio.", rich_help_panel=_LOOP)
]
QuantizeOption = Annotated[
    str,
    typer.Option(
        "--quantize", help="none, or 4bit: keep frozen weights in 4 bits while training.", rich_help_panel=_LOOP
    ),
]
ContextParallelOption = Annotated[
    int,
    typer.Option(
        "--context-parallel", help="Accelerators that share one sequence (ring attention).", rich_help_panel=_LOOP
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto or cpu.", rich_help_panel=_LOOP)]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="Of frozen weights: auto, bf16, fp16 or fp32.", rich_help_panel=_LOOP)
]

MergeOption = Annotated[bool, typer.Option("--merge/--no-merge", help="Write a full checkpoint, or the adapter alone.")]
EvalOption = Annotated[
    str | None,
    typer.Option("--eval", help="Tasks to ask before and after, as needle,short.", show_default=False),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT if ctxext made it, and an unfinished run beside it.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Read the data, estimate memory and time, and stop before training.")
]
