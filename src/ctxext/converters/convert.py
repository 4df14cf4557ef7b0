"""Convert a checkpoint: one function behind the command and the Python interface.

The result is written to a temporary folder next to OUT and renamed when it is complete, so OUT is never incomplete.
By default, editing the result does not change the source. A hard link shares its bytes with the source permanently, so
it is created only on request, never for a file of the Hub's cache or of this package, and it becomes read-only.
docs/security.md explains the reasons.
"""

import hashlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctxext.checkpoint.loading import check_complete, check_described
from ctxext.checkpoint.opening import Checkpoint, fingerprint, is_cached, open_checkpoint
from ctxext.console import shows_progress
from ctxext.converters.calibration import calibrate_recipe, set_head_order
from ctxext.converters.card import CardFacts, card_metadata, declared_base, render
from ctxext.converters.options import CLONED, COPIED, HARD, LINKS, ConvertOptions, SaveOptions
from ctxext.converters.plan import Plan, default_name, make_plan
from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST, Progress, as_json, check_room, copy_whole, report_stage, sha256_of, stamp_of
from ctxext.files.output_directory import check_out, output_directory
from ctxext.files.packages import installed_version
from ctxext.files.tensor_files import CANNOT, copy_range, rewrite
from ctxext.notebook import table
from ctxext.options import accepts_options
from ctxext.recipes.base import Method
from ctxext.recipes.code.layout import without_code
from ctxext.recipes.code.own_code import runs_only_own_code
from ctxext.recipes.recipe import Recipe, recipe_of
from ctxext.verify.isolated_checks import Verification, compare_logits
from ctxext.verify.rotation import check_kept_rotation, check_rotation
from ctxext.version import __version__

_RECORDED_PACKAGES = ("transformers", "torch", "safetensors", "huggingface_hub")
_MANY = 4
"""Number of concurrent copies, which the kernel performs."""
REWRITTEN = "rewritten"
"""Status of a weight file with tensors that a method changed."""
_FICLONE = 0x40049409
_PACKAGE = Path(__file__).parents[1]

_HARD_NOTE = (
    "the weight files are hard links to those of the source, and both are now read-only; writing to one anyway, for "
    "example as root, changes both."
)


@dataclass(frozen=True)
class Written:
    """Placement of each weight file, by name: "cloned", "hard-linked", "copied" or "rewritten"."""

    ways: Mapping[str, str]

    @property
    def num_linked(self) -> int:
        """Number of weight files that use no disk space: clones and links."""
        return sum(how not in (COPIED, REWRITTEN) for how in self.ways.values())

    @property
    def num_copied(self) -> int:
        """Number of weight files that were copied."""
        return sum(how == COPIED for how in self.ways.values())

    @property
    def how(self) -> str:
        """Short description of how the weights were placed."""
        return ", ".join(sorted(set(self.ways.values()))) or COPIED

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about linked weights."""
        return (_HARD_NOTE,) if HARD in self.ways.values() else ()


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        out: The new checkpoint, as the caller named it.
        plan: The plan of the conversion.
        written: The written weight files.
        verification: The result of the last check: frequencies, or, if the result contains code, logits in a clean
            process; None if there was none.
        seconds: Duration of each stage, by name.
    """

    out: Path
    plan: Plan
    written: Written
    verification: Verification | None
    seconds: Mapping[str, float]

    def __repr__(self) -> str:
        encoding = self.plan.encoding
        lengths = f"{encoding.trained_length} → {encoding.usable_length} tokens"
        return f"Conversion({self.out.name!r}: {self.plan.recipe.summary()}, {lengths}, weights {self.written.how})"

    def _repr_html_(self) -> str:
        """Render a summary for a notebook, as HTML with all text escaped: names may be untrusted."""
        encoding = self.plan.encoding
        rows = {
            "out": str(self.out),
            "recipe": self.plan.recipe.summary(),
            "tokens": f"{encoding.trained_length} → {encoding.usable_length}",
            "weights": self.written.how,
        }
        return table(rows)


