"""Schemas for the keys that ctxext reads from untrusted files; the first error is reported in one line.

Other keys are ignored, and null means a missing key. The checks are those of pydantic's strict mode. Only pydantic's
core is imported, because importing pydantic takes a third of the time of `ctxext inspect`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctxext.errors import CtxextError
from ctxext.files.length import LONGEST
from ctxext.files.strict import parse_json, read_text
from ctxext.redaction import shorten

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator, ValidationError

Kind = dict[str, Any]
"""A type in the form of a pydantic schema."""

_ARM = "\0"
"""Label of a union's alternatives in pydantic's locations; it is not a key."""


class Schema:
    """The schema of an object in a file.

    Args:
        fields: Type of each key.
        required: Keys that must be present and not null.
        check: Raises a `PydanticCustomError` for an invalid combination of valid keys.
    """

    def __init__(self, fields: Mapping[str, Any], required: Sequence[str] = (), check: Any = None) -> None:
        self.fields = fields
        entries = {
            key: {"type": "typed-dict-field", "schema": kind if key in required else _or_null(kind)}
            | {"required": key in required}
            for key, kind in fields.items()
        }
        self.kind: Kind = {"type": "typed-dict", "fields": entries}
        if check is not None:
            function = {"type": "no-info", "function": check}
            self.kind = {"type": "function-after", "function": function, "schema": self.kind}

    @functools.cached_property
    def validator(self) -> "SchemaValidator":
        """Validator of pydantic's core, built on first use: some commands do not read files."""
        from pydantic_core import SchemaValidator

        kind: Any = self.kind
        return SchemaValidator(kind)


def _or_null(kind: Kind) -> Kind:
    return {"type": "nullable", "schema": kind}


def _either(*kinds: Kind) -> Kind:
    return {"type": "union", "choices": [(kind, _ARM) for kind in kinds]}


def _list(kind: Kind, **limits: int) -> Kind:
    return {"type": "list", "items_schema": kind, "fail_fast": True, **limits}


def _dict(kind: Kind, **limits: Any) -> Kind:
    return {"type": "dict", "keys_schema": _STR, "values_schema": kind, **limits}


def _int(least: int, most: int) -> Kind:
    return {"type": "int", "ge": least, "le": most}


def _all(kind: Kind, *keys: str) -> dict[str, Kind]:
    return dict.fromkeys(keys, kind)


_ANY, _BOOL, _INT, _STR, _NONE = ({"type": name} for name in ("any", "bool", "int", "str", "none"))
_COUNT = _int(1, 10_000_000)
_LAYERS = _int(1, 10_000)
_INDEX = _int(0, 10_000)
_LENGTH = _int(1, LONGEST)
_WINDOW = _int(0, LONGEST)
_SIZE = _int(0, 10_000_000)
_OFFSET = _int(0, 2**63 - 1)
NUMBER: Kind = {"type": "float", "allow_inf_nan": False}
_POSITIVE: Kind = {"type": "float", "gt": 0, "le": 1e30}
_BASE: Kind = {"type": "float", "gt": 1, "le": 1e30}
_SHARE: Kind = {"type": "float", "gt": 0, "le": 1}
WORD: Kind = {**_STR, "max_length": 10_000}
_PLACE: Kind = {**_STR, "pattern": r"^[a-z][A-Za-z0-9_]{0,99}(\.[a-z][A-Za-z0-9_]{0,99}){0,5}$"}
_DIGEST: Kind = {**_STR, "pattern": r"^[0-9a-f]{64}$"}
_PAIR = _list(_OFFSET, min_length=2, max_length=2)
_COUNTS = _either(_COUNT, _list(_SIZE))
_OBJECT = _dict(_ANY)

