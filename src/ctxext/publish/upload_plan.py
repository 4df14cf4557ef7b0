"""The plan of a push: files, model card, and a record with the digest of every file."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ctxext.checkpoint.opening import Checkpoint, open_checkpoint
from ctxext.converters.card import (
    ANY_ID,
    EXTENDED,
    CardFacts,
    CardResults,
    card_metadata,
    declared_base,
    front_matter,
    render,
)
from ctxext.converters.plan import cautions_of
from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST, Progress, as_json, sha256_of
from ctxext.files.output_directory import explain_disk_errors, write_whole
from ctxext.files.schemas import read_json_object
from ctxext.finetune.options import TrainingOptions
from ctxext.models.checkpoint_info import info_of
from ctxext.options import option, option_name, options_of, with_documented_options
from ctxext.publish.results import FOLDER, build_results, command_of, entry_of, files_of, read_report
from ctxext.verify.conversion import Conversion, training_of
from ctxext.verify.file_checks import CARD
from ctxext.verify.run import READING, failures, run_checks

REPORT, CURVE = "finetune.json", "loss.png"
_OF_THE_MACHINE = (*("device", "dtype", "micro_batch", "checkpointing", "low_memory", "save_every", "report_to"),)
"""Options that do not affect the result of a training run."""
_OF_THE_DATA = {
    "format": "--format",
    "text_field": "--text-field",
    "split": "--split",
    "eval": "--eval-data",
}
"""Fields of finetune.json about the data, and their options."""
ADAPTER = "adapter"
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OF_ADAPTERS = ("lora_", "modules_to_save", "norm", "embed_tokens", "lm_head")
_OF_THE_DISK = ("stamps", "links")


@with_documented_options
@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Options for sharing a checkpoint."""

    private: bool = option(False, help="Make the repository private.")
    revision: str | None = option(None, help="Branch to push to; created if it does not exist.")
    create_pr: bool = option(False, help="Open a pull request.")
    message: str | None = option(None, help="Title of the commit.")
    report: Path | str | None = option(None, help="Results of ctxext eval, for the model card.", metavar="DIR")
    adapter: bool = option(False, help="Push only the LoRA adapter.")
    base: str | None = option(
        None, help="Base model for the card; for an adapter, its checkpoint.", metavar="USER/NAME"
    )
    license: str | None = option(
        None, help="License for the card, for example apache-2.0. Default: that of the source.", metavar="ID"
    )
    check: bool = option(True, help="Verify the files before uploading.", flags=("--verify/--no-verify",))


@dataclass(frozen=True)
class UploadPlan:
    """The files that a push uploads.

    Attributes:
        folder: The folder of the files.
        names: The existing files, relative to it.
        texts: Content of files that the push writes or changes, by name, without the record.
        warnings: Warnings for the user.
        is_adapter: Whether only an adapter is pushed; its folder is not changed.
        base: Hub id of an adapter's base checkpoint, or of the base that the user specifies.
        known: Digests of weight files that were already verified, by name.
    """

    folder: Path
    names: tuple[str, ...]
    texts: Mapping[str, bytes]
    warnings: tuple[str, ...] = ()
    is_adapter: bool = False
    base: str | None = None
    known: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"UploadPlan({self.folder.name!r}: {total(self.sizes)})"

    @property
    def card(self) -> str:
        """The model card."""
        return self.texts[CARD].decode()

    @property
    def contents(self) -> dict[str, Path | bytes]:
        """Each file by name, sorted: the path of an existing file, or the new content."""
        contents: dict[str, Path | bytes] = {name: self.folder / name for name in self.names}
        return dict(sorted((contents | dict(self.texts)).items()))

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of each file, by name."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.contents.items()
        }


class _WithoutReport(Checkpoint):
    """A checkpoint without its published report."""

    @property
    def files(self) -> list[Path]:
        """Every file except the report's."""
        return [path for path in super().files if path.parts[0] != FOLDER]


