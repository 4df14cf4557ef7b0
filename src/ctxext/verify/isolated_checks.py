"""Load a checkpoint in a process without ctxext, and compare its logits with the references of its methods."""

import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ctxext.checkpoint.auto_class import auto_class
from ctxext.checkpoint.loading import check_described, needs_accelerator, without_hub
from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.files.isolated import fault_within, last_line_of_errors, run_isolated
from ctxext.files.packages import NEWEST, OLDEST
from ctxext.recipes.base import Method
from ctxext.recipes.code.staging import stage_checkpoint
from ctxext.recipes.encodings.rotary import Rotary
from ctxext.recipes.methods.relation import Relation
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.recipe import Recipe
from ctxext.redaction import shorten
from ctxext.verify.decoding_process import LENGTH
from ctxext.verify.model_process import LOADED
from ctxext.verify.rotation import reference_error, reference_of, report_reference_errors

SCRIPT = Path(__file__).with_name("isolated_process.py")
TOLERANCE = 1e-4
"""Largest relative difference of logits, and of attention, from the references."""
_NUM_TOKENS = 64
_MORE = 300
"""Tokens of a prompt beyond the original context length."""
_BEYOND = 800
"""Tokens of a text after that length, at most (see `forms_process.py`)."""
_PADDED = 32
"""Tokens by which texts of one batch differ, at most."""
_WORK = 6 * 10**10
"""Square of the tokens of a text times the width of its queries, at most: seconds on one core."""
_LONGEST, _SLOW = 9000, 3000
"""Tokens of a text, at most, and of one with a reference that computes each angle."""
_SHORT = 4 * LENGTH
"""Original context length up to which the text with the checkpoint's own settings is run in one way only."""
_FAR = 8
"""Number of first keys, which are all far beyond the original context length."""
_PIECE = 131072
"""Values that Ms-PoE rotates at once on a CPU."""
_BYTES_PER_PARAMETER = 4


class ScriptFailedError(Exception):
    """A script ended with an error that no reference raised; the message is the last line of that error.

    Attributes:
        signal: The signal that stopped it; 0 if none did.
        has_loaded: Whether the checkpoint had loaded and returned logits by then.
    """

    def __init__(self, message: str, *, signal: int, has_loaded: bool) -> None:
        super().__init__(message)
        self.signal, self.has_loaded = signal, has_loaded


def run_script(
    checkpoint: Checkpoint, task: Mapping[str, Any], *, methods: Sequence[str] = (), foreign: bool = False
) -> dict[str, Any]:
    """Run a check of `isolated_process.py` in a process that cannot import ctxext, and return its result.

    Args:
        checkpoint: The checkpoint, which the process loads from a stage.
        task: The input of the check, as JSON; `check` is its name.
        methods: The methods with references that the check uses.
        foreign: Whether the user allowed code that ctxext did not write; it is loaded from the folder unchanged.

    Raises:
        ScriptFailedError: the script failed for another reason.
    """
    with stage_checkpoint(checkpoint, foreign=foreign) as stage, tempfile.TemporaryDirectory() as place:
        path = Path(place) / "task.json"
        content = {**task, "folder": str(stage.folder.resolve()), "trust": stage.trust}
        path.write_text(as_json(content), encoding="utf-8")
        result = run_isolated(SCRIPT, str(path))
    if result.returncode == 0:
        answer: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
        return answer
    if fault := fault_within(result, SCRIPT.parent.glob("references/*.py")):
        raise reference_error(methods, fault[1])
    raise ScriptFailedError(
        last_line_of_errors(result),
        signal=max(-result.returncode, 0),
        has_loaded=LOADED in result.stdout.splitlines(),
    )


@dataclass(frozen=True)
class LoadReport:
    """The properties of a loaded model.

    Attributes:
        error: Why it does not load; empty if it does.
        name: Its class.
        parameters: The number of parameters.
        missing: Weights that the files do not have.
        rotary: For each rotary embedding `module`, `layer_type`, `frequencies` and `scaling`.
        scores: The factor on the scores of each latent attention, by module.
    """

    error: str = ""
    name: str = ""
    parameters: int = 0
    missing: Sequence[str] = ()
    rotary: Sequence[dict[str, Any]] = ()
    scores: Mapping[str, float] = field(default_factory=dict)


def lacks_package(config: Mapping[str, Any], error: str) -> str:
    """Return the missing package of a quantized checkpoint, by its import error; empty for any other error."""
    if not (config.get("quantization_config") and re.search(r"(Import|ModuleNotFound|PackageNotFound)Error", error)):
        return ""
    return error.partition("Error: ")[2] or error


