"""What this package uses of each file that a stranger may have written, and the one line where it is otherwise.

Keys that are not named here are carried along unread. A null stands for a key that is left out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from ctxext.errors import CtxextError
from ctxext.files.schema import MAY_BE_MISSING, Limits, Schema, fault_of
from ctxext.files.strict import parse_json, read_text

LONGEST = 10**10
"""Tokens that no context is longer than."""

Count = Annotated[int, Limits(ge=1, le=10_000_000)]
Layers = Annotated[int, Limits(ge=1, le=10_000)]
Index = Annotated[int, Limits(ge=0, le=10_000)]
Length = Annotated[int, Limits(ge=1, le=LONGEST)]
Number = Annotated[float, Limits(finite=True)]
Positive = Annotated[float, Limits(gt=0, le=1e30)]
Base = Annotated[float, Limits(gt=1, le=1e30)]
Share = Annotated[float, Limits(gt=0, le=1)]
Size = Annotated[int, Limits(ge=0, le=10_000_000)]
Window = Annotated[int, Limits(ge=0, le=LONGEST)]
Offset = Annotated[int, Limits(ge=0, le=2**63 - 1)]
Word = Annotated[str, Limits(max_length=10_000)]
Place = Annotated[str, Limits(pattern=r"^[a-z][A-Za-z0-9_]{0,99}(\.[a-z][A-Za-z0-9_]{0,99}){0,5}$")]
Digest = Annotated[str, Limits(pattern=r"^[0-9a-f]{64}$")]
PerLayer = Count | list[Size]


class Scaling(Schema):
    """A schedule: `rope_scaling`, `rope_parameters`, or the part of it for one kind of layers."""

    rope_type: Word | None = None
    type: Word | None = None
    rope_theta: Base | None = None
    factor: Positive | None = None
    alpha: Positive | None = None
    original_max_position_embeddings: Length | None = None
    partial_rotary_factor: Share | None = None
    attention_factor: Number | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    truncate: bool | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    short_factor: list[Positive] | None = None
    long_factor: list[Positive] | None = None
    short_mscale: Number | None = None
    long_mscale: Number | None = None


class Step(Schema):
    """One step of a recipe that config.json or ctxext.json notes; `recipes` checks the numbers of its method."""

    method: Word
    factor: Positive | None = None
    target_length: Length | None = None
    theta: Base | None = None
    ratio_min: Positive | None = None
    ratio_max: Positive | None = None
    schedule: Word | None = None
    head_order: Word | None = None


class NotedRecipe(Schema):
    """A recipe as it was applied."""

    description: Word | None = None
    source: Word | None = None
    steps: Annotated[list[Step], Limits(min_length=1, max_length=100)]


class Note(Schema):
    """What config.json says of its own making, under `ctxext`."""

    version: Word | None = None
    source: Word | None = None
    revision: Word | None = None
    trained_length: Length | None = None
    source_theta: Base | None = None
    source_length: Length | None = None
    declared_length: Length | None = None
    recipe: NotedRecipe | None = None
    finetune: dict[str, Any] | None = None
    source_finetune: dict[str, Any] | None = None


class CodeStep(Schema):
    """One method in the modeling code of a converted checkpoint; its own numbers are that code's to read."""

    method: Word
    per_prompt: bool | None = None


_HIDES = "rope or hidden values"


class CodeNote(Schema):
    """What the modeling code of a converted checkpoint reads, under `ctxext_code`."""

    rope: Scaling | None = None
    held: Scaling | None = None
    hidden: Annotated[dict[Place, Word | bool | int | Number | None], Limits(max_length=10)] | None = None
    shown: bool | None = None
    steps: Annotated[list[CodeStep], Limits(min_length=1, max_length=100)]

    @classmethod
    def missing(cls, content: Mapping[str, Any]) -> str:
        """A block hides something."""
        return "" if any(content.get(key) not in (None, {}) for key in ("rope", "hidden")) else _HIDES


class Config(Schema):
    """config.json, or the language model's part of it; sizes under the names that families give them."""

    model_type: Word | None = None
    architectures: list[Word] | None = None
    auto_map: dict[str, Word | list[Word | None]] | None = None
    ctxext: Note | None = None
    ctxext_code: CodeNote | None = None
    text_config: dict[str, Any] | None = None
    hidden_size: Count | None = None
    n_embd: Count | None = None
    d_model: Count | None = None
    vocab_size: Count | None = None
    num_attention_heads: PerLayer | None = None
    n_head: Count | None = None
    n_heads: Count | None = None
    num_key_value_heads: PerLayer | None = None
    head_dim: Count | None = None
    global_head_dim: Count | None = None
    kv_channels: Count | None = None
    attention_head_dim: Count | None = None
    qk_rope_head_dim: Count | None = None
    num_hidden_layers: Layers | None = None
    n_layer: Layers | None = None
    n_layers: Layers | None = None
    num_layers: Layers | None = None
    max_position_embeddings: Length | None = None
    n_positions: Length | None = None
    max_seq_len: Length | None = None
    original_max_position_embeddings: Length | None = None
    rope_theta: Base | None = None
    global_rope_theta: Base | None = None
    local_rope_theta: Base | None = None
    rope_local_base_freq: Base | None = None
    rotary_emb_base: Base | None = None
    layer_rope_theta: list[Number | None] | None = None
    partial_rotary_factor: Share | None = None
    rotary_pct: Share | None = None
    rotary_dim: Count | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[Word] | None = None
    layers_block_type: list[Word] | None = None
    attn_layer_indices: list[Index] | None = None
    hybrid_layer_ids: list[Index] | None = None
    full_attn_idxs: list[Index] | None = None
    no_rope_layers: list[int | bool] | None = None
    no_rope_layer_interval: Layers | None = None
    max_window_layers: Index | None = None
    full_attention_interval: Layers | None = None
    global_attn_every_n_layers: Layers | None = None
    layer_group_size: Layers | None = None
    layers_per_block: Layers | None = None
    use_sliding_window: bool | None = None
    tie_word_embeddings: bool | None = None
    per_layer_config: dict[str, Any] | list[Any] | None = None
    attn_config: dict[str, Any] | None = None


