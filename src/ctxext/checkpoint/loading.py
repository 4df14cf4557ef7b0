"""The loader of all commands: silent, offline, and strict about missing weights.

The files are compared with config.json before loading, because transformers initializes missing weights before it
reports them: minutes and gigabytes for a config.json of another model.
"""

import importlib.util
import itertools
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.checkpoint.auto_class import WHOLE, auto_class
from ctxext.checkpoint.opening import Checkpoint, is_loadable
from ctxext.errors import CtxextError
from ctxext.files.content import as_json
from ctxext.files.offline import forbid_network, refuse_download, replace_attributes
from ctxext.files.tensor_files import TORCH_NAMES

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Values of `--dtype`, and torch's names for them."""

BUILT_IN = frozenset({"eager", "sdpa"})
"""Implementations of attention and experts that require only torch; others are kernels, some on the Hub."""

_IMPLEMENTATIONS = frozenset(
    f"{underscore}{part}_implementation{internal}"
    for underscore in ("", "_")
    for part in ("attn", "experts")
    for internal in ("", "_internal", "_autoset")
)
_OF_THE_HUB = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "custom_pipelines", "custom_generate", "trust_remote_code"}
    | {
        "configuration_files",
        "use_kernel",
        "use_kernels",
        "_use_kernels",
        "kernel_config",
        "allow_all_kernels",
        "gguf_file",
        "adapter_kwargs",
    }
)
"""Keys of a configuration for code or files elsewhere."""

_BACKBONE, _PRETRAINED_BACKBONE = "backbone", "use_pretrained_backbone"
"""Keys of a vision model for the name of a model of the Hub or timm, and for downloading its weights."""

_NUMBERS, _PER_BYTE = 100_000_000, 16
"""Limit of the number of parameters: a minimum, and the number per byte of the files.

The margin is wide, because no loadable model may be refused: a byte contains 8 weights of 1 bit, tied weights may count
twice, and buffers without a file (the masks of GPT-2) are small."""

_TENSORS, _BYTES_PER_TENSOR = 2_000, 64
"""Limit of the number of tensors: a minimum, and the bytes per further tensor. 100,000 modules take a minute."""

_ROPE = ("rope_scaling", "rope_parameters", "auto_map", "quantization_config")
"""Keys without effect on the number of weights; some are specific to a checkpoint's code."""

RECORDED = Path(__file__).with_name("weight_names.json")
"""Names of weights in files, by family, from tools/record_weight_names.py."""

_RANGE = re.compile(r"\{([^:}]*):([^}]*)\}")
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")

_CPU_FLAGS = Path("/proc/cpuinfo")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
"""Linux's names for a processor's bf16 matrix instructions."""


def find_accelerator() -> str:
    """Return the type of this machine's accelerator, such as cuda, xpu or mps; empty if there is none."""
    import torch

    known: dict[str, Any] = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}
    if kind := next((kind for kind, backend in known.items() if backend.is_available()), ""):
        return kind
    # Backends outside torch, such as those of NPUs, register there.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if accelerator is None else accelerator.type


def choose_device(name: str) -> "torch.device":
    """Return the device for a name; "auto" selects an accelerator if available.

    Each process has a separate one, also for a name without a number such as "cuda".
    """
    import torch

    kind = find_accelerator()
    count = max(1, torch.get_device_module(kind).device_count()) if kind else 0
    if name == "auto" or (name == kind and "LOCAL_RANK" in os.environ):
        return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % count) if kind else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CtxextError(f'"{name}" is not a device.', hint="Choose auto, cpu, cuda, xpu or mps.") from error
    if device.type != "cpu" and (device.type != kind or (device.index or 0) >= count):
        there = f"auto, {kind} or cpu" if kind else "auto or cpu"
        raise CtxextError(f'torch finds no device "{name}" on this machine.', hint=f"Choose --device {there}.")
    return device


