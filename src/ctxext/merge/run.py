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
from ctxext.checkpoint.loading import quiet_transformers, sealed, without_hub
from ctxext.checkpoint.opening import WEIGHT_SUFFIXES, Checkpoint, open_checkpoint
from ctxext.checkpoint.other_files import VERSIONED, left_out, other_formats
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
from ctxext.files.output_directory import OverwriteOptions, check_out, output_directory, records_training
from ctxext.files.schemas import read_json_object
from ctxext.files.tensor_files import read_safetensors_header, rewrite
from ctxext.merge.tensors import (
    TRAINED_BESIDE,
    AdapterChanges,
    Changes,
    WholeChanges,
    changed_tensors,
    shares_of,
    stored_name,
    stored_shapes,
)
from ctxext.options import accepts_options
from ctxext.recipes.code.own_code import runs_by_itself
from ctxext.recipes.code.staging import is_of_tokenizer
from ctxext.recipes.encodings.rotary import model_config, provenance
from ctxext.recipes.recipe import recipe_from_dict
from ctxext.version import __version__


def render_card(base: Checkpoint, notes: Mapping[str, Any]) -> str:
    """Render README.md of a merged checkpoint, with the training's record from config.json."""
    noted, model = provenance(base.config), model_config(base.config)
    recipe = recipe_from_dict(noted["recipe"], "config.json") if noted.get("recipe") else None
    return render(
        CardFacts(
            source=str(noted.get("source") or base.public_name),
            revision=noted.get("revision") if recipe else base.revision,
            base="" if noted.get("revision") or base.revision else declared_base(base.config),
            inherited=card_metadata(base.folder),
            recipe=recipe,
            model=model,
            cautions=cautions_of(base, recipe, model) if recipe else (),
            training=notes,
        )
    )


def adapter_card(base: Checkpoint) -> str:
    """Return the README.md of an adapter alone: its base, and the command that creates the base."""
    name, noted = base.public_name, provenance(base.config)
    lines = ["---", "library_name: peft", "tags: [lora, ctxext]", f'base_model: "{name}"', "---", ""]
    if model_config(base.config).is_extended:
        lines += [f"A LoRA adapter of `{name}`. It does not carry what was changed to extend it: load it on that very"]
        lines += ["checkpoint, or merge the two with `ctxext merge`."]
    else:
        lines += [f"A LoRA adapter of `{name}`, trained within its context length. Merge the two with `ctxext merge`."]
    if noted.get("recipe") and noted.get("source"):
        recipe = recipe_from_dict(noted["recipe"], "config.json")
        command = wrap_command(
            convert_command(str(noted["source"]), noted.get("revision"), recipe, name.split("/")[-1])
        )
        lines += ["", f"That checkpoint is `{noted['source']}` with {recipe.summary()}:", "", "```", command, "```"]
        if needs_file(recipe):
            text = yaml.safe_dump(recipe.to_dict(), sort_keys=False, width=100).rstrip()
            lines += ["", f"where `{RECIPE_FILE}` is", "", "```yaml", text, "```"]
    return "\n".join(lines) + "\n"


ADAPTER = "adapter"
_OF_AN_ADAPTER = (
    *("adapter_config.json", "adapter_model.safetensors", *TRAINED_BESIDE),
    *("README.md", "tokenizer_config.json", "generation_config.json"),
)
"""Files of an adapter that are copied to the result, besides those of a tokenizer."""
_LEFT_OUT = ("README.md", MANIFEST, "config.json")


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


