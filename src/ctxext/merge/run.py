"""Merge trained weights into a full checkpoint: recipe, both config formats, modeling code and tokenizer are kept."""

import copy
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ctxext.checkpoint.auto_class import MASKED, auto_class
from ctxext.checkpoint.families import family_of, text_config
from ctxext.checkpoint.loading import forbid_downloads, quiet_transformers, without_hub
from ctxext.checkpoint.opening import WEIGHT_SUFFIXES, Checkpoint, open_checkpoint
from ctxext.checkpoint.other_files import VERSIONED, find_excluded_files, other_formats
from ctxext.console import shows_progress
from ctxext.converters.card import (
    RECIPE_FILE,
    CardFacts,
    card_metadata,
    convert_command,
    declared_base,
    needs_file,
    render,
    wrap_command,
)
from ctxext.converters.plan import cautions_of
from ctxext.errors import CtxextError
from ctxext.files.content import MANIFEST, Progress, as_json, copy_whole
from ctxext.files.output_directory import check_out, output_directory, records_training
from ctxext.files.schemas import read_json_object
from ctxext.files.tensor_files import read_safetensors_header, rewrite
from ctxext.merge.options import MergeOptions
from ctxext.merge.tensors import (
    EXTRA_WEIGHTS,
    AdapterChanges,
    Changes,
    WholeChanges,
    find_shares,
    find_stored_name,
    list_changed_tensors,
    read_shapes,
)
from ctxext.options import accepts_options
from ctxext.recipes.code.own_code import runs_by_itself
from ctxext.recipes.code.staging import is_of_tokenizer
from ctxext.recipes.encodings.base import provenance
from ctxext.recipes.model_config import model_config
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.version import __version__


def render_card(base: Checkpoint, notes: Mapping[str, Any]) -> str:
    """Render the README.md of a merged checkpoint, with the record of its training."""
    record, model = provenance(base.config), model_config(base.config)
    recipe = recipe_from_dict(record["recipe"], "config.json") if record.get("recipe") else None
    return render(
        CardFacts(
            source=str(record.get("source") or base.public_name),
            revision=record.get("revision") if recipe else base.revision,
            base="" if record.get("revision") or base.revision else declared_base(base.config),
            inherited=card_metadata(base.folder),
            recipe=recipe,
            model=model,
            cautions=cautions_of(base, recipe, model) if recipe else (),
            training=notes,
        )
    )


def render_adapter_card(base: Checkpoint) -> str:
    """Render the README.md of a separate adapter: its base, and the command that creates the base."""
    name, record = base.public_name, provenance(base.config)
    lines = ["---", "library_name: peft", "tags: [lora, ctxext]", f'base_model: "{name}"', "---", ""]
    if model_config(base.config).is_extended:
        lines += [
            f"A LoRA adapter for `{name}`, without the changes for the longer context: load it on that checkpoint,"
        ]
        lines += ["or merge both with `ctxext merge`."]
    else:
        lines += [f"A LoRA adapter for `{name}`, trained within its context length. Merge both with `ctxext merge`."]
    if record.get("recipe") and record.get("source"):
        recipe = recipe_from_dict(record["recipe"], "config.json")
        command = wrap_command(
            convert_command(str(record["source"]), record.get("revision"), recipe, name.split("/")[-1])
        )
        lines += ["", f"That checkpoint is `{record['source']}` with {recipe.summary()}:", "", "```", command, "```"]
        if needs_file(recipe):
            text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, width=100).rstrip()
            lines += ["", f"with this `{RECIPE_FILE}`:", "", "```yaml", text, "```"]
    return "\n".join(lines) + "\n"


ADAPTER = "adapter"
_ADAPTER_FILES = (
    *("adapter_config.json", "adapter_model.safetensors", *EXTRA_WEIGHTS),
    *("README.md", "tokenizer_config.json", "generation_config.json"),
)
"""Files of an adapter that are copied to the result, in addition to those of a tokenizer."""
_OMITTED = ("README.md", MANIFEST, "config.json")


@dataclass(frozen=True)
class Merged:
    """Result of a merge.

    Attributes:
        folder: The merged checkpoint.
        num_changed: Number of tensors with new values.
        num_tensors: Number of all tensors.
    """

    folder: Path
    num_changed: int
    num_tensors: int