def is_bf16_native(device: "torch.device") -> bool:
    """Return whether a device computes in bf16 without emulation, which is slower than float32.

    GPUs before compute capability 8 (T4, V100) emulate it. For MPS, torch does not report it.
    """
    import torch

    if device.type == "cpu":
        return fast_cpu_dtype() == torch.bfloat16
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if is_supported is None:
        return False
    try:
        return bool(is_supported(including_emulation=False))
    except TypeError:  # Only torch's own backends have the argument.
        return bool(is_supported())


def check_dtype(name: str) -> None:
    """Raise if a dtype is unknown; torch, which takes seconds to import, is not needed for it."""
    if name not in ("auto", *DTYPES):
        raise CtxextError(f'"{name}" is not a dtype.', hint=f"Choose auto, {', '.join(DTYPES)}.")


def choose_dtype(name: str) -> "torch.dtype | str":
    """Return the dtype for a name; "auto" is returned unchanged, which transformers interprets as "as saved"."""
    import torch

    check_dtype(name)
    if name == "auto":
        return name
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def fast_cpu_dtype() -> "torch.dtype":
    """Return the processor's fastest dtype for bf16 weights: bfloat16 with native support, else float32."""
    import torch

    try:
        flags = _CPU_FLAGS.read_text(encoding="utf-8")
    except OSError:
        return torch.float32
    return torch.bfloat16 if any(flag in flags for flag in _BF16_FLAGS) else torch.float32


def settle_dtype(model: Any, name: str, device: "torch.device") -> Any:
    """Convert a loaded model to the dtype of "auto" on a device; other names leave it unchanged.

    "auto" is the saved dtype. On a CPU, bf16 weights get the fastest dtype and fp16 weights float32, so weights are
    never rounded.
    """
    import torch

    if name != "auto" or device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float16):
        return model
    settled = fast_cpu_dtype() if model.dtype == torch.bfloat16 else torch.float32
    # Converting to the present dtype would still round buffers, including inverse frequencies.
    return model if model.dtype == settled else model.to(settled)


