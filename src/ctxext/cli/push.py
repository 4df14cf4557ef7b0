"""`ctxext push`: put a finished checkpoint on the Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ctxext.cli.options import JsonOption, QuietOption, TokenOption
from ctxext.cli.output import Output

if TYPE_CHECKING:
    from ctxext.publish.push import Push
    from ctxext.publish.upload_plan import UploadPlan


def push(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="The repository; made if it is not there.")],
    *,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="The branch to push to; made if it is not there.")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    message: Annotated[str | None, typer.Option("--message", help="The commit's title.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Results of ctxext eval, for the model card.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Push the LoRA adapter alone.")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="USER/NAME", help="The model it comes from, for the card; an adapter's checkpoint."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Refuse a checkpoint that is not what was recorded.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show files, sizes and the model card; write and send nothing.")
    ] = False,
    token: TokenOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Put a finished checkpoint on the Hub, with its model card and the digest of every file.

    Run it again after a broken connection: what has arrived is not sent twice.

    Examples:
    ctxext push demo-yarn-2k user/demo-yarn-2k --report report --dry-run

    ctxext push demo-yarn-2k user/demo-yarn-2k --report report --private
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from ctxext.publish.push import MESSAGE, PushOptions, prepare, send

    output = Output(as_json=as_json, quiet=quiet)
    options = PushOptions(
        private=private,
        revision=revision,
        create_pr=create_pr,
        message=message or MESSAGE,
        adapter=adapter,
        base=base,
        report=report,
        check=verify,
    )
    if dry_run:
        _show(output, prepare(folder, repository, options, read_weights=False))
        return
    if quiet or as_json or not output.stderr.is_terminal:
        disable_progress_bars()
    with output.progress("reading") as progress:
        plan = prepare(folder, repository, options, progress=progress)
        for warning in plan.warnings:
            output.warning(warning)
        done = send(plan, repository, options, token=token, progress=progress, tell=output.note)
    _tell(output, repository, options.revision, done)


def _show(output: Output, plan: "UploadPlan") -> None:
    """The plan of an upload, in lines."""
    from ctxext.publish.upload_plan import total

    for warning in plan.warnings:
        output.warning(warning)
    lines = [f"{size:>14,}  {name}" for name, size in plan.sizes.items()]
    ending = [f"{total(plan.sizes)}; nothing was written or sent"]
    content = {"files": plan.sizes, "card": plan.card, "warnings": list(plan.warnings)}
    output.result(content, *[Text(line) for line in [*lines, "", plan.card, *ending]])


def _tell(output: Output, repository: str, revision: str | None, done: "Push") -> None:
    """The result of an upload, and how to verify it."""
    from ctxext.publish.upload_plan import total

    content = {"repository": repository, **vars(done), "others": list(done.others)}
    news = total(done.sizes) if done.is_new else f"{total(done.sizes)}, all there already"
    output.result(content, Text.assemble(("✓", "green"), f" {repository}   {news}   {done.url}"))
    if done.others:
        output.warning(f"the repository also holds {', '.join(done.others[:5])}; they were left as they are.")
    branch = ("--revision", revision) if revision else ()
    output.next_step("ctxext", "verify", repository, *branch, why="Anyone can check it")
