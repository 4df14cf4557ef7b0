"""The options of `ctxext search`."""

from pathlib import Path
from typing import Annotated

import typer

_ASKED, _RUN, _STUDY = "What is asked", "How it is run", "Study"

OutArgument = Annotated[
    Path, typer.Argument(metavar="[RECIPE]", help="The recipe file to write; NAME.png and NAME.db go beside it.")
]
TargetOption = Annotated[
    str | None, typer.Option("--target-length", help="The wanted context, for example 32k.", show_default=False)
]
TrialsOption = Annotated[
    int | None, typer.Option("--trials", min=1, help="Stop after so many recipes.", show_default=False)
]
MinutesOption = Annotated[
    float | None,
    typer.Option("--minutes", help="How long it may take, everything included. Default: 20, without --trials."),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option("--methods", help="Methods to try, as yarn,mspoe. Default: all that apply.", show_default=False),
]
GradientOption = Annotated[
    bool,
    typer.Option(
        "--gradient",
        help="Learn ratio, ramp and temperature of every KV head by gradient, the weights frozen; --trials counts "
        "steps.",
    ),
]
KeepShortOption = Annotated[
    float, typer.Option("--keep-short", help="Share by which the loss at the original context length may rise.")
]
SamplesOption = Annotated[
    int, typer.Option("--samples", min=1, help="Questions per depth and length.", rich_help_panel=_ASKED)
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        help="Prompt lengths. Default: the original context length and its doubles up to the target.",
        show_default=False,
        rich_help_panel=_ASKED,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        help="Your own text: documents at the original context length, and where to hide needles in. As for eval.",
        rich_help_panel=_ASKED,
    ),
]
CheckedOption = Annotated[
    int,
    typer.Option("--checked", min=2, help="Questions per depth and length at the end.", rich_help_panel=_ASKED),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Decides questions and recipes.", rich_help_panel=_ASKED)]
ChatTemplateOption = Annotated[
    bool, typer.Option("--chat-template/--no-chat-template", help="Use it where there is one.", rich_help_panel=_RUN)
]
StudyOption = Annotated[
    str | None,
    typer.Option(
        "--study",
        help="SQLite file of the study, or with --storage its name there. Default: as RECIPE is called.",
        show_default=False,
        rich_help_panel=_STUDY,
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage",
        help="Where machines share the study: the URL of a database, as postgresql+psycopg2://host/name, or the path "
        "of a journal file on a shared disk.",
        show_default=False,
        rich_help_panel=_STUDY,
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the study; several may at once.", rich_help_panel=_STUDY)
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the study and RECIPE.", rich_help_panel=_STUDY)
]