def load_isolated(checkpoint: Checkpoint, *, foreign: bool) -> LoadReport:
    """Load a model as its users do; `foreign` has the meaning that it has in `run_script`."""
    try:
        check_described(checkpoint, runs_code=foreign)
    except CtxextError as error:
        return LoadReport(f"{error.message} {error.hint}")
    try:
        task = {"check": "load", "auto": auto_class(checkpoint.config)}
        return LoadReport(**run_script(checkpoint, task, foreign=foreign))
    except ScriptFailedError as error:
        if error.signal:
            return LoadReport(f"loading was stopped by signal {error.signal}, possibly out of memory")
        return LoadReport(f"it does not load: {error}")


@dataclass(frozen=True)
class Verification:
    """The result of the check after converting.

    Attributes:
        of: The quantity compared: "logits" in a clean process, or "frequencies" in the installed transformers.
        skipped: Why nothing was checked; empty if it was.
        difference: Largest difference from the method's reference: of a logit or of an output of attention, relative to
            the largest one, or of a frequency relative to itself.
        change: Largest change of a logit against the source.
        forms: The forms of attention that were compared with the reference, such as "decoded (sdpa)".
        length: Their original context length in tokens, if the checkpoint's is too long; otherwise 0.
        unusable: The forms that the unconverted model computes wrongly too, such as "continued (sdpa)".
    """

    of: str = "logits"
    skipped: str = ""
    difference: float = 0.0
    change: float = 0.0
    forms: tuple[str, ...] = ()
    length: int = 0
    unusable: tuple[str, ...] = ()

    @property
    def coverage(self) -> str:
        """The forms in a few words, for one line of output."""
        if not self.forms:
            return ""
        # Each name has a call, a backend, and perhaps a kind.
        names = [re.split(r" \(|, ", form.removesuffix(")")) for form in self.forms]
        parts = [", ".join(dict.fromkeys(name[place] for name in names if name[place:])) for place in range(3)]
        if self.length:
            parts.append(f"lengths in proportion to an original length of {self.length} tokens")
        wrong = f"; wrong without the method too: {', '.join(self.unusable)}" if self.unusable else ""
        return f"{len(names)} forms of attention ({'; '.join(filter(None, parts))}){wrong}"


def compare_logits(
    folder: Path,
    source: Checkpoint,
    recipe: Recipe,
    model: ModelConfig,
    stock: ModelConfig,
    *,
    foreign: bool = False,
) -> Verification:
    """Load a converted checkpoint in a process that cannot import ctxext and compare its logits.

    `stock` is the configuration with only those steps that stock transformers supports; `foreign` as for `run_script`.
    """
    if reason := needs_accelerator(source):
        return Verification(skipped=f"cannot be checked here: {reason}")
    # Without headers a parameter is assumed to have 16 bits, as in most checkpoints.
    num_parameters = source.num_parameters or sum(map(source.size_of, source.weight_files)) // 2
    needed = 2 * _BYTES_PER_PARAMETER * num_parameters
    if needed > 0.8 * psutil.virtual_memory().available:
        return Verification(skipped=f"two copies of the model need {needed / 2**30:.1f} GiB of memory")
    steps, length = [step for step in recipe.steps if step.needs_code()], 0
    if stock.family.layer_theta_key:  # The base of its first rotary embedding, which no layer uses, may be another.
        stock = stock.with_encoding(stock.encoding)
    task: dict[str, Any] = {"stock": without_hub(stock.config), "steps": model.code["steps"]}
    if isinstance(model.encoding, Rotary):
        rotary = model.encoding
        task |= {"check": "logits", "full_types": list(model.family.full_types), "theta": rotary.theta}
        task["positions"] = _positions(recipe, rotary, model.code["steps"])
        task["decoding"] = [_settings_at(step, model.code["steps"]) for step in steps]
        task["forms"], length = _texts(steps, model, task["decoding"])
    else:
        longest = max(model.encoding.context_length, _NUM_TOKENS)
        task["stock"] = without_hub(stock.with_context_length(longest).config)
        task |= {"check": "slopes", "count": _NUM_TOKENS}
    try:
        methods = [step.name for step in steps]
        report = run_script(open_checkpoint(str(folder)), task, methods=methods, foreign=foreign)
    except ScriptFailedError as error:
        if error.has_loaded:
            raise CtxextError(
                f"The expected logits could not be computed: {error}",
                hint="The converted model loads and runs. Please report this. --no-verify converts without this check.",
            ) from error
        if package := lacks_package(source.config, str(error)):
            return Verification(skipped=f"cannot be checked here: {package}")
        raise CtxextError(
            f"The converted model does not load in a clean process: {error}",
            hint="--no-verify converts without this check.",
        ) from error
    if "refused" in report:
        raise CtxextError(
            f'"{model.family.model_type}" does not support {" and ".join(methods)}: {report["refused"]}.',
            hint="Choose another method.",
        )
    # Logits come first, because users see them; attention reveals errors that logits hide.
    differences = {
        "logits": report["difference"] / (report["scale"] or 1.0),
        "attention outputs": report.get("attention", 0.0),
    }
    if report["decoding"]:
        raise CtxextError(
            f"The converted model decodes incorrectly from its cache: {shorten(report['decoding'], 300)}.",
            hint=f"Tested: transformers {OLDEST} to {NEWEST}. --no-verify converts without this check.",
        )
    for quantity, relative in differences.items():
        if not math.isfinite(relative) or relative > TOLERANCE:
            raise CtxextError(
                f"The {quantity} of the converted model differ from the reference by {relative:.1e}.",
                hint="Please report this with the output of ctxext env. --no-verify converts without this check.",
            )
    outputs = "attention outputs" if isinstance(model.encoding, Rotary) else "logits"
    for form, relative in report.get("forms", {}).items():
        if isinstance(relative, str) or not relative <= TOLERANCE:
            raise CtxextError(
                f"The {outputs} of the converted model differ from the reference by {relative:.1e}: {form}."
                if not isinstance(relative, str)
                else f"The converted model fails in one form of attention: {form}: {shorten(relative, 300)}.",
                hint="Please report this with the output of ctxext env. --no-verify converts without this check.",
            )
    by_form: dict[str, float] = report.get("forms", {})
    worst = max([*differences.values(), *by_form.values()])
    return Verification(
        difference=worst,
        change=report["change"],
        forms=tuple(by_form),
        length=length,
        unusable=tuple(report.get("unusable", ())),
    )