@accepts_options(OverwriteOptions)
def merge(
    model: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    options: OverwriteOptions,
    revision: str | None = None,
    token: str | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Merge a LoRA adapter, or a full training, into the checkpoint it was trained on.

    Args:
        model: A folder, a Hub id, or `demo`.
        adapter: The adapter's folder, as peft saves it, or the folder of a fully trained checkpoint.
        out: The folder to create.
        options: Whether OUT may be replaced. Each field is a keyword of this function too, as overwrite=True.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token.
        progress: Called with a text, bytes done and bytes in all.

    Raises:
        CtxextError: the adapter does not fit the model, or OUT is invalid; nothing is written.
    """
    adapter, out = Path(adapter), Path(out)
    checkpoint = open_checkpoint(model, revision=revision, token=token)
    check_out(out, checkpoint.folder, options)
    check_out(out, adapter, options)
    checkpoint.check_weights()
    shapes = stored_shapes(checkpoint)
    is_adapter = (adapter / "adapter_config.json").is_file() or not (adapter / "config.json").is_file()
    if not is_adapter:
        _check_is_training(checkpoint, open_checkpoint(adapter), shapes)
    changes = changes_of(checkpoint, adapter, is_adapter=is_adapter)
    notes = {"adapter" if is_adapter else "tuned": adapter.resolve().name}
    out = out.resolve()
    with output_directory(out, [checkpoint.folder], options) as work:
        if is_adapter:
            # Copy only files of peft and the tokenizer; the folder may also contain secrets, code, pipes and links.
            (work / ADAPTER).mkdir()
            for name in (*_OF_AN_ADAPTER, *(path.name for path in adapter.iterdir() if is_of_tokenizer(path.name))):
                path = adapter / name
                if path.is_file() and not path.is_symlink():
                    copy_whole(path, work / ADAPTER / name)
        write_merged(checkpoint, changes, work, notes=notes, progress=progress)
    return Merged(out, len(changes.names), len(shapes))


_OF_ITS_WRITER = frozenset(
    {"ctxext", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"}
)
_ROPE = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
"""Keys of the schedule, which depend on the version of transformers; the schedules themselves are compared."""


def changes_of(base: Checkpoint, folder: Path, *, is_adapter: bool) -> Changes:
    """Read the trained changes to the base's tensors, from an adapter or a whole model."""
    stored, tied = stored_shapes(base), tied_embeddings(base)
    if is_adapter:
        return AdapterChanges(folder, stored, tied=tied, shares=shares_of(base, stored))
    return WholeChanges(folder, stored, tied=tied)


def _check_is_training(base: Checkpoint, tuned: Checkpoint, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise if a checkpoint cannot result from training the base."""
    headers = [read_safetensors_header(path) for path in sorted(tuned.folder.glob("*.safetensors"))]
    shapes = {name: tuple(entry["shape"]) for header in headers for name, entry in header.items()}
    # For tied embeddings, some files contain both and others only the first.
    for head, name in tied_embeddings(base).items():
        if name in shapes:
            shapes.pop(head, None)
            shapes |= {head: shapes[name]} if head in stored else {}
    if other := sorted(name for name in shapes.keys() | stored.keys() if shapes.get(name) != stored.get(name)):
        raise CtxextError(
            f'"{tuned.name}" is no training of "{base.name}": "{other[0]}" is not the same in both.',
            hint="Give the checkpoint that it was trained from.",
        )
    before, after = _settings(base.config), _settings(tuned.config)
    if changed := sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)):
        raise CtxextError(
            f'"{tuned.name}" is no training of "{base.name}": config.json has another {", ".join(changed)}.',
            hint="Give the checkpoint that it was trained from, with the same positions.",
        )


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the weights' meaning, with class defaults, comparable between writers."""
    from transformers import AutoConfig

    # The class changes its arguments.
    others = {key: copy.deepcopy(value) for key, value in without_hub(config).items() if key != "model_type"}
    try:
        with quiet_transformers(), sealed():
            known = AutoConfig.for_model(str(config["model_type"]), **others).to_dict()
    except ValueError:  # A family that transformers does not know, with its own code.
        known = others
    code = {key: str(name).rsplit("--", 1)[-1] for key, name in (config.get("auto_map") or {}).items()}
    try:
        positions = model_config(config).encoding
    except CtxextError:  # The family has no positions, or unknown ones.
        positions = None
    # Code reads its parameters from the recorded recipe; without code the encoding contains them all.
    recipe = provenance(config).get("recipe") if code else None
    return {**_pruned(known), "auto_map": code, "positions": positions, "recipe": recipe}


def _pruned(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _pruned(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in _OF_ITS_WRITER and key not in _ROPE
    }


def tied_embeddings(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the stored name of a tied output embedding, with its input embedding's; empty if they are not tied."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    config = checkpoint.config
    text = text_config(config, family_of(config))
    try:
        stock = AutoConfig.for_model(str(config["model_type"]))
    except ValueError:  # A family that this version of transformers does not know.
        stock = None
    stated = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if stated is None and stock is not None:  # Use the default of transformers' class.
        stated = stock.get_text_config().tie_word_embeddings
    if not stated:
        return {}
    stored = stored_shapes(checkpoint)
    kind = "MASKED_LM" if auto_class(config) == MASKED else "CAUSAL_LM"
    known = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING").get(type(stock), None)
    keys = getattr(known, "_tied_weights_keys", None)
    if isinstance(keys, dict):
        return {head: name for head, embedding in keys.items() if (name := stored_name(embedding, stored)) is not None}
    # transformers 4 lists only the output embedding.
    head = next((str(key) for key in keys or () if str(key).endswith(".weight")), "lm_head.weight")
    rows = int(text["vocab_size"])
    tables = (name for name, shape in stored.items() if len(shape) == 2 and shape[0] == rows and name != head)
    embedding = next(tables, None)
    return {head: embedding} if embedding else {}


def write_merged(
    checkpoint: Checkpoint,
    changes: Changes,
    work: Path,
    *,
    notes: Mapping[str, Any],
    texts: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the merged checkpoint's files into a folder.

    Weights that transformers does not read (GGUF, ONNX ...) are left out: they contain the old values. Records of the
    base's own training are left out too.

    Args:
        checkpoint: The base.
        changes: The trained changes.
        work: The folder; existing files in it are kept.
        notes: Record of the training, written to config.json under `ctxext`.
        texts: New content of small files that differ from the base's, by name.
        progress: Called with a label, bytes done and bytes in total.
    """
    headers = {path for path in checkpoint.weight_files if path.suffix == ".safetensors" and len(path.parts) == 1}
    tensors = {path: changed_tensors(changes, checkpoint.folder / path) for path in sorted(headers)}
    added = (tensor.size for listed in tensors.values() for tensor in listed if tensor.old_shape is None)
    total, begun = sum(map(checkpoint.size_of, headers)) + sum(added), 0

    def report(_: str, done: int, __: int) -> None:
        if progress is not None:
            progress("merging", min(begun + done, total), total)  # A longer header is not counted.

    weights = {}
    for path, listed in tensors.items():
        digest = hashlib.sha256()
        rewrite(checkpoint.folder / path, work / path.name, listed, report, digest=digest)
        weights[path.name] = digest.hexdigest()
        begun += checkpoint.size_of(path)
    # Files for other programs contain the base's old weights or refer to them.
    gone = {name for names in left_out(checkpoint.files, checkpoint.config).values() for name in names}
    gone.update(_LEFT_OUT, other_formats(checkpoint.files))
    for path in checkpoint.files:
        stays = path.as_posix() in gone or path.suffix in WEIGHT_SUFFIXES or path.parts[0] == ADAPTER
        if not (stays or records_training(checkpoint.folder, path.as_posix()) or runs_by_itself(path)):
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            copy_whole(checkpoint.folder / path, work / path)
    for name, text in (texts or {}).items():
        (work / name).write_text(text, encoding="utf-8")
    config, index = dict(checkpoint.config), work / "model.safetensors.index.json"
    config.pop(VERSIONED, None)
    noted = provenance(config)
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
    config["ctxext"] = {**noted, "finetune": {"version": __version__, **notes}}
    (work / "config.json").write_text(as_json(config), encoding="utf-8")
    (work / "README.md").write_text(render_card(checkpoint, notes), encoding="utf-8")
    small = [path for path in sorted(work.rglob("*")) if path.is_file() and path.name not in weights]
    manifest = {
        **(checkpoint.read_json(MANIFEST) or {}),
        **({"recipe": noted["recipe"]} if noted.get("recipe") else {}),
        "ctxext": __version__,
        "base": {"name": checkpoint.public_name, "revision": checkpoint.revision},
        "finetune": dict(notes),
        "files": {path.relative_to(work).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in small},
        "weights": weights,
    }
    (work / MANIFEST).write_text(as_json(manifest), encoding="utf-8")


def save_adapter(saved: Path, folder: Path, checkpoint: Checkpoint) -> None:
    """Copy an adapter that the Trainer saved, without its optimizer, and set its base to the public name."""
    if not (saved / "adapter_config.json").is_file():
        raise CtxextError(f'"{saved}" holds no adapter.')
    folder.mkdir(parents=True)
    shutil.copyfile(saved / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((saved / "adapter_config.json").read_text(encoding="utf-8"))
    named = {**config, "base_model_name_or_path": checkpoint.public_name, "revision": checkpoint.revision}
    (folder / "adapter_config.json").write_text(as_json(named), encoding="utf-8")
    (folder / "README.md").write_text(adapter_card(checkpoint), encoding="utf-8")