SCALING = Schema(
    {
        **_all(WORD, "rope_type", "type"),
        "rope_theta": _BASE,
        "original_max_position_embeddings": _LENGTH,
        "partial_rotary_factor": _SHARE,
        "truncate": _BOOL,
        **_all(_POSITIVE, "factor", "alpha", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
        **_all(_list(_POSITIVE), "short_factor", "long_factor"),
        **_all(NUMBER, "attention_factor", "mscale", "mscale_all_dim", "short_mscale", "long_mscale"),
    }
)
"""A schedule: `rope_scaling`, `rope_parameters`, or its block for one layer type."""

_STEP = Schema(
    {
        **_all(WORD, "method", "schedule", "head_order"),
        **_all(_POSITIVE, "factor", "ratio_min", "ratio_max"),
        "target_length": _LENGTH,
        "theta": _BASE,
    },
    required=["method"],
)
"""One step of a recipe in config.json or ctxext.json; `recipes` checks the method's parameters."""

_RECIPE = Schema(
    {**_all(WORD, "description", "source"), "steps": _list(_STEP.kind, min_length=1, max_length=100)},
    required=["steps"],
)
"""A recipe in its applied form."""

_NOTE = Schema(
    {
        **_all(WORD, "version", "source", "revision"),
        **_all(_LENGTH, "trained_length", "source_length", "declared_length"),
        "source_theta": _BASE,
        "recipe": _RECIPE.kind,
        **_all(_OBJECT, "finetune", "source_finetune"),
    }
)
"""The record of the conversion in config.json, under `ctxext`."""

_CODE_STEP = Schema({"method": WORD, "per_prompt": _BOOL}, required=["method"])
"""One method in the modeling code of a converted checkpoint; the code reads the other parameters."""


def _check_hidden(block: dict[str, Any]) -> dict[str, Any]:
    """Raise if a block hides nothing."""
    if any(block.get(key) not in (None, {}) for key in ("rope", "hidden")):
        return block
    from pydantic_core import PydanticCustomError

    raise PydanticCustomError("hides_nothing", "rope or hidden values")


_CODE = Schema(
    {
        **_all(SCALING.kind, "rope", "held"),
        "hidden": _dict(_either(WORD, _BOOL, _INT, NUMBER, _NONE), keys_schema=_PLACE, max_length=10),
        "shown": _BOOL,
        "steps": _list(_CODE_STEP.kind, min_length=1, max_length=100),
    },
    required=["steps"],
    check=_check_hidden,
)
"""The input of a converted checkpoint's modeling code, under `ctxext_code`."""

CONFIG = Schema(
    {
        "model_type": WORD,
        "architectures": _list(WORD),
        "auto_map": _dict(_either(WORD, _list(_or_null(WORD)))),
        "ctxext": _NOTE.kind,
        "ctxext_code": _CODE.kind,
        "text_config": _OBJECT,
        **_all(_COUNT, "hidden_size", "n_embd", "d_model", "vocab_size", "n_head", "n_heads", "head_dim"),
        **_all(_COUNT, "global_head_dim", "kv_channels", "attention_head_dim", "qk_rope_head_dim", "rotary_dim"),
        **_all(_COUNTS, "num_attention_heads", "num_key_value_heads"),
        **_all(_LAYERS, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
        **_all(_LENGTH, "max_position_embeddings", "n_positions", "max_seq_len", "original_max_position_embeddings"),
        **_all(_BASE, "rope_theta", "global_rope_theta", "local_rope_theta", "rope_local_base_freq", "rotary_emb_base"),
        "layer_rope_theta": _list(_or_null(NUMBER)),
        **_all(_SHARE, "partial_rotary_factor", "rotary_pct"),
        **_all(_OBJECT, "rope_scaling", "rope_parameters"),
        **_all(_list(WORD), "layer_types", "layers_block_type"),
        **_all(_list(_INDEX), "attn_layer_indices", "hybrid_layer_ids", "full_attn_idxs"),
        "no_rope_layers": _list(_either(_INT, _BOOL)),
        "max_window_layers": _INDEX,
        **_all(_LAYERS, "no_rope_layer_interval", "full_attention_interval", "global_attn_every_n_layers"),
        **_all(_LAYERS, "layer_group_size", "layers_per_block"),
        **_all(_BOOL, "use_sliding_window", "tie_word_embeddings"),
        "per_layer_config": _either(_OBJECT, _list(_ANY)),
        "attn_config": _OBJECT,
    }
)
"""config.json, or its block for the language model; the names of sizes depend on the family."""

_SIZES_OF_A_LAYER = {
    **_all(_SIZE, "num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads", "head_dim"),
    **_all(_SIZE, "v_head_dim", "qk_rope_head_dim", "kv_lora_rank"),
}
"""Sizes of one layer, for models with layers of different sizes; 0 means none."""

SIZES = Schema(
    {
        **_SIZES_OF_A_LAYER,
        **_all(_COUNT, "hidden_size", "num_attention_heads"),
        **_all(_LAYERS, "num_hidden_layers", "no_rope_layer_interval", "attn_layer_period"),
        **_all(_INDEX, "num_kv_shared_layers", "max_window_layers", "attn_layer_offset"),
        **_all(_SIZE, "global_head_dim", "swa_head_dim", "rotary_dim"),
        **_all(_LENGTH, "max_position_embeddings", "model_max_length"),
        **_all(_WINDOW, "sliding_window", "attention_chunk_size"),
        "attention_layers": _list(_INDEX),
        "per_layer_config": _dict(_or_null(Schema(_SIZES_OF_A_LAYER).kind)),
    }
)
"""The input of `families` and `geometry`, by the standard names of transformers."""

_CARRIED_CODE = Schema({"auto_map": _dict(WORD)}, required=["auto_map"])
"""The reference to modeling code next to config.json."""

GENERATION_CONFIG = Schema({"max_length": _LENGTH})

TOKENIZER_CONFIG = Schema({"model_max_length": _either(_INT, NUMBER)})
"""The length limit; tokenizers without a limit have a number of thirty digits."""

SHARD_INDEX = Schema({"weight_map": _dict(WORD)})

_SOURCE = Schema(_all(WORD, "name", "revision"))

MANIFEST = Schema(
    {
        "ctxext": WORD,
        **_all(_SOURCE.kind, "source", "base"),
        "recipe": _RECIPE.kind,
        **_all(_OBJECT, "finetune", "config"),
        "files": _dict(_DIGEST),
        "weights": _dict(_or_null(_DIGEST)),
        "stamps": _dict(_PAIR),
        "links": _dict(WORD),
        "rewritten": _dict(_list(_OFFSET)),
    }
)

_LOGGED = Schema({"step": _OFFSET, **_all(NUMBER, "loss", "eval_loss")}, required=["step"])


def _check_losses(state: dict[str, Any]) -> dict[str, Any]:
    """Raise if the log has no losses, or losses of steps after the save."""
    steps = [entry["step"] for entry in state["log_history"] if entry.get("loss") is not None]
    if steps and 1 <= min(steps) <= max(steps) <= state["global_step"] <= state["max_steps"]:
        return state
    from pydantic_core import PydanticCustomError

    raise PydanticCustomError("other_steps", "losses of the steps until then")


TRAINER_STATE = Schema(
    {
        **_all(_OFFSET, "global_step", "max_steps"),
        **_all(NUMBER, "epoch", "best_metric", "total_flos", "logging_steps", "eval_steps", "save_steps"),
        **_all(_OFFSET, "best_global_step", "num_input_tokens_seen", "train_batch_size", "num_train_epochs"),
        "best_model_checkpoint": WORD,
        "log_history": _list(_LOGGED.kind),
        "stateful_callbacks": _dict(_OBJECT),
    },
    required=["global_step", "max_steps", "epoch", "log_history", "stateful_callbacks"],
    check=_check_losses,
)

_SUM = _list(NUMBER, min_length=2, max_length=2)
"""A sum, and the number of its values."""


_OF_SAMPLES = ("texts", "groups", "correct", "cut", "read", "thought", "loss", "tokens", "key_tokens", "of")
"""Keys of a record with an entry for each sample."""


def _check_samples(record: dict[str, Any]) -> dict[str, Any]:
    """Raise if there is no result, or if a list with an entry for each sample has another length."""
    lists = [record[key] for key in _OF_SAMPLES if key in record]
    has_result = not record.keys().isdisjoint(("correct", "loss", "buckets"))
    if has_result and all(entries is not None and len(entries) == len(record["samples"]) for entries in lists):
        return record
    from pydantic_core import PydanticCustomError

    raise PydanticCustomError("other_samples", "one entry for each sample")


RECORD = Schema(
    {
        **_all(WORD, "model", "task", "text", "evaluator"),
        **_all(_LENGTH, "length", "width"),
        "depth": {"type": "float", "ge": 0, "le": 1},
        "seconds": {**NUMBER, "ge": 0},
        "samples": _list(_OFFSET, min_length=1),
        **_all(_list(_OFFSET), "texts", "cut", "read", "thought", "tokens", "key_tokens", "of"),
        "groups": _list(_list(WORD)),
        "correct": _list({"type": "float", "ge": 0, "le": 1}),
        "loss": _list(NUMBER),
        "buckets": _list(_SUM),
        **_all(_dict(_SUM), "lengths", "sliding"),
    },
    required=["model", "task", "length", "samples", "seconds"],
    check=_check_samples,
)
"""The measurements of a cell in cells.jsonl."""

MODEL_RECORD = Schema(
    {"model": WORD, "facts": Schema({"peak_memory": _OFFSET}).kind, "harness": _dict(_dict(NUMBER))},
    required=["model"],
)
"""A line of cells.jsonl about a model."""

SCHEMAS: Mapping[str, Schema] = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION_CONFIG,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "model.safetensors.index.json": SHARD_INDEX,
    "pytorch_model.bin.index.json": SHARD_INDEX,
    "ctxext.json": MANIFEST,
    "trainer_state.json": TRAINER_STATE,
}
"""Schemas by file name; other files are plain objects."""

_EXPECTED = {
    "dict_type": "an object",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "greater than or equal to {ge}",
    "less_than_equal": "less than or equal to {le}",
    "string_pattern_mismatch": "a match of {pattern}",
    "string_too_long": "at most {max_length} characters",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
}
"""Expected values in error messages, by pydantic's error type."""


def check_schema(
    content: Mapping[str, Any],
    schema: Schema,
    name: str,
    prefix: str = "",
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Check a file's content against its schema.

    Args:
        content: The content.
        schema: Its schema.
        name: The file's name in errors.
        prefix: The path of the content in the file.
        aliases: The names in the file of keys with another name in the schema.
    """
    from pydantic_core import ValidationError

    try:
        schema.validator.validate_python(content, strict=True)
    except ValidationError as error:
        names = aliases or {}
        message = describe_fault(error, f'"{name}"', lambda part: names.get(part, part), prefix)
        raise CtxextError(message) from None


def describe_fault(error: "ValidationError", place: str, rename: Callable[[str], str] = str, prefix: str = "") -> str:
    """Return the first error of a validation as a sentence.

    Args:
        error: The errors.
        place: The file, or the place in it, as the sentence begins.
        rename: Returns the name in the file of a key in the schema.
        prefix: The path of the content in the file.
    """
    fault = error.errors(include_url=False)[0]
    key = prefix + ".".join(rename(str(part)) for part in fault["loc"] if part not in (_ARM, "[key]"))
    if fault["type"] == "missing":
        return f'{place} lacks "{key}".'
    limits = fault.get("ctx", {})
    limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in limits.items()}
    expected = _EXPECTED.get(fault["type"], fault["msg"].removeprefix("Input should be ")).format(**limits)
    subject = f'{place}: "{key}"' if key else place
    return f"{subject} is {_quote_value(fault['input'])}, expected {expected}."


def check_config(config: Mapping[str, Any], name: str = "config.json") -> None:
    """Check the known keys of a config.json, including the language model's block and its schedules."""
    inner = config.get("text_config")
    if "auto_map" in config and "ctxext_code" in {*config, *(inner if isinstance(inner, dict) else ())}:
        check_schema(config, _CARRIED_CODE, name)
    for prefix, part in (("", config), *((("text_config.", inner),) if isinstance(inner, dict) else ())):
        check_schema(part, CONFIG, name, prefix)
        for key in ("rope_scaling", "rope_parameters"):
            schedule = part.get(key)
            if not isinstance(schedule, dict):
                continue
            check_schema(schedule, SCALING, name, f"{prefix}{key}.")
            for kind, nested in schedule.items():
                if isinstance(nested, dict):
                    check_schema(nested, SCALING, name, f"{prefix}{key}.{kind}.")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object, and check its known keys if the file's name has a schema."""
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise CtxextError(f'"{path}" is not a JSON object.')
    if path.name == "config.json":
        check_config(content, str(path))
    elif path.name in SCHEMAS:
        check_schema(content, SCHEMAS[path.name], str(path))
    return content


_SHOWN = 60
"""Maximum number of displayed characters of a value."""


def _quote_value(value: Any) -> str:
    return f'"{shorten("".join(islice(_write(value), _SHOWN + 1)), _SHOWN)}"'


def _write(value: Any) -> Iterator[str]:
    """Yield the `repr` of a value in parts: an untrusted file may contain lists of any length."""
    if isinstance(value, str):
        yield repr(value[: _SHOWN + 1])
    elif isinstance(value, dict):
        for number, (key, entry) in enumerate(value.items()):
            yield from (", " if number else "{", *_write(key), ": ")
            yield from _write(entry)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield ", " if number else "["
            yield from _write(entry)
        yield "]" if value else "[]"
    else:
        yield repr(value)
