"""`ctxext push`: upload a checkpoint to the Hub."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ctxext.cli.options import takes_options
from ctxext.cli.output import Output
from ctxext.options import HubOptions
from ctxext.publish.upload_plan import PushOptions, UploadPlan, total

_AGAIN = "Run the same command again; uploaded files are not sent twice."


@takes_options(without=("verbose",))
def push(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A converted checkpoint.")],
    repository: Annotated[str, typer.Argument(metavar="USER/NAME", help="Repository; created if it does not exist.")],
    *,
    options: PushOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Verify the files and show them with the model card, without uploading.")
    ] = False,
    hub: HubOptions,
    output: Output,
) -> None:
    """Upload a checkpoint to the Hub, with a model card and a SHA-256 digest of every file.

    After a lost connection, run the command again; uploaded files are not sent twice.

    Examples:
    ctxext push demo-yarn-2k user/demo-yarn-2k --report report --dry-run

    ctxext push demo-yarn-2k user/demo-yarn-2k --report report --private
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from ctxext.publish.push import prepare, send

    if dry_run:
        with output.progress("verifying", stopped="") as progress:
            plan = prepare(folder, repository, options, progress=progress)
        _print_plan(output, plan)
        return
    if output.quiet or output.as_json or not output.stderr.is_terminal:
        disable_progress_bars()
    with output.progress("pushing", stopped=_AGAIN) as progress:
        plan = prepare(folder, repository, options, progress=progress)
        for warning in plan.warnings:
            output.warning(warning)
        done = send(plan, repository, options, token=hub.token, progress=progress, notify=output.note)
    content = {"repository": repository, **vars(done), "others": list(done.others)}
    news = total(done.sizes) if done.is_new else f"{total(done.sizes)}, already up to date"
    output.result(content, Text.assemble(("✓", "green"), f" {repository}   {news}   {done.url}"))
    if done.others:
        output.warning(f"The repository also contains {', '.join(done.others[:5])}. These files were not changed.")
    branch = ("--revision", options.revision) if options.revision else ()
    output.next_step("ctxext", "verify", repository, *branch, why="Verify the upload")


def _print_plan(output: Output, plan: UploadPlan) -> None:
    for warning in plan.warnings:
        output.warning(warning)
    lines = [f"{size:>14,}  {name}" for name, size in plan.sizes.items()]
    ending = [f"{total(plan.sizes)}; nothing was written or uploaded"]
    content = {"files": plan.sizes, "card": plan.card, "warnings": list(plan.warnings)}
    output.result(content, *[Text(line) for line in [*lines, "", plan.card, *ending]])