def _texts(
    steps: Sequence[Method], model: ModelConfig, short: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """Return the texts for every form of attention, and their original context length if the checkpoint's is too long.

    The first has the checkpoint's settings, or these made shorter in proportion. If they have lengths, the second has
    those of a very short original length, so that levels change often.
    """
    settings, heads = model.code["steps"], int(model.read("num_attention_heads") or 1)
    width = heads * int(model.read("head_dim") or (model.read("hidden_size") or 0) // heads or 128)
    longest = max((step.get("original_length", 0) for step in settings), default=0)
    if not longest:  # No rule depends on a length, so the text only exceeds the pieces that a CPU rotates.
        prompt = min(max(2 * max(_PIECE // width, 32) + 37, 300), 2100)
        entries = [_rescaled_settings(step, settings, prompt // 2) for step in steps]
        ends = [place for entry in entries if isinstance(entry.get("rescale"), list) for place in entry["rescale"]]
        return [{"prompt": prompt, "steps": entries, "marks": ends, "is_short": prompt < 1200}], 0
    slow = [step for step in steps if not _is_quick(step, settings)]
    room = max(min(math.isqrt(_WORK // width), _SLOW if slow else _LONGEST) - _BEYOND, 1024)
    own, length = settings, min(longest, room)
    if length < longest:
        own = [_settings_at(step, settings, length, in_proportion=True) for step in steps]
    prompts, insides = [length + _MORE, LENGTH + _MORE], [length // 2, LENGTH // 2]
    if isinstance(model.encoding, Rotary) and model.encoding.rope_type in ("longrope", "dynamic"):
        trained = model.encoding.trained_length  # Texts must not cross the length that changes the frequencies.
        prompts = [max(prompt, trained + _PADDED) if trained < prompt + _BEYOND else prompt for prompt in prompts]
        insides = [0, 0]
    texts = list[dict[str, Any]]()
    for prompt, inside, entries in zip(prompts, insides, (own, short), strict=True):
        marks, level = dict[int, None](), 0
        for step in steps:
            entry = _settings_of(step, entries)
            if places := getattr(reference_of(step), "places", None):
                with report_reference_errors(step):
                    marks |= dict.fromkeys(places(entry, prompt + _BEYOND))
            level = level or _level(step, entry, prompt)
        text = {"prompt": prompt, "steps": entries, "marks": list(marks), "is_short": entries is short}
        # A short original length has rules like the very short one.
        is_sample = entries is own and length <= _SHORT
        texts.append({**text, "inside": inside, "level": level, "is_sample": is_sample})
    return texts, 0 if length == longest else length


def _settings_of(step: Method, settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a copy of the settings of a step."""
    return dict(next(entry for entry in settings if entry["method"] == step.name))


def _level(step: Method, entry: dict[str, Any], prompt: int) -> int:
    """Return the first query of a prompt, beyond the original context length, for which far keys move; 0 if none."""
    reference, length = reference_of(step), entry.get("original_length", 0)
    if not length or not hasattr(reference, "relation") or hasattr(reference, "factor"):
        return 0
    frequencies, before = tuple(entry.get("base", (1.0,))), None
    try:
        for m in range(length + _FAR, prompt - _FAR):
            pairs = [reference.relation(entry, entry["layers"][0], m, n, frequencies) for n in range(_FAR)]
            keys = [pair and pair[1] for pair in pairs]
            if before not in (None, keys):
                return m
            before = keys
    except Exception:  # The number of angles differs; other faults are reported when the outputs are computed.
        return 0
    return 0


def _is_quick(step: Method, settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the reference of a step gives one position for a pair, not an angle for each frequency."""
    reference, entry = reference_of(step), _settings_of(step, settings)
    if not hasattr(reference, "relation") or hasattr(reference, "factor"):
        return not hasattr(reference, "factor")
    m = 2 * entry["original_length"]
    with report_reference_errors(step):
        try:
            return len((reference.relation(entry, entry["layers"][0], m, m - 1, (1.0,)) or ("",))[0]) <= 1
        except (ValueError, IndexError):  # The reference requires another number of frequencies.
            return False


def _rescaled_settings(step: Method, settings: Sequence[Mapping[str, Any]], end: int) -> dict[str, Any]:
    """Return the settings of a step; if only a range of positions is compressed (Ms-PoE), it ends at `end` at most."""
    entry = _settings_of(step, settings)
    if isinstance(entry.get("rescale"), list) and entry["rescale"][1] > end:
        entry["rescale"] = [place * end // entry["rescale"][1] for place in entry["rescale"]]
    return entry


def _settings_at(
    step: Method, settings: Sequence[Mapping[str, Any]], length: int = LENGTH, *, in_proportion: bool = False
) -> dict[str, Any]:
    """Return the settings of a step at another original context length.

    Other lengths in the settings become the method's defaults. With `in_proportion` they are scaled instead, if the
    method accepts the result, so that the same form of attention is tested.
    """
    entry = _settings_of(step, settings)
    if "original_length" not in entry or (in_proportion and entry["original_length"] == length):
        return entry
    original = entry["original_length"]
    target = round(entry.get("target_length", 0) * length / original)
    if in_proportion and "target_length" in entry:
        entry["target_length"] = target
    if isinstance(step, Relation):
        names = [name for name in step.defaults(original) if name in entry]
        # Tiles are wider from 512 keys on.
        lengths = {name: max(round(entry[name] * length / original), min(entry[name], 512)) for name in names}
        if not in_proportion or dataclasses.replace(step, **lengths).problem(length, target):
            unset: dict[str, Any] = {name: None for name in step.defaults(original) if hasattr(step, name)}
            defaults = dataclasses.replace(step, **unset).defaults(length)
            lengths = {name: value for name, value in defaults.items() if name in entry}
            lengths["target_length"] = max(2 * length, target)
        entry |= lengths
    return {**entry, "original_length": length}


def _positions(recipe: Recipe, rotary: Rotary, steps: list[dict[str, Any]]) -> list[int]:
    """Return the positions of the check's tokens: consecutive, or over the whole context for methods of attention.

    Most of them are at the borders of rules, by the methods' references; the others are spread evenly, in pairs of
    neighbours.
    """
    attention = [step for step in recipe.steps if step.kind == "attention"]
    if not attention:
        return list(range(_NUM_TOKENS))
    reach, chosen = max(rotary.context_length, _NUM_TOKENS), dict[int, None]()
    for step in attention:
        settings = _settings_of(step, steps)
        places = getattr(reference_of(step), "places", None)
        with report_reference_errors(step):
            chosen |= dict.fromkeys(places(settings, reach)[: 3 * _NUM_TOKENS // 4] if places else [])
    room = max(_NUM_TOKENS - len(chosen), 4)
    start = [reach * number // room for number in range(0, room, 2)]
    return sorted({*chosen, *start, *(position + 1 for position in start)})