def pack(
    folder: Path,
    repository: str,
    options: PushOptions,
    progress: Progress | None = None,
) -> UploadPlan:
    """Verify a full checkpoint and plan its push without writing files."""
    report = Path(options.report) if options.report else None
    conversion = _conversion_of(folder, rewritten=FOLDER if report else None, progress=progress)
    conversion.checkpoint.check_files()  # Required in any case: a link must not publish files from elsewhere.
    failed = failures(run_checks(READING if options.check else (), conversion))
    if failed:
        source = conversion.compared_source if failed[0].check == "weights" else ""
        against = f" --against {shlex.quote(source)}" if source else ""
        raise CtxextError(
            f'"{folder}" failed verification: {failed[0].check}: {failed[0].detail}.',
            hint=f"Run ctxext verify {shlex.quote(str(folder))}{against}. If it is correct, push with --no-verify.",
        )
    results, files = None, list[Path]()
    if report:  # Match the report's entry by digest, with and without an earlier published report.
        content, checkpoint = read_report(report), conversion.checkpoint
        stripped = _WithoutReport(checkpoint.name, checkpoint.folder, checkpoint.config)
        digests = [info_of("this", version).digest for version in (stripped, checkpoint)]
        results = build_results(content, entry_of(content, digests), [path.name for path in files_of(report)])
        files = files_of(report, results.body)
        _check_links(report, files)
    texts = {f"{FOLDER}/{path.name}": path.read_bytes() for path in files}
    facts = _facts(conversion, repository, results, base=options.base, license=options.license)
    edited = _edited_card(conversion)
    warnings = [f"{CARD} was edited by hand and is kept. Delete it to generate a new one."] if edited else []
    warnings += _find_gaps(card_metadata(folder) if edited else front_matter(facts), is_edited=bool(edited))
    card = edited.replace(ANY_ID, repository) if edited else render(facts)
    names = tuple(path.as_posix() for path in conversion.checkpoint.files)
    known = {name: digest for name, digest in conversion.read_digests("weights").items() if digest}
    known = known if options.check else {}
    return UploadPlan(folder, names, {**texts, CARD: card.encode()}, tuple(warnings), base=options.base, known=known)


def _find_gaps(front: Mapping[str, Any], *, is_edited: bool) -> list[str]:
    """Return warnings about metadata that a public model needs."""
    gaps = {
        "base_model": ("its source is a local folder, so the card does not link to it", "--base USER/NAME"),
        "license": ("neither its source nor its card specifies one", "--license ID, for example --license apache-2.0"),
    }
    return [
        f"The model card has no {key}: {reason}. Add {f'it to {CARD}' if is_edited else option}."
        for key, (reason, option) in gaps.items()
        if not front.get(key)
    ]


def pack_adapter(folder: Path, repository: str, base: str | None = None) -> UploadPlan:
    """Plan the push of only the LoRA adapter, from its folder or its checkpoint's: configuration, weights and card."""
    place = adapter_in(folder)
    if place is None:
        raise CtxextError(f'"{folder}" has no adapter.', hint="ctxext finetune saves one in OUT/adapter.")
    names = tuple(name for name in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS, CARD) if (place / name).is_file())
    _check_links(folder, [place / name for name in names])
    if _ADAPTER_WEIGHTS not in names:
        raise CtxextError(f'"{place}" has no {_ADAPTER_WEIGHTS}.', hint="Save it with peft's save_pretrained.")
    _check_adapter(place / _ADAPTER_WEIGHTS)
    config = read_json_object(place / _ADAPTER_CONFIG)
    recorded = str(config.get("base_model_name_or_path") or "")
    base_id = base or recorded
    if base_id.count("/") != 1 or Path(base_id).is_absolute():
        raise CtxextError(
            f'The adapter belongs to "{Path(base_id).name}", which is not a Hub id.',
            hint=f"Push that checkpoint too, then use --base USER/{shlex.quote(Path(base_id).name)}",
        )
    changed = {**config, "base_model_name_or_path": base_id, "revision": None if base else config.get("revision")}
    texts = {_ADAPTER_CONFIG: as_json(changed).encode()} if base else {}
    line = 'base_model: "{}"'.format
    if (folder / MANIFEST).is_file():
        card = render(_facts(_conversion_of(folder), repository, None, base=base_id, is_adapter=True))
    elif (place / CARD).is_file():
        card = (place / CARD).read_text(encoding="utf-8").replace(line(recorded), line(base_id))
    else:
        card = f"---\nlibrary_name: peft\ntags: [lora, ctxext]\n{line(base_id)}\n---\n"
    return UploadPlan(place, names, {**texts, CARD: card.encode()}, is_adapter=True, base=base_id)


def adapter_in(folder: Path) -> Path | None:
    """Return the folder of an adapter: this folder or its subfolder; None without an adapter."""
    return next((place for place in (folder / ADAPTER, folder) if (place / _ADAPTER_CONFIG).is_file()), None)


def _check_links(folder: Path, files: Sequence[Path]) -> None:
    """Raise if a file to upload is outside its folder, as for a checkpoint."""
    for path in files:
        Checkpoint(str(folder), folder, {}).check_file(path.relative_to(folder))