def without_hub(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration without keys for kernels, code or files elsewhere, at any depth.

    Only built-in implementations of attention are kept: `from_config` and `from_pretrained` would download and run
    `_attn_implementation: "user/kernel"`.
    """

    def clean(value: Any, *, is_inner: bool = True) -> Any:
        if isinstance(value, Mapping):
            cleaned = {key: clean(inner) for key, inner in value.items() if _is_kept(key, inner)}
            if is_inner:  # Code of ctxext is only at the top level.
                cleaned.pop("auto_map", None)
            if isinstance(cleaned.get(_BACKBONE), str) or _PRETRAINED_BACKBONE in cleaned:
                cleaned[_PRETRAINED_BACKBONE] = False  # The checkpoint has those weights; some classes default to True.
            return cleaned
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return clean(config, is_inner=False)  # type: ignore[no-any-return]


def hub_kernels(config: Any) -> tuple[str, ...]:
    """Return the kernels of the Hub (user/name) in a configuration and nested ones, sorted."""
    return tuple(sorted({value for key, value in _texts(config) if key in _IMPLEMENTATIONS and "/" in value}))


def hub_backbones(config: Any) -> tuple[str, ...]:
    """Return the backbones that a configuration names without describing them, sorted."""
    return tuple(sorted({value for key, value in _texts(config) if key == _BACKBONE}))


def _texts(config: Any) -> Iterator[tuple[str, str]]:
    """Yield each key of a configuration with a string value, and the string, at any depth."""
    for key, value in config.items() if isinstance(config, Mapping) else ():
        if isinstance(value, str):
            yield key, value
    inner = config.values() if isinstance(config, Mapping) else config if isinstance(config, list) else ()
    for value in inner:
        yield from _texts(value)


def _is_kept(key: str, value: Any) -> bool:
    if key in _IMPLEMENTATIONS:
        return isinstance(value, str) and value in BUILT_IN
    return key not in _OF_THE_HUB


@contextmanager
def forbid_downloads(*, kernels: bool = False) -> Iterator[None]:
    """Forbid downloads, prompts, and third-party code and kernels while loading.

    A configuration can name a backbone or code elsewhere, at any depth. transformers would download it, or prompt on
    the terminal before running it; here it raises. With `kernels`, kernels of the Hub may be downloaded.
    """
    import torch
    from transformers import dynamic_module_utils
    from transformers.utils import hub

    changes: list[tuple[Any, str, Any]] = [
        (dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0),  # With 0, remote code raises without a prompt.
        (torch.hub, "urlopen", refuse_download),
    ]
    if not kernels:
        changes.append((hub, "_is_offline_mode", True))
        if importlib.util.find_spec("kernels") is not None:
            from transformers.integrations import hub_kernels

            changes += [(hub_kernels, name, refuse_download) for name in ("get_kernel", "get_kernel_hub")]
    with forbid_network(kernels=kernels), replace_attributes(changes):
        yield


@contextmanager
def explain_loading_errors(message: str, hint: str = "") -> Iterator[None]:
    """Load silently, and report any failure in one line that begins with `message`."""
    try:
        with quiet_transformers():
            yield
    except CtxextError:
        raise
    except Exception as error:  # Any exception of other libraries.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        reason = first if isinstance(error, (OSError, ValueError, ImportError)) else f"{type(error).__name__}: {first}"
        raise CtxextError(f"{message}: {reason}", hint=hint) from error


def guard_vocabulary(model: Any, tokenizer: Any) -> None:
    """Make a model refuse tokens without an embedding; torch would raise an index error or stop the device.

    A vocabulary may contain unused tokens without an embedding, so each input is checked. On an accelerator, where the
    check waits for the device, it runs only if the vocabulary has such tokens.
    """
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        return
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None:
        return
    reaches_beyond = max(tokenizer.get_vocab().values(), default=0) >= rows

    def check(_module: Any, args: tuple[Any, ...]) -> None:
        if not args or not args[0].numel() or not (reaches_beyond or args[0].device.type == "cpu"):
            return
        if (largest := int(args[0].max())) >= rows:
            raise CtxextError(
                f"The tokenizer returned the token {largest}, but the model has {rows} embeddings.",
                hint="Use the tokenizer of this model.",
            )

    embedding.register_forward_pre_hook(check)


def load_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    trust: bool,
    dtype: "str | torch.dtype",
    device: "torch.device | None" = None,
    hint: str = "",
    **options: Any,
) -> Any:
    """Load a checkpoint's model in evaluation mode, with every weight that its configuration describes.

    Args:
        checkpoint: The checkpoint; its name is used in errors and for the model.
        folder: The folder in which it is staged.
        trust: Whether the staged modeling code may run.
        dtype: auto, bf16, fp16, fp32, or a type of torch.
        device: The device for the model, which also determines "auto"; None leaves the model as loaded.
        hint: The hint of the error if transformers cannot load it.
        options: Further arguments of transformers' from_pretrained.
    """
    import transformers

    if device is not None:
        check_device(checkpoint, device.type)
    check_described(checkpoint, runs_code=trust)
    loader = getattr(transformers, auto_class(checkpoint.config))
    options["dtype"] = choose_dtype(dtype) if isinstance(dtype, str) else dtype
    _LOG.debug("loading %s as %s on %s, code %s, %s", checkpoint.name, loader.__name__, device, trust, options)
    with explain_loading_errors(f'"{checkpoint.name}" cannot be loaded', hint):
        model, report = loader.from_pretrained(folder, trust_remote_code=trust, output_loading_info=True, **options)
    if report["missing_keys"]:
        raise _missing_error(checkpoint, report["missing_keys"])
    rename(model, checkpoint)
    return model.eval() if device is None else settle_dtype(model, str(dtype), device).to(device).eval()


def rename(loaded: Any, checkpoint: Checkpoint) -> Any:
    """Set the name of a loaded model or tokenizer to its checkpoint, instead of the temporary folder."""
    name = str(checkpoint.folder)
    for part in (loaded, getattr(loaded, "config", loaded)):
        if hasattr(part, "name_or_path"):
            part.name_or_path = name
    if isinstance(settings := getattr(loaded, "init_kwargs", None), dict):
        settings["name_or_path"] = name
    return loaded


def _missing_error(checkpoint: Checkpoint, missing: Iterable[Any]) -> CtxextError:
    first, *others = sorted(map(str, missing))
    more = f" and {len(others)} more weights" if len(others) > 1 else f' and "{others[0]}"' if others else ""
    return CtxextError(
        f'"{checkpoint.name}" lacks "{first}"{more}, which its config.json describes.',
        hint="Download the checkpoint again, or save it again as the class in config.json.",
    )


class _TooMuch(Exception):
    """A configuration describes more weights than the files contain."""


def stock_class(config: Mapping[str, Any], auto: str) -> tuple[Any, Any]:
    """Return the class of transformers that an Auto class selects for a config.json, and its configuration."""
    import transformers

    with tempfile.TemporaryDirectory() as folder, quiet_transformers(), forbid_downloads():
        stock = {key: value for key, value in without_hub(config).items() if key != "auto_map"}
        (Path(folder) / "config.json").write_text(as_json(stock), encoding="utf-8")
        described = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, auto)._model_mapping[type(described)]
    kind = kind[0] if isinstance(kind, tuple) else kind
    is_text = kind.config_class is not type(described)
    return kind, described.get_text_config(decoder=True) if is_text else described


def check_described(checkpoint: Checkpoint, *, runs_code: bool = False) -> None:
    """Compare the weight files with the class in config.json, without reading weights.

    Only transformers has the rules by which names are changed, merged or tied. So the class is built on the meta device
    and loads tensors without data. If that fails, loading reports why. Three cases are not checked here, and only
    loading reports missing weights: quantized weights, code of the checkpoint, and a class that is not in config.json,
    such as one with a new head. Sentence encoders often lack the pooler, which is unused.
    """
    import torch

    size = sum(map(checkpoint.size_of, checkpoint.weight_files))
    limits = max(_NUMBERS, _PER_BYTE * size), _TENSORS + size // _BYTES_PER_TENSOR
    names_differ = runs_code or _is_quantized(checkpoint.config)
    stored, missing = dict[str, torch.Tensor](), set[str]()
    try:
        config = _strip(checkpoint.config) if names_differ else checkpoint.config
        kind, described = stock_class(config, auto_class(checkpoint.config))
        with forbid_downloads(), quiet_transformers():
            # Constructors of some activations read the values of tensors.
            with suppress(NotImplementedError), torch.device("meta"), _limit_parameters(*limits):
                kind._from_config(described)
            named = [str(name) for name in checkpoint.config.get("architectures") or ()]
            if names_differ or not any(name.endswith((kind.__name__, WHOLE)) for name in named):
                return
            stored = _read_tensors(checkpoint)
            _, report = kind.from_pretrained(
                None, config=described, state_dict=dict(stored), device_map={"": "meta"}, output_loading_info=True
            )
        missing = {name for name in report["missing_keys"] if "pooler." not in name}
    except _TooMuch:
        raise CtxextError(
            f'"{checkpoint.name}": config.json describes far more weights than its files contain ({size:,} bytes).',
            hint="Download config.json and the weights again.",
        ) from None
    except RuntimeError:  # transformers 5 cannot merge experts if one lacks a weight.
        experts = [match.groups() for name in stored if (match := _EXPERT.fullmatch(name))]
        missing = {"".join(parts) for parts in itertools.product(*map(set, zip(*experts, strict=True)))} - {*stored, ""}
    except Exception:  # If transformers fails here, loading reports why.
        return
    if missing and stored:
        raise _missing_error(checkpoint, missing)


def check_complete(checkpoint: Checkpoint) -> None:
    """Check that the files contain all weights of the class, without torch if their names are recorded."""
    if not _is_quantized(checkpoint.config) and not _has_recorded_names(checkpoint):
        check_described(checkpoint)


def _is_quantized(config: Mapping[str, Any]) -> bool:
    return any("quantization_config" in part for part in (config, config.get("text_config") or {}))


def _has_recorded_names(checkpoint: Checkpoint) -> bool:
    """Return whether the headers have all recorded names of the family; False without a record.

    Indices are recorded as ranges `{start:stop}` of keys of config.json, with alternative names as `first|second`.
    """
    config, names = checkpoint.config, {*checkpoint.headers}
    record = json.loads(RECORDED.read_text(encoding="utf-8")).get(config["model_type"])
    if record is None or any(config.get(key, usual) != usual for key, usual in record["switches"].items()):
        return False
    if config.get("tie_word_embeddings", record["tied"]):
        names.add("lm_head.weight")

    def number(keys: str) -> int:
        return int(config[next((key for key in keys.split("|") if key in config), keys)]) if keys else 0

    try:
        return all(
            _RANGE.sub("{}", place).format(*indices) + ending in names
            for place, endings in record["names"].items()
            for indices in itertools.product(
                *(range(number(start), number(stop)) for start, stop in _RANGE.findall(place))
            )
            for ending in endings
        )
    except (KeyError, TypeError, ValueError):  # config.json lacks a size with a class default.
        return False


def _read_tensors(checkpoint: Checkpoint) -> "dict[str, torch.Tensor]":
    """Return the tensors of the weight files by name, without data."""
    import torch

    tensors = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, TORCH_NAMES.get(entry["dtype"], "uint8")), device="meta")
        for name, entry in checkpoint.headers.items()
    }
    pickled = [] if tensors else [path for path in checkpoint.weight_files if is_loadable(path)]
    for path in pickled:
        tensors |= torch.load(checkpoint.folder / path, map_location="meta", mmap=True, weights_only=True)
    return tensors


def needs_accelerator(checkpoint: Checkpoint) -> str:
    """Return why a checkpoint does not load on a CPU; empty if no reason is known.

    bitsandbytes quantizes weights while it moves them to an accelerator.
    """
    described: Any = checkpoint.config.get("quantization_config")
    keys = ("load_in_4bit", "load_in_8bit") if isinstance(described, dict) else ()
    key = next((key for key in keys if described.get(key)), None)
    packed = (".weight.absmax", ".SCB", ".weight_format")
    if key is None or any(name.endswith(packed) for name in checkpoint.headers):
        return ""
    return f'config.json has "{key}", which quantizes weights only on an accelerator'


def check_device(checkpoint: Checkpoint, device: str) -> None:
    """Raise if a checkpoint quantizes its weights while loading and the device is "cpu"."""
    if device == "cpu" and (reason := needs_accelerator(checkpoint)):
        raise CtxextError(
            f'"{checkpoint.name}" cannot be loaded on a CPU: {reason}.',
            hint="Use a GPU, or remove quantization_config from config.json.",
        )


def _strip(config: dict[str, Any]) -> dict[str, Any]:
    """Copy a configuration without its schedule, code and quantization."""
    return {
        key: _strip(value) if isinstance(value, dict) else value for key, value in config.items() if key not in _ROPE
    }


@contextmanager
def _limit_parameters(most_numbers: int, most_tensors: int) -> Iterator[None]:
    """Raise as soon as modules register more elements or tensors than allowed, including buffers."""
    from torch.nn.modules import module as hooks

    numbers = tensors = 0

    def count(_module: Any, _name: str, tensor: Any) -> None:
        nonlocal numbers, tensors
        numbers, tensors = numbers + (0 if tensor is None else tensor.numel()), tensors + 1
        if numbers > most_numbers or tensors > most_tensors:
            raise _TooMuch

    kinds = hooks.register_module_parameter_registration_hook, hooks.register_module_buffer_registration_hook
    handles = [register(count) for register in kinds]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable progress bars and warnings of transformers; ctxext reports failures itself."""
    from transformers.utils import logging

    level, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()
