"""Convert a checkpoint: the calls behind the command and the Python interface."""

import json
from dataclasses import dataclass
from pathlib import Path

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.converters.apply import Written, apply_plan
from ctxext.converters.calibration import Calibration, calibrated
from ctxext.converters.links import check_link
from ctxext.converters.plan import Plan, make_plan
from ctxext.recipes.code.layout import without_code
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.encodings.rotary import model_config
from ctxext.recipes.recipe import Recipe, plain_config
from ctxext.system.files import Progress
from ctxext.system.output_directory import check_out
from ctxext.verify.carried import check_carried
from ctxext.verify.logits import Verification, compare_logits


@dataclass(frozen=True)
class Conversion:
    """A conversion that was carried out.

    Attributes:
        plan: What was planned.
        written: What was written.
        verification: What the checks found: its frequencies, and where code travels its logits in a clean process;
            None where nobody asked.
    """

    plan: Plan
    written: Written
    verification: Verification | None


def convert(
    source: str,
    out: str | Path,
    recipe: Recipe,
    *,
    revision: str | None = None,
    token: str | None = None,
    link: str = "auto",
    digest: bool = False,
    overwrite: bool = False,
    overwrite_anything: bool = False,
    replace_scaling: bool = False,
    allow_shorter: bool = False,
    original_length: int | None = None,
    check: bool = True,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert a checkpoint and save it as a portable one.

    Args:
        source: A folder, a Hub id, or `demo`.
        out: The folder to make.
        recipe: What to apply.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token; the usual places are read where it is None.
        link: How the weights come there: "auto" (cloned, else copied), "reflink", "hard", "symlink" or "copy".
        digest: Record the SHA-256 of the weights, which reads them.
        overwrite: Replace a folder that this package made.
        overwrite_anything: Replace it whatever lies there.
        replace_scaling: Take an existing schedule away first.
        allow_shorter: Accept a result that reads less than the source.
        original_length: What the source was trained on, in tokens, where its files do not say it.
        check: Ask the installed transformers whether it rotates as the recipe says, and load a result that carries
            code in a clean process and compare its logits.
        calibration: How a calibrated head order is measured; the package's own text where None.
        progress: Called with what is being done, how much of it and how much in all.

    Raises:
        CtxextError: the source, the recipe or the place is refused; nothing is written then.
    """
    checkpoint = open_checkpoint(source, revision=revision, token=token, original_length=original_length)
    check_link(link)
    check_out(Path(out), checkpoint.folder, overwrite=overwrite, overwrite_anything=overwrite_anything)
    recipe = calibrated(
        checkpoint,
        recipe,
        calibration or Calibration(),
        replace_scaling=replace_scaling,
        allow_shorter=allow_shorter,
        progress=progress,
    )
    plan = make_plan(checkpoint, recipe, replace_scaling=replace_scaling, allow_shorter=allow_shorter)
    return carry_out(
        plan,
        Path(out),
        link=link,
        digest=digest,
        overwrite=overwrite,
        overwrite_anything=overwrite_anything,
        check=check,
        progress=progress,
    )


def carry_out(
    plan: Plan,
    out: Path,
    *,
    link: str = "auto",
    digest: bool = False,
    overwrite: bool = False,
    overwrite_anything: bool = False,
    check: bool = True,
    progress: Progress | None = None,
) -> Conversion:
    """Write a plan, and check a result that carries code before it gets its name.

    Args:
        plan: What to write.
        out: The folder to make.
        link: How the weights come there: "auto" (cloned, else copied), "reflink", "hard", "symlink" or "copy".
        digest: Record the SHA-256 of the weights.
        overwrite: Replace a folder that this package made.
        overwrite_anything: Replace it whatever lies there.
        check: Ask the installed transformers whether it rotates as the recipe says, before anything is written, and
            load a result that carries code in a clean process and compare its logits.
        progress: Called with what is being done, how much of it and how much in all.

    Raises:
        CtxextError: the installed transformers does not carry the recipe, the place is refused, the disk is full, or
            the result is not what the method says.
    """
    found: list[Verification] = []
    if check:
        found += _frequencies_checked(plan)

    def checked(folder: Path) -> None:
        if not check or not plan.recipe.needs_code:
            return
        if runs_only_own_code(open_checkpoint(str(folder))):
            found.append(compare_logits(folder, plan.source, plan.recipe, plan.model, plan.stock))
        else:
            found.append(Verification(skipped="the source brings Python code of its own, which is not run"))

    written = apply_plan(
        plan,
        out,
        link=link,
        digest=digest,
        overwrite=overwrite,
        overwrite_anything=overwrite_anything,
        progress=progress,
        before_publishing=checked,
    )
    return Conversion(plan, written, found[-1] if found else None)


def _frequencies_checked(plan: Plan) -> list[Verification]:
    """What the installed transformers makes of the schedule; nothing where the recipe leaves it alone."""
    plain = plain_config(model_config(json.loads(plan.texts["config.json"])))
    difference = check_carried(plan.recipe, without_code(plan.source.config), plain, plan.stock)
    return [] if difference is None else [Verification(of="frequencies", difference=difference)]
