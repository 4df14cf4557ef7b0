"""Configuration and files of a checkpoint: a folder, a Hub id or the demo. No weights, no torch."""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from ctxext.checkpoint.families import Family, find_type
from ctxext.checkpoint.geometry import check_sizes, claimed_length
from ctxext.checkpoint.other_files import read_lengths
from ctxext.errors import CtxextError
from ctxext.files.content import DEMO, MANIFEST, is_text, open_regular
from ctxext.files.length import as_length, looks_like_length
from ctxext.files.schemas import read_json_object
from ctxext.files.strict import parse_json, read_text
from ctxext.files.tensor_files import read_safetensors_header
from ctxext.redaction import remember

_LOG = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")
"""Suffixes of weight files. They are never modified in place, so they may be linked."""

LOG_IN = "Run hf auth login, or pass a token with write access: --token TOKEN"
_INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
LOADABLE = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)$")
_SKIPPED_FOLDERS = (".git", ".cache", "__pycache__")
_CONFIGS = ("config.json", "adapter_config.json")
_BLOCK, _NUM_BLOCKS = 1 << 16, 32

_INTEGER_BITS = {"I8": 8, "U8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
_BESIDE_PACKED = re.compile(
    r"\.(qzeros|scales?|g_idx|weight_(scale(_inv)?|scale_2|zero_point|shape|g_idx|global_scale)|input_(global_)?scale|SCB)$"
    r"|_scales$|\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)$|^(.*\.)?position_ids$"
)
"""Tensors that quantization adds to packed weights."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a local folder.

    Attributes:
        name: The user's name for it.
        folder: The folder of its files.
        config: The content of config.json.
        revision: The commit on the Hub, if it came from there.
        remote_sizes: Size in bytes of files that were not downloaded, by name.
        original_length: The original context length in tokens, if the user specified it.
    """

    name: str
    folder: Path
    config: dict[str, Any] = field(repr=False)
    revision: str | None = None
    remote_sizes: dict[str, int] = field(default_factory=dict, repr=False)
    original_length: int | None = None

    @cached_property
    def public_name(self) -> str:
        """The name for publication: a Hub id unchanged, a folder by the last part of its path."""
        if self.revision or self.name == DEMO:
            return self.name
        return self.folder.resolve().name.encode("utf-8", "replace").decode()  # Invalid UTF-8 is replaced.

    @cached_property
    def files(self) -> list[Path]:
        """All files, relative to the folder, sorted, without version control and caches."""
        paths = []
        for root, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
            paths += [(Path(root) / name).relative_to(self.folder) for name in names]
            # A linked folder is one entry, which `check_file` refuses, because its files would be missing silently.
            paths += [
                (Path(root) / name).relative_to(self.folder) for name in folders if (Path(root) / name).is_symlink()
            ]
        return sorted(path for path in paths if not path.name.startswith(".") or path.name == ".gitattributes")

    @cached_property
    def weight_files(self) -> list[Path]:
        """The weight files, relative to the folder."""
        return [path for path in self.files if path.suffix in WEIGHT_SUFFIXES]

    def size_of(self, path: Path) -> int:
        """Return a file's size in bytes, on disk or on the Hub."""
        size = self.remote_sizes.get(path.as_posix())
        return (self.folder / path).stat().st_size if size is None else size

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file's content; None if there is no such file."""
        if not (self.folder / name).is_file():
            return None
        self.check_file(Path(name))
        return read_json_object(self.folder / name)

    def known_digest(self, path: Path) -> str | None:
        """Return the SHA-256 of a large file in the Hub's cache, which is its name there; None for other files.

        Only the cache of this user is trusted, because only the Hub's client writes to it.
        """
        target = (self.folder / path).resolve()
        if not _SHA256.fullmatch(target.name) or not self._is_own_blob(target):
            return None
        from huggingface_hub import constants

        return target.name if Path(constants.HF_HUB_CACHE).resolve() in target.parents else None

    def check_files(self) -> None:
        """Check every file with `check_file`."""
        for path in self.files:
            self.check_file(path)

    def check_file(self, path: Path) -> None:
        """Raise unless a path is a regular file inside the folder, or inside the Hub's cache of the repository."""
        if not is_text(str(path)):
            raise CtxextError(f'"{path}" of "{self.name}" has a name that is not valid UTF-8.', hint="Rename it.")
        place = self.folder / path
        target = place.resolve()
        if not place.exists():
            raise CtxextError(f'"{path}" of "{self.name}" is a broken link.', hint="Remove it.")
        if place.is_symlink() and place.is_dir():
            raise CtxextError(
                f'"{path}" of "{self.name}" is a link to a folder, "{target}".',
                hint="Replace the link with the folder.",
            )
        if not place.is_file():
            raise CtxextError(f'"{path}" of "{self.name}" is not a regular file.', hint="Remove it.")
        if self.folder.resolve() not in target.parents and not self._is_own_blob(target):
            raise CtxextError(
                f'"{path}" of "{self.name}" is a link to a file outside the folder, "{target}".',
                hint="Replace the link with the file.",
            )

    def _is_own_blob(self, target: Path) -> bool:
        """Return whether a file belongs to the same repository in a cache, in the layout of the Hub's client.

        The folder is models--USER--NAME/snapshots/COMMIT, and the file is models--USER--NAME/blobs/DIGEST.
        """
        home, repository = self.folder.resolve(), target.parent.parent
        if (
            target.parent.name != "blobs"
            or not repository.name.startswith("models--")
            or repository not in home.parents
        ):
            return False
        return home.relative_to(repository).parts[0] == "snapshots"

    def check_weights(self) -> None:
        """Check that all weights exist, by headers and indexes."""
        self.check_files()
        names = {path.as_posix() for path in self.files} | set(self.remote_sizes)
        for index_name in _INDEX_NAMES:
            index = self.read_json(index_name) or {}
            weight_map = index.get("weight_map") or {}
            for shard in sorted({str(name) for name in weight_map.values()}):
                place = f'"{index_name}" of "{self.name}" lists'
                if Path(shard).is_absolute() or ".." in Path(shard).parts:
                    raise CtxextError(f'{place} a file outside the folder: "{shard}".')
                if shard not in names:
                    raise CtxextError(f'{place} "{shard}", which is missing.', hint="Download the checkpoint again.")
        if not any(LOADABLE.match(name) for name in names):
            raise CtxextError(
                f'"{self.name}" contains no weights that transformers can load.',
                hint="Expected model.safetensors, its shards with an index, or pytorch_model.bin.",
            )
        for path in self.weight_files:
            if path.suffix == ".safetensors" and path.as_posix() not in self.remote_sizes:
                read_safetensors_header(self.folder / path)

    @property
    def loaded_safetensors(self) -> list[Path]:
        """The safetensors files that transformers would load, relative to the folder."""
        return [path for path in self.weight_files if path.suffix == ".safetensors" and LOADABLE.match(str(path))]

    @property
    def headers(self) -> dict[str, dict[str, Any]]:
        """Dtype, shape and offsets of each tensor, from the headers of the local safetensors files."""
        paths = [path for path in self.weight_files if path.suffix == ".safetensors" and LOADABLE.match(path.name)]
        here = [self.folder / path for path in paths if (self.folder / path).is_file()]
        return {name: entry for path in here for name, entry in read_safetensors_header(path).items()}

    def stored_tensors(self) -> dict[str, tuple[Path, dict[str, Any]]]:
        """Return every tensor that transformers would load from safetensors: its file and its entry."""
        tensors: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in self.loaded_safetensors:
            for name, entry in read_safetensors_header(self.folder / path).items():
                if name in tensors:
                    raise CtxextError(f'"{path}" contains "{name}", which "{tensors[name][0]}" contains too.')
                tensors[name] = (path, entry)
        if not tensors:
            raise CtxextError(
                f'"{self.name}" has its weights in pytorch_model.bin, which this method cannot rewrite.',
                hint="Load it in transformers, save it as safetensors with save_pretrained, and convert the result.",
            )
        return tensors

    @cached_property
    def num_parameters(self) -> int | None:
        """Number of parameters, counted from the safetensors headers; None without such files."""
        bits = _packed_bits(self.config)
        return sum(_num_in(name, entry, bits) for name, entry in self.headers.items()) or None


def _packed_bits(config: dict[str, Any]) -> int:
    """Return the bits of a weight that quantization packs into integers; 0 for none."""
    described = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(described, dict):
        return 0
    groups = described.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    bits = described.get("bits") or described.get("w_bit") or (weights or {}).get("num_bits")
    if described.get("load_in_4bit") or described.get("quant_method") == "mxfp4":
        bits = 4
    return bits if isinstance(bits, int) and 0 < bits <= 32 else 8


def _num_in(name: str, entry: dict[str, Any], bits: int) -> int:
    """Return the number of parameters in a tensor: packed weights are counted unpacked, their scales not at all."""
    count: int = math.prod(entry["shape"])
    if not bits:
        return count
    if _BESIDE_PACKED.search(name):
        return 0
    size = _INTEGER_BITS.get(entry["dtype"])
    return count if size is None else count * max(size, bits) // bits


def is_loadable(path: Path) -> bool:
    """Return whether transformers would load a weight file, by its path in the folder."""
    return bool(LOADABLE.match(path.as_posix()))


def is_cached(path: Path) -> bool:
    """Return whether a file may be in the Hub's cache, which checkpoints share; that does not make it trusted."""
    return path.parent.name == "blobs"


def open_checkpoint(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    weights: bool = True,
    original_length: int | str | None = None,
) -> Checkpoint:
    """Find a checkpoint and read its configuration.

    Args:
        source: A folder, a Hub id, or `demo` for the included checkpoint.
        revision: A branch, tag or commit on the Hub.
        token: A Hub token; the usual places are read if it is None.
        weights: Whether to download the weight files of a Hub id; if not, only the other files.
        original_length: The original context length, in tokens or as "32k"; overrides the value in its files.

    Raises:
        CtxextError: there is no such checkpoint, or its config.json is missing or broken.
    """
    source, trained_length = str(source), None if original_length is None else as_length(original_length)
    folder, commit = Path(source).expanduser(), None
    sizes: dict[str, int] = {}
    if source == DEMO and not folder.exists():
        folder = Path(str(resources.files("ctxext") / "demo" / "checkpoint"))
    elif not folder.exists():
        folder, commit, sizes = _fetch(source, revision, token, weights)
    elif not folder.is_dir():
        raise CtxextError(
            f'"{source}" is a file, not a checkpoint folder.',
            hint="Specify a folder. inspect, convert, verify and eval --engine llama.cpp also accept NAME.gguf.",
        )
    if not folder.is_dir():
        raise CtxextError("The demo checkpoint is missing.", hint="Install ctxext again.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CtxextError(f'"{source}" cannot be read.', hint="Check the folder's permissions.")
    if not (folder / "config.json").is_file():
        hint = "Specify the folder with the files of the checkpoint."
        if (folder / "adapter_config.json").is_file():
            hint = f"It is an adapter. Merge it into its base model first: ctxext merge BASE {shlex.quote(source)} OUT"
        elif inner := [path.parent.name for path in sorted(folder.glob("*/*config.json")) if path.name in _CONFIGS]:
            hint = f"Did you mean {shlex.quote(str(Path(source) / inner[0]))}?"
        if source == DEMO:
            hint = "Here it is a folder, not the demo checkpoint. Rename the folder, or run the command in another one."
        if (folder / "0_Transformer" / "config.json").is_file():
            hint = 'Move the files of "0_Transformer" to the main folder, and set its "path" in modules.json to "".'
        raise CtxextError(f'"{source}" has no config.json.', hint=hint)
    Checkpoint(source, folder, {}).check_file(Path("config.json"))
    try:
        config = read_json_object(folder / "config.json")
    except CtxextError:
        # Report an unknown model as such, because its keys may have other types.
        content = parse_json(read_text(folder / "config.json"), str(folder / "config.json"))
        if isinstance(content, dict):
            _check_version(Checkpoint(source, folder, content))
            if isinstance(content.get("model_type"), str):
                find_type(content)
        raise
    check_sizes(config, str(folder / "config.json"))
    checkpoint = Checkpoint(source, folder, config, commit, sizes, trained_length)
    _check_version(checkpoint)
    _LOG.debug("opened %s: %s in %s, commit %s", source, config.get("model_type"), folder, commit)
    return checkpoint


def _check_version(checkpoint: Checkpoint) -> None:
    """Raise if a version before 0.3 created the checkpoint: its format and code are unsupported."""
    record: dict[str, Any] = {}
    with contextlib.suppress(CtxextError):  # `verify` reports a broken record.
        record = checkpoint.read_json(MANIFEST) or {}
    config, evidence = checkpoint.config, ""
    for part in (config, config.get("text_config")):
        block = part.get("ctxext_code") if isinstance(part, dict) else None
        if isinstance(part, dict) and "ctxext_mspoe" in part:
            evidence = 'config.json contains "ctxext_mspoe"'
        elif isinstance(block, dict) and "steps" in block and "hidden" not in block:
            evidence = '"ctxext_code" in config.json lacks "hidden"'
    auto_map, record_in_config = config.get("auto_map"), config.get("ctxext")
    classes = auto_map.values() if isinstance(auto_map, dict) else ()
    if old := next((str(name) for name in classes if str(name).startswith("modeling_ctxext.MsPoE")), ""):
        evidence = f'config.json names the class "{old}"'
    in_config = record_in_config.get("version") if isinstance(record_in_config, dict) else None
    for name, version in (("config.json", in_config), (MANIFEST, record.get("ctxext"))):
        if re.match(r"0\.[0-2]\b", str(version)):
            evidence = f'{name} contains version "{version}"'
    if evidence:
        raise CtxextError(
            f'"{checkpoint.name}" was created by a version before 0.3; convert it again ({evidence}).',
            hint="ctxext convert SOURCE OUT --method NAME",
        )


def hub_token(token: str | None = None) -> str | None:
    """Return the token for the Hub, or None, and register it for redaction.

    Args:
        token: The user's token; if it is None or blank, the stored one of the Hub's client. Surrounding whitespace, for
            example a line end from `--token "$(cat FILE)"`, is removed.
    """
    from huggingface_hub import constants, get_token

    stored = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    stripped = (token or "").strip() or (stored or "").strip()
    if not stripped:
        return None
    remember(*stripped.split())
    if not re.fullmatch(r"[\x21-\x7e]+", stripped):
        raise CtxextError("The token contains invalid characters.", hint=LOG_IN)
    return stripped


def _fetch(
    source: str, revision: str | None, token: str | None, weights: bool
) -> tuple[Path, str | None, dict[str, int]]:
    """Download a checkpoint from the Hub into its cache, with or without the weights."""
    is_length = looks_like_length(source)  # No repository has such a name.
    if is_length or not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", source):
        hint = "Specify a folder, a Hub id (user/name) or demo."
        if is_length:
            hint = "Separate several lengths with commas: --lengths 4k,32k."
        raise CtxextError(f'There is no folder "{source}".', hint=hint)
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not weights:
        disable_progress_bars()
    token = hub_token(token)
    # The base class of the client's HTTP errors, which includes transport errors in versions 0 and 1.
    transport: type[Exception] = getattr(errors, "HTTPError")  # noqa: B009
    ignored = [] if weights else [f"*{suffix}" for suffix in WEIGHT_SUFFIXES]
    try:
        folder = Path(
            huggingface_hub.snapshot_download(source, revision=revision, token=token, ignore_patterns=ignored)
        )
        sizes = {} if weights else _sizes_of(folder, source, revision, token)
    except errors.GatedRepoError as error:
        raise CtxextError(
            f'"{source}" is gated on the Hub.', hint="Accept its terms on the Hub, then run: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CtxextError(f'"{source}" has no revision "{revision}".') from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CtxextError(
            f'There is no folder "{source}", and no such repository on the Hub.',
            hint="Check the spelling. For a private repository: hf auth login",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, transport, OSError) as error:
        raise CtxextError(
            f'"{source}" is neither a folder nor in the Hub\'s cache, and the Hub cannot be reached.',
            hint="Check the name and the network, or specify a local folder.",
        ) from error
    return folder, folder.name, sizes


def _sizes_of(folder: Path, source: str, revision: str | None, token: str | None) -> dict[str, int]:
    """Return the sizes of the weight files on the Hub; empty if it cannot be reached and the cache contains weights."""
    from huggingface_hub import HfApi, errors

    transport: type[Exception] = getattr(errors, "HTTPError")  # noqa: B009
    try:
        siblings = HfApi(token=token).model_info(source, revision=revision, files_metadata=True).siblings or []
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise
    except (errors.OfflineModeIsEnabled, transport, OSError):
        if any(LOADABLE.match(path.name) for path in folder.iterdir()):
            return {}
        raise
    return {file.rfilename: file.size or 0 for file in siblings if file.rfilename.endswith(WEIGHT_SUFFIXES)}


def claimed_lengths(checkpoint: Checkpoint, family: Family, context_length: int | None = None) -> dict[str, int]:
    """Return the context length in tokens in each file, by file name.

    For config.json, `context_length` overrides the value of its key.
    """
    generation = checkpoint.read_json("generation_config.json") or {}
    tokenizer = checkpoint.read_json("tokenizer_config.json") or {}
    claims = {
        "config.json": context_length or claimed_length(checkpoint.config, family),
        "tokenizer_config.json": tokenizer.get("model_max_length"),
        "generation_config.json": generation.get("max_length"),
    }
    lengths = {name: int(value) for name, value in claims.items() if value and value < 10**12}
    for (name, _), length in read_lengths(checkpoint.folder).items():
        lengths[name] = min(length, lengths.get(name, length))
    return lengths


def fingerprint(checkpoint: Checkpoint, *, with_config: bool = True) -> str:
    """Return a SHA-256 over the configuration and samples of the weights; large files are not read in full."""
    digest = hashlib.sha256()
    if with_config:
        digest.update(json.dumps(checkpoint.config, sort_keys=True).encode())
    for path in checkpoint.weight_files:
        if not is_loadable(path):
            continue
        with open_regular(checkpoint.folder / path) as file:
            size = checkpoint.size_of(path)
            digest.update(f"{path.as_posix()} {size}\n".encode())
            for block in range(_NUM_BLOCKS):
                file.seek(max(size - _BLOCK, 0) * block // (_NUM_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def is_source_of(source: Checkpoint, result: Checkpoint) -> bool:
    """Return whether a result was converted from this checkpoint, or trained after such a conversion.

    Results of version 0.3.0 and earlier have no fingerprint, so weights are compared, and trained ones never match.
    """
    record = result.config.get("ctxext")
    record = record if isinstance(record, dict) else {}
    if not record.get("recipe"):
        return False
    if record.get("revision"):
        return bool(source.revision == record["revision"])
    origin: Any = (result.read_json(MANIFEST) or {}).get("source")
    recorded = origin.get("fingerprint") if isinstance(origin, dict) else None
    if recorded is not None:
        return bool(recorded == fingerprint(source))
    is_extended = isinstance(source.config.get("ctxext"), dict)
    return not is_extended and fingerprint(source, with_config=False) == fingerprint(result, with_config=False)