class LayerSizes(Schema):
    """What is read of one layer where layers differ in size; 0 stands for none."""

    num_key_value_heads: Size | None = None
    num_global_key_value_heads: Size | None = None
    swa_num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    v_head_dim: Size | None = None
    qk_rope_head_dim: Size | None = None
    kv_lora_rank: Size | None = None


class Sizes(LayerSizes):
    """What `families` and `geometry` read, by the standard names of transformers, whatever a family calls it."""

    hidden_size: Count | None = None
    num_attention_heads: Count | None = None
    num_hidden_layers: Layers | None = None
    num_kv_shared_layers: Index | None = None
    global_head_dim: Size | None = None
    swa_head_dim: Size | None = None
    rotary_dim: Size | None = None
    max_position_embeddings: Length | None = None
    model_max_length: Length | None = None
    sliding_window: Window | None = None
    attention_chunk_size: Window | None = None
    max_window_layers: Index | None = None
    no_rope_layer_interval: Layers | None = None
    attn_layer_period: Layers | None = None
    attn_layer_offset: Index | None = None
    attention_layers: list[Index] | None = None
    per_layer_config: dict[str, LayerSizes | None] | None = None


class CarriedCode(Schema):
    """What config.json says of the code beside it, where a block says that there is some."""

    auto_map: dict[str, Word] = MAY_BE_MISSING


class GenerationConfig(Schema):
    """generation_config.json."""

    max_length: Length | None = None


class TokenizerConfig(Schema):
    """tokenizer_config.json. Tokenizers without a limit write a number of thirty digits."""

    model_max_length: int | Number | None = None


class ShardIndex(Schema):
    """The index of a sharded checkpoint."""

    weight_map: dict[str, Word] | None = None


class Source(Schema):
    """Where a checkpoint was made from."""

    name: Word | None = None
    revision: Word | None = None


class Manifest(Schema):
    """ctxext.json."""

    ctxext: Word | None = None
    source: Source | None = None
    base: Source | None = None
    recipe: NotedRecipe | None = None
    finetune: dict[str, Any] | None = None
    files: dict[str, Digest] | None = None
    weights: dict[str, Digest | None] | None = None
    stamps: dict[str, Annotated[list[Offset], Limits(min_length=2, max_length=2)]] | None = None
    links: dict[str, Word] | None = None
    rewritten: dict[str, list[Offset]] | None = None


SCHEMAS: Mapping[str, type[Schema]] = {
    "config.json": Config,
    "generation_config.json": GenerationConfig,
    "tokenizer_config.json": TokenizerConfig,
    "model.safetensors.index.json": ShardIndex,
    "pytorch_model.bin.index.json": ShardIndex,
    "ctxext.json": Manifest,
}
"""The schema of a file of this name; others are plain objects."""


def checked(
    content: Mapping[str, Any],
    schema: type[Schema],
    name: str,
    prefix: str = "",
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Check a file's content against its schema.

    Args:
        content: The content.
        schema: What it must be.
        name: What errors call the file.
        prefix: Where the content stands in the file.
        aliases: The names in the file of keys that the schema has under another name.
    """
    fault = fault_of(content, schema)
    if fault is None:
        return
    key = prefix + ".".join((aliases or {}).get(str(part), str(part)) for part in fault.place)
    if not fault.expected:
        raise CtxextError(f'"{name}" lacks "{key}".')
    raise CtxextError(f'"{name}": "{key}" is {_shown(fault.value)}, expected {fault.expected}.')


def check_config(config: Mapping[str, Any], name: str = "config.json") -> None:
    """Check what is used of a config.json, with the language model's part and the schedules inside it."""
    inner = config.get("text_config")
    if "ctxext_code" in {*config, *(inner if isinstance(inner, dict) else ())}:
        checked(config, CarriedCode, name)
    for prefix, part in (("", config), *((("text_config.", inner),) if isinstance(inner, dict) else ())):
        checked(part, Config, name, prefix)
        for key in ("rope_scaling", "rope_parameters"):
            schedule = part.get(key)
            if not isinstance(schedule, dict):
                continue
            checked(schedule, Scaling, name, f"{prefix}{key}.")
            for kind, nested in schedule.items():
                if isinstance(nested, dict):
                    checked(nested, Scaling, name, f"{prefix}{key}.{kind}.")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; what is used of a file whose name is known is checked against its schema."""
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise CtxextError(f'"{path}" does not hold a JSON object.')
    if path.name == "config.json":
        check_config(content, str(path))
    elif path.name in SCHEMAS:
        checked(content, SCHEMAS[path.name], str(path))
    return content


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f'"{text if len(text) <= 60 else text[:60] + "…"}"'