def _check_adapter(weights: Path) -> None:
    """Raise if weights are not those of an adapter, so that no full model is published by mistake."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(weights, framework="numpy") as file:
            names = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CtxextError(f'"{weights.name}" cannot be read: {error}.') from error
    foreign = next((name for name in names if not any(word in name for word in _OF_ADAPTERS)), None)
    if foreign is not None:
        raise CtxextError(f'"{weights.name}" contains "{foreign}", which does not belong to an adapter.')


def _conversion_of(folder: Path, rewritten: str | None = None, progress: Progress | None = None) -> Conversion:
    if not folder.is_dir():
        raise CtxextError(f'The folder "{folder}" does not exist.', hint="Use a checkpoint created by ctxext convert.")
    conversion = Conversion(open_checkpoint(str(folder)), rewritten=rewritten, progress=progress)
    if not conversion.manifest or not (conversion.has_recipe or conversion.manifest.get("finetune")):
        raise CtxextError(f'"{folder}" was not created by ctxext: it has no {MANIFEST}.', hint="ctxext convert --help")
    return conversion


def _edited_card(conversion: Conversion) -> str | None:
    """Return the card in the folder if a person changed it, else None."""
    path, recorded = conversion.checkpoint.folder / CARD, conversion.read_digests("files").get(CARD)
    if not path.is_file() or recorded is None or sha256_of(path) == recorded:
        return None
    return path.read_text(encoding="utf-8")


def _facts(
    conversion: Conversion,
    repository: str,
    results: CardResults | None,
    *,
    base: str | None = None,
    license: str | None = None,
    is_adapter: bool = False,
) -> CardFacts:
    checkpoint, manifest = conversion.checkpoint, conversion.manifest
    source = manifest.get("source") or manifest.get("base") or {}
    recipe = conversion.recipe if conversion.has_recipe else None
    trained = EXTENDED if recipe else str(source.get("name"))
    return CardFacts(
        source=str(source.get("name")),
        revision=source.get("revision"),
        base=base or ("" if source.get("revision") else declared_base(conversion.model.config)),
        inherited=card_metadata(checkpoint.folder) | ({"license": license} if license else {}),
        recipe=recipe,
        model=conversion.model,
        rewritten=[*(conversion.manifest.get("rewritten") or {})],
        cautions=cautions_of(checkpoint, recipe, conversion.model) if recipe else (),
        training=training_of(conversion),
        training_command=training_command(checkpoint.folder, trained),
        curve="" if is_adapter else CURVE * (checkpoint.folder / CURVE).is_file(),
        model_id=repository,
        is_adapter=is_adapter,
        measured=results,
    )


def training_command(folder: Path, trained: str = EXTENDED) -> str:
    """Return the `ctxext finetune` command of a fine-tuned checkpoint; empty without a record of the training."""
    if not (folder / REPORT).is_file():
        return ""
    report = read_json_object(folder / REPORT)
    options, data = report.get("options") or {}, report.get("data") or {}
    values = {option: data.get(key) for key, option in _OF_THE_DATA.items()}
    for name in options_of(TrainingOptions):
        value = options.get(name)
        if name not in _OF_THE_MACHINE and value not in ([], getattr(TrainingOptions, name)):
            values[option_name(name)] = value
    values = {name: json.dumps(value) if _has_mappings(value) else value for name, value in values.items()}
    names = str(data.get("name") or "DATA").split(", ")
    return command_of(["ctxext", "finetune", trained, "OUT", *(w for name in names for w in ("--data", name))], values)


def _has_mappings(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)


def seal(plan: UploadPlan, progress: Progress | None = None) -> None:
    """Write the card, the report and the record with the digest of every file into the folder."""
    for name, content in plan.texts.items():
        _write(plan.folder / name, content)
    checkpoint = open_checkpoint(str(plan.folder))
    record: dict[str, str] = {}
    sizes = [(checkpoint.folder / path).stat().st_size for path in checkpoint.files]
    for number, path in enumerate(checkpoint.files, 1):
        name = path.as_posix()
        if name not in (MANIFEST, ".gitattributes"):
            record[name] = plan.known.get(name) or sha256_of(checkpoint.folder / path)
        if progress is not None:
            progress("digests", sum(sizes[:number]), sum(sizes))
    weights = [path.as_posix() for path in checkpoint.weight_files if len(path.parts) == 1]
    # Times and links are specific to this machine, and digests replace them.
    facts = {key: value for key, value in (checkpoint.read_json(MANIFEST) or {}).items() if key not in _OF_THE_DISK}
    written = {
        **facts,
        "files": {name: digest for name, digest in record.items() if name not in weights},
        "weights": {name: record[name] for name in weights},
    }
    _write(checkpoint.folder / MANIFEST, as_json(written).encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, unless it has this content already."""
    if path.is_file() and path.read_bytes() == content:
        return
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def total(sizes: Mapping[str, Any]) -> str:
    """Format the number and total size of all files."""
    return f"{len(sizes)} files, {sum(sizes.values()) / 1e6:,.1f} MB"