@accepts_options(MergeOptions)
@shows_progress("merging")
def merge(
    model: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    options: MergeOptions,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Merge a LoRA adapter, or a full training, into the checkpoint it was trained on.

    Args:
        model: A folder, a Hub id, or `demo`.
        adapter: The adapter's folder, as peft saves it, or the folder of a fully trained checkpoint.
        out: The folder to create.
        options: Options of the merge, and for replacing OUT. Each field is also a keyword argument, as strength=0.5.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token.
        progress: Called with a label, bytes done and bytes in total. By default, a terminal or a notebook shows a
            progress bar.

    Raises:
        CtxextError: The adapter does not fit the model, or OUT is invalid; nothing is written.
    """
    adapter, out = Path(adapter), Path(out)
    checkpoint = open_checkpoint(model, revision=revision, token=token)
    check_out(out, checkpoint.folder, options)
    check_out(out, adapter, options)
    checkpoint.check_weights()
    shapes = read_shapes(checkpoint)
    is_adapter = (adapter / "adapter_config.json").is_file() or not (adapter / "config.json").is_file()
    if not is_adapter:
        _check_is_training(checkpoint, open_checkpoint(adapter), shapes)
    changes = read_changes(checkpoint, adapter, is_adapter=is_adapter)
    notes: dict[str, Any] = {"adapter" if is_adapter else "tuned": adapter.resolve().name}
    notes |= {"strength": options.strength} if options.strength != 1 else {}
    out = out.resolve()
    with output_directory(out, [checkpoint.folder], options) as work:
        if is_adapter:
            # Copy only files of peft and the tokenizer; the folder may also contain secrets, code, pipes and links.
            (work / ADAPTER).mkdir()
            for name in (*_ADAPTER_FILES, *(path.name for path in adapter.iterdir() if is_of_tokenizer(path.name))):
                path = adapter / name
                if path.is_file() and not path.is_symlink():
                    copy_whole(path, work / ADAPTER / name)
        write_merged(checkpoint, changes, work, notes=notes, strength=options.strength, progress=progress)
    return Merged(out, len(changes.names), len(shapes))


_WRITER_KEYS = frozenset(
    {"ctxext", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
)
_SCHEDULE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
"""Keys of the schedule, which depend on the version of transformers; the encodings are compared instead."""


def read_changes(base: Checkpoint, folder: Path, *, is_adapter: bool) -> Changes:
    """Read the trained changes to the base's tensors from an adapter or a whole model."""
    stored, tied = read_shapes(base), find_tied_embeddings(base)
    if is_adapter:
        return AdapterChanges(folder, stored, tied=tied, shares=find_shares(base, stored))
    return WholeChanges(folder, stored, tied=tied)


def _check_is_training(base: Checkpoint, tuned: Checkpoint, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if a checkpoint cannot be a fine-tune of the base."""
    headers = [read_safetensors_header(path) for path in sorted(tuned.folder.glob("*.safetensors"))]
    shapes = {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}
    # For tied embeddings, some files contain both and others only the first.
    for head, name in find_tied_embeddings(base).items():
        if name in shapes:
            shapes.pop(head, None)
            shapes |= {head: shapes[name]} if head in stored else {}
    if mismatches := sorted(name for name in shapes.keys() | stored.keys() if shapes.get(name) != stored.get(name)):
        raise CtxextError(
            f'"{tuned.name}" was not trained from "{base.name}": "{mismatches[0]}" is not the same in both.',
            hint="Pass the checkpoint it was trained from.",
        )
    before, after = _collect_settings(base.config), _collect_settings(tuned.config)
    if changed := sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)):
        raise CtxextError(
            f'"{tuned.name}" was not trained from "{base.name}": config.json has a different {", ".join(changed)}.',
            hint="Pass the checkpoint it was trained from, with the same position settings.",
        )


def _collect_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the meaning of the weights, with class defaults, for comparison."""
    from transformers import AutoConfig

    # A copy, because the class changes its arguments.
    arguments = {key: copy.deepcopy(value) for key, value in without_hub(config).items() if key != "model_type"}
    try:
        with quiet_transformers(), forbid_downloads():
            known = AutoConfig.for_model(str(config["model_type"]), **arguments).to_dict()
    except ValueError:  # transformers does not support the family; it has its own code.
        known = arguments
    code = {key: str(name).rsplit("--", 1)[-1] for key, name in (config.get("auto_map") or {}).items()}
    try:
        positions = model_config(config).encoding
    except CtxextError:  # The family has no positions, or unknown ones.
        positions = None
    # Code reads its parameters from the recorded recipe; without code the encoding contains them all.
    recipe = provenance(config).get("recipe") if code else None
    return {**_prune(known), "auto_map": code, "positions": positions, "recipe": recipe}


def _prune(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _prune(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in _WRITER_KEYS and key not in _SCHEDULE_KEYS
    }


def find_tied_embeddings(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the stored names of a tied output embedding and its input embedding; empty if they are not tied."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    config = checkpoint.config
    text = text_config(config, family_of(config))
    try:
        stock = AutoConfig.for_model(str(config["model_type"]))
    except ValueError:  # This version of transformers does not support the family.
        stock = None
    stated = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if stated is None and stock is not None:  # Use the default of transformers' class.
        stated = stock.get_text_config().tie_word_embeddings
    if not stated:
        return {}
    stored = read_shapes(checkpoint)
    kind = "MASKED_LM" if auto_class(config) == MASKED else "CAUSAL_LM"
    known = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING").get(type(stock), None)
    keys = getattr(known, "_tied_weights_keys", None)
    if keys is not None:
        return {
            head: name for head, embedding in keys.items() if (name := find_stored_name(embedding, stored)) is not None
        }
    head, rows = "lm_head.weight", int(text["vocab_size"])
    tables = (name for name, shape in stored.items() if len(shape) == 2 and shape[0] == rows and name != head)
    embedding = next(tables, None)
    return {head: embedding} if embedding else {}


def write_merged(
    checkpoint: Checkpoint,
    changes: Changes,
    work: Path,
    *,
    notes: Mapping[str, Any],
    strength: float = 1.0,
    progress: Progress | None = None,
) -> None:
    """Write the merged checkpoint's files into a folder.

    Weights that transformers does not read (GGUF, ONNX ...) are omitted, because they contain the old values. So are
    records of the base's own training.

    Args:
        checkpoint: The base.
        changes: The trained changes.
        work: The folder; existing files in it are kept.
        notes: Description of the training, written to config.json under `ctxext`.
        strength: Share of the changes that is made.
        progress: Called with a label, bytes done and bytes in total.
    """
    headers = {path for path in checkpoint.weight_files if path.suffix == ".safetensors" and len(path.parts) == 1}
    tensors = {path: list_changed_tensors(changes, checkpoint.folder / path, strength) for path in sorted(headers)}
    added = (tensor.size for listed in tensors.values() for tensor in listed if tensor.old_shape is None)
    total, begun = sum(map(checkpoint.size_of, headers)) + sum(added), 0

    def report(_: str, done: int, __: int) -> None:
        if progress is not None:
            # The total does not include growth of the header.
            progress("writing tensors", min(begun + done, total), total)

    weights = {}
    for path, listed in tensors.items():
        digest = hashlib.sha256()
        rewrite(checkpoint.folder / path, work / path.name, listed, report, digest=digest)
        weights[path.name] = digest.hexdigest()
        begun += checkpoint.size_of(path)
    # Files for other programs contain the base's old weights or refer to them.
    omitted = {name for names in find_excluded_files(checkpoint.files, checkpoint.config).values() for name in names}
    omitted.update(_OMITTED, other_formats(checkpoint.files))
    for path in checkpoint.files:
        is_omitted = path.as_posix() in omitted or path.suffix in WEIGHT_SUFFIXES or path.parts[0] == ADAPTER
        if not (is_omitted or records_training(checkpoint.folder, path.as_posix()) or runs_by_itself(path)):
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            copy_whole(checkpoint.folder / path, work / path)
    config, index = dict(checkpoint.config), work / "model.safetensors.index.json"
    config.pop(VERSIONED, None)
    record = provenance(config)
    if changes.untied:
        config["tie_word_embeddings"] = False
        inner = family_of(config).text_config
        if inner in config:
            config[inner] = {**config[inner], "tie_word_embeddings": False}
    if changes.untied and index.is_file():
        listing = read_json_object(index)
        for head, embedding in changes.untied.items():
            listing["weight_map"].setdefault(head, listing["weight_map"][embedding])
        index.write_text(as_json(listing), encoding="utf-8")
    config["ctxext"] = {**record, "finetune": {"version": __version__, **notes}}
    (work / "config.json").write_text(as_json(config), encoding="utf-8")
    (work / "README.md").write_text(render_card(checkpoint, notes), encoding="utf-8")
    small = [path for path in sorted(work.rglob("*")) if path.is_file() and path.name not in weights]
    manifest = {
        **(checkpoint.read_json(MANIFEST) or {}),
        **({"recipe": record["recipe"]} if record.get("recipe") else {}),
        "ctxext": __version__,
        "base": {"name": checkpoint.public_name, "revision": checkpoint.revision},
        "finetune": dict(notes),
        "config": config,
        "files": {path.relative_to(work).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in small},
        "weights": weights,
    }
    (work / MANIFEST).write_text(as_json(manifest), encoding="utf-8")


def save_adapter(saved: Path, folder: Path, checkpoint: Checkpoint) -> None:
    """Copy an adapter saved by the Trainer, without its optimizer, and set its base to the public name."""
    if not (saved / "adapter_config.json").is_file():
        raise CtxextError(f'"{saved}" contains no adapter.')
    folder.mkdir(parents=True)
    shutil.copyfile(saved / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((saved / "adapter_config.json").read_text(encoding="utf-8"))
    named = {**config, "base_model_name_or_path": checkpoint.public_name, "revision": checkpoint.revision}
    (folder / "adapter_config.json").write_text(as_json(named), encoding="utf-8")
    (folder / "README.md").write_text(render_adapter_card(checkpoint), encoding="utf-8")