@accepts_options(ConvertOptions)
@shows_progress("converting")
def convert(
    source: str | Path,
    out: str | Path | None,
    recipe: Recipe | Method | Iterable[Method] | str | Path,
    *,
    options: ConvertOptions,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Conversion:
    """Convert a checkpoint and save it as a portable one.

    Args:
        source: A folder, a Hub id, or `demo`.
        out: The folder to create; ./NAME-METHOD-LENGTH if None.
        recipe: A recipe, a method, methods in order, or the name of a recipe file or a preset.
        options: How to convert and to write. Each field is also a keyword argument, such as overwrite=True.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token; the usual places are read if None.
        progress: Called with a label, the amount done and the total. By default, a terminal or a notebook shows a
            progress bar.
        notify: Called with additional information, one line each.

    Raises:
        CtxextError: the source, the recipe or OUT is invalid, the installed transformers does not implement the
            recipe, the disk is full, or the result does not match the method; no files are left behind.
    """
    recipe, seconds = recipe_of(recipe), dict[str, float]()
    checkpoint = _open(source, out, options, revision=revision, token=token)
    if recipe.needs_calibration:
        if notify is not None:
            notify("Loading the model once to order its heads. If it does not fit into memory, use --head-order fixed.")
        with _measure_time(seconds, "calibration"):
            recipe = calibrate_recipe(checkpoint, recipe, options, progress)
    plan = make_plan(checkpoint, recipe, replace_scaling=options.replace_scaling, allow_shorter=options.allow_shorter)
    if out is None:
        out = Path(default_name(Path(plan.source.name).name, plan.recipe, plan.encoding))
        check_out(out, checkpoint.folder, options)
    if options.check:
        (check_described if plan.recipe.needs_code else check_complete)(checkpoint)
    verification = None
    with output_directory(Path(out).resolve(), [checkpoint.folder], options) as work:
        digests = _write_texts(plan, work)
        if options.check:  # Before the weights are placed, which may take minutes.
            with _measure_time(seconds, "verification"):
                verification = check_frequencies(plan)
        with _measure_time(seconds, "weights"):
            ways = _write_rest(plan, work, digests, options, progress)
        if options.check and plan.recipe.needs_code:
            report_stage(progress, "checking the converted model in a clean process")
            verification = Verification(skipped="the source contains Python code, which is not run")
            if runs_only_own_code(open_checkpoint(str(work))):
                with _measure_time(seconds, "verification"):
                    verification = compare_logits(work, plan.source, plan.recipe, plan.model, plan.stock)
    return Conversion(Path(out), plan, Written(ways), verification, seconds)


@contextmanager
def _measure_time(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Add the duration of the context to that of a stage."""
    started = time.perf_counter()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started


@accepts_options(ConvertOptions)
def plan_conversion(
    source: str | Path,
    out: str | Path | None,
    recipe: Recipe | Method | Iterable[Method] | str | Path,
    *,
    options: ConvertOptions,
    revision: str | None = None,
    token: str | None = None,
    notify: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a conversion without downloading weights or loading a model.

    Args:
        source: A folder, a Hub id, or `demo`.
        out: The folder of the result; it is checked unless it is None.
        recipe: The recipe; uncalibrated heads are ordered by index.
        options: How to convert. Each field is also a keyword argument.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token; the usual places are read if None.
        notify: Called with additional information, one line each.

    Raises:
        CtxextError: the source, the recipe or OUT is invalid.
    """
    recipe = recipe_of(recipe)
    checkpoint = _open(source, out, options, weights=False, revision=revision, token=token)
    if recipe.needs_calibration and notify is not None:
        notify("The conversion will load the model once to order its heads; the plan orders them by index.")
    recipe = set_head_order(recipe, "fixed")
    return make_plan(checkpoint, recipe, replace_scaling=options.replace_scaling, allow_shorter=options.allow_shorter)


def _open(source: str | Path, out: str | Path | None, options: ConvertOptions, **where: Any) -> Checkpoint:
    """Open the source, and check OUT if it is given."""
    checkpoint = open_checkpoint(str(source), original_length=options.original_length, **where)
    if out is not None:
        check_out(Path(out), checkpoint.folder, options)
    return checkpoint


def check_frequencies(plan: Plan) -> Verification | None:
    """Verify the frequencies that the installed transformers computes; return None if none can change."""
    if plan.start.family.encoding == "none" and plan.start.family.positions == "rotary":
        return Verification(of="frequencies", difference=check_kept_rotation(plan.start.config, plan.stock))
    difference = check_rotation(plan.recipe, without_code(plan.source.config), plan.start, plan.stock)
    return None if difference is None else Verification(of="frequencies", difference=difference)


def card_of(plan: Plan) -> str:
    """Return the model card of a plan."""
    source = plan.source
    return render(
        CardFacts(
            source=source.public_name,
            revision=source.revision,
            base="" if source.revision else declared_base(source.config),
            inherited=card_metadata(source.folder),
            recipe=plan.recipe,
            model=plan.model,
            cautions=plan.cautions,
            rewritten=[tensor.name for tensor in plan.rewritten],
        )
    )


def _write_text(work: Path, name: str, text: str) -> str:
    """Write a file into a folder and return its digest."""
    content = text.encode()
    (work / name).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _write_texts(plan: Plan, work: Path) -> dict[str, str]:
    """Write config.json and the other files with new content, except the card; return their digests by name."""
    texts = {"config.json": as_json(plan.model.config), **plan.texts}
    return {name: _write_text(work, name, text) for name, text in texts.items()}


def _write_rest(
    plan: Plan, work: Path, files: dict[str, str], options: SaveOptions, progress: Progress | None
) -> dict[str, str]:
    """Place the weights, and write the card, the other files and the record; return how each weight file was placed.

    `files` contains the digests of the files that were written before.
    """
    ways = _place_weights(plan, work, options.link, progress)
    note = f"\n> On the disk where this checkpoint was created, {_HARD_NOTE}\n" if HARD in ways.values() else ""
    files["README.md"] = _write_text(work, "README.md", card_of(plan) + note)
    weights = dict[str, str | None]()
    for path in plan.others:
        target = work / path
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_whole(plan.source.folder / path, target)
        files[path.as_posix()] = sha256_of(target)
    for name, how in ways.items():  # Record a digest if it is free or requested.
        known = None if how == REWRITTEN else plan.source.known_digest(Path(name))
        needs_digest = options.digest or options.link == "copy"
        weights[name] = known or (sha256_of(work / name) if needs_digest else None)
    source, shared = plan.source, {name: how for name, how in ways.items() if how == HARD}
    origin = {} if source.revision else {"fingerprint": fingerprint(source)}
    record = {
        "ctxext": __version__,
        "source": {"name": source.public_name, "revision": source.revision, **origin},
        "recipe": plan.recipe.to_dict(),
        "versions": {name: installed_version(name) for name in _RECORDED_PACKAGES},
        "config": plan.model.config,
        "files": dict(sorted(files.items())),
        "weights": dict(sorted(weights.items())),
        **({"rewritten": {tensor.name: list(tensor.shape) for tensor in plan.rewritten}} if plan.rewritten else {}),
        # `verify` identifies a weight file without a digest by its size and time.
        "stamps": {name: stamp_of(work / name) for name in sorted(ways)},
        **({"links": shared} if shared else {}),
    }
    (work / MANIFEST).write_text(as_json(record), encoding="utf-8")
    return ways


def _place_weights(plan: Plan, work: Path, link: str, progress: Progress | None) -> dict[str, str]:
    """Place every weight file, several at once; return how each was placed."""
    origins = {path: (plan.source.folder / path).resolve() for path in plan.weights}
    for path in origins:
        (work / path).parent.mkdir(parents=True, exist_ok=True)
    needed = sum(origin.stat().st_size for origin in origins.values())
    if link == "copy":
        check_room(work, needed)
    is_over = threading.Event()

    def report(name: str, done: int, total: int) -> None:
        if is_over.is_set():
            raise InterruptedError
        if progress is not None:
            progress(name, done, total)

    with ThreadPoolExecutor(_MANY) as pool:
        futures = {}
        for path, origin in origins.items():
            tensors = [tensor for tensor in plan.rewritten if tensor.path == path]
            way = partial(rewrite, tensors=tensors) if tensors else partial(_place_file, link=link)
            futures[path] = pool.submit(way, origin, work / path, progress=report)
        try:
            return {path.as_posix(): future.result() or REWRITTEN for path, future in futures.items()}
        finally:  # After a failure or Ctrl-C, no copy starts, and running ones stop.
            is_over.set()
            pool.shutdown(cancel_futures=True)


def _clone(origin: Path, target: Path, _progress: Progress | None) -> bool:
    """Clone a file, which shares its blocks until either is written: Btrfs, XFS, bcachefs, ZFS."""
    try:
        import fcntl
    except ImportError:
        return False
    with origin.open("rb") as reading, target.open("wb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), _FICLONE, reading.fileno())
        except OSError as error:
            if error.errno in CANNOT:
                return False
            raise
    return True


def _hard(origin: Path, target: Path, _progress: Progress | None) -> bool:
    """Hard-link a file of the user, which becomes read-only under both names."""
    status = origin.stat()
    # Files of the Hub's cache and of this package do not belong to the user.
    if is_cached(origin) or _PACKAGE in origin.parents or status.st_uid != os.geteuid():
        return False
    try:
        os.link(origin, target)
        target.chmod(stat.S_IMODE(status.st_mode) & ~0o222)
    except OSError as error:
        if error.errno in CANNOT:
            return False
        raise
    return True


def _copy(origin: Path, target: Path, progress: Progress | None) -> bool:
    """Copy a file, in the kernel if possible."""
    size, done = origin.stat().st_size, 0
    check_room(target.parent, size)
    with origin.open("rb") as reading, target.open("wb", buffering=0) as writing:
        for count in copy_range(reading, writing, 0, size):
            done += count
            if progress is not None:
                progress(target.name, done, size)
    return True


_WAYS: Mapping[str, Callable[[Path, Path, Progress | None], bool]] = {CLONED: _clone, HARD: _hard, COPIED: _copy}
"""Functions that copy or link a file, by kind. Each returns whether it was possible."""


def _place_file(origin: Path, target: Path, link: str, progress: Progress | None = None) -> str:
    """Place a file, with its time, by one of `LINKS`; return how it was placed."""
    for how in LINKS[link]:
        if _WAYS[how](origin, target, progress):
            if how != HARD:
                status = origin.stat()
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            return how
        target.unlink(missing_ok=True)
    raise CtxextError(
        f'"{origin.name}" cannot be cloned: the file system of "{target.parent.parent}" does not support it.',
        hint="Omit --link to copy, or use --link hard.",
    )
