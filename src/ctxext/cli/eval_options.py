"""The options of `ctxext eval`."""

from pathlib import Path
from typing import Annotated

import typer

from ctxext.evaluate.tasks.registry import TASKS

WRITTEN_TASKS = ("needle",)
"""What is asked by default where answers are only written."""

_ASKED, _RUN, _RESULTS = "What is asked", "How it is run", "Results"

ModelsArgument = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders, Hub ids, or demo.")]
TaskOption = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        "-t",
        help=f"{', '.join(TASKS)}; several with commas. Default: needle,short; with --engine vllm needle; of encoders "
        "passages,short.",
        show_default=False,
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        help="Prompt lengths, as 4k,32k. Default: the original and the present context length.",
        show_default=False,
    ),
]
DepthsOption = Annotated[str, typer.Option("--depths", help="So many depths, or a list in percent: 0,50,100.")]
SamplesOption = Annotated[int, typer.Option("--samples", min=1, help="Questions per cell, and documents to read.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Decides every question.")]
AllowBeyondOption = Annotated[bool, typer.Option("--allow-beyond", help="Ask beyond a model's context length too.")]

NeedlesOption = Annotated[
    int, typer.Option("--needles", min=1, help="needle: facts in the text; one is asked for.", rich_help_panel=_ASKED)
]
KvIdsOption = Annotated[
    str, typer.Option("--kv-ids", help="kv: uuid as in the paper, or number.", rich_help_panel=_ASKED)
]
HaystackOption = Annotated[
    Path | None, typer.Option("--haystack", help="needle: a text file to hide needles in.", rich_help_panel=_ASKED)
]
DocumentsOption = Annotated[
    Path | None, typer.Option("--documents", help="documents: questions, as JSON lines.", rich_help_panel=_ASKED)
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="perplexity, pseudo-perplexity, short: a text, JSON lines or parquet file, or the id of a data set.",
        rich_help_panel=_ASKED,
    ),
]
StrideOption = Annotated[
    int | None,
    typer.Option("--stride", min=1, help="perplexity: with a sliding window too.", rich_help_panel=_ASKED),
]
HarnessOption = Annotated[
    str | None,
    typer.Option(
        "--harness",
        help="Tasks of lm-evaluation-harness: ruler-6 (no download), ruler, longbench …",
        rich_help_panel=_ASKED,
    ),
]

GenerateOption = Annotated[
    bool,
    typer.Option("--generate", help="Let models write every answer out: slower, the same cells.", rich_help_panel=_RUN),
]
ChatTemplateOption = Annotated[
    bool, typer.Option("--chat-template/--no-chat-template", help="Use it where there is one.", rich_help_panel=_RUN)
]
BatchSizeOption = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Prompts at once. Default: what fits.", rich_help_panel=_RUN)
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="transformers, or vllm for the retrieval tasks of checkpoints that it serves.",
        rich_help_panel=_RUN,
    ),
]
EngineArgumentsOption = Annotated[
    str | None,
    typer.Option(
        "--engine-args",
        metavar="JSON",
        help="""More arguments of vllm.LLM: '{"tensor_parallel_size": 2}'.""",
        rich_help_panel=_RUN,
    ),
]
AttentionOption = Annotated[
    str | None, typer.Option("--attn", help="sdpa, eager, flash_attention_2 and so on.", rich_help_panel=_RUN)
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that a checkpoint brings along.", rich_help_panel=_RUN),
]

OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="Folder for the report. Default: report, report-2 …",
        show_default=False,
        rich_help_panel=_RESULTS,
    ),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with what is in OUT.", rich_help_panel=_RESULTS)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.", rich_help_panel=_RESULTS)]
