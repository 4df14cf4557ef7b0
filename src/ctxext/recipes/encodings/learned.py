"""Position tables: the tensors and the keys of config.json by family.

Most tables are learned. Others contain sinusoids, which a longer table continues; some families store them in the
weights.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import override

from ctxext.checkpoint.families import DISTANCES, Family, text_config
from ctxext.errors import CtxextError
from ctxext.recipes.encodings.base import POSITIONS, Config, Encoding, provenance
from ctxext.recipes.encodings.biases import read_distance

PADDING = "padding"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A family's position table.

    Attributes:
        tensors: The suffixes of the tensors' names; the prefix differs between classes.
        length_keys: The keys of config.json with the length; the first is required.
        special: The number of rows before position 0; "padding" for the rows up to the padding token.
        counts_special: Whether the keys include these rows.
        distance_key: The key of the largest distance k, if the table has rows for the distances −k to k−1.
    """

    tensors: tuple[str, ...]
    length_keys: tuple[str, ...] = ("max_position_embeddings",)
    special: int | str = 0
    counts_special: bool = False
    distance_key: str = ""

    def num_special(self, text: Mapping[str, Any]) -> int:
        """Return the number of rows before position 0."""
        if self.special != PADDING:
            return int(self.special)
        padding = text.get("pad_token_id", 1)
        if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
            raise CtxextError(f'config.json has no usable pad_token_id: "{padding}".')
        return padding + 1


BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
"""Buffers in the weights of older checkpoints: 0, 1, 2 ... and zeros, one per row of the table."""

_ENCODER = ("embeddings.position_embeddings.weight",)
_TOWERS = ("encoder.embed_positions.weight", "decoder.embed_positions.weight")
_BERT = Layout(tensors=_ENCODER)
_ROBERTA = Layout(tensors=_ENCODER, special=PADDING, counts_special=True)
_DEBERTA = Layout(tensors=("encoder.rel_embeddings.weight",), distance_key="max_relative_positions")

LAYOUTS: Mapping[str, Layout] = {
    "albert": _BERT,
    "bart": Layout(tensors=_TOWERS, special=2),
    "bert": _BERT,
    "biogpt": Layout(tensors=("embed_positions.weight",), special=2),
    "camembert": _ROBERTA,
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA,
    "clip": Layout(tensors=("text_model.embeddings.position_embedding.weight",)),
    "clip_text_model": Layout(tensors=("embeddings.position_embedding.weight",)),
    "distilbert": _BERT,
    "electra": _BERT,
    "gpt2": Layout(tensors=("wpe.weight",), length_keys=("n_positions", "n_ctx")),
    "gpt_bigcode": Layout(tensors=("wpe.weight",), length_keys=("n_positions",)),
    "gpt_neo": Layout(tensors=("wpe.weight",)),
    "led": Layout(tensors=_TOWERS[:1], length_keys=("max_encoder_position_embeddings",)),
    "longformer": _ROBERTA,
    "mbart": Layout(tensors=_TOWERS, special=2),
    "opt": Layout(tensors=("embed_positions.weight",), special=2),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""The supported families with a learned table, by model type."""

COMPUTED: Mapping[str, Layout] = {
    "m2m_100": Layout(tensors=()),
    "marian": Layout(tensors=_TOWERS),
    "pegasus": Layout(tensors=_TOWERS),
    "xglm": Layout(tensors=()),
}
"""The supported families with a computed table; those without tensors compute it for any length."""


@dataclass(frozen=True)
class LearnedTable(Encoding):
    """A table with one row per position.

    Attributes:
        layout: Its place in the weights and in config.json.
        num_special: The number of rows before position 0.
        is_lengthened: Whether ctxext added the rows beyond the original context length.
    """

    layout: Layout
    num_special: int
    is_lengthened: bool = False

    @property
    def is_scaled(self) -> bool:
        """Whether rows were added; a source table may have more rows than were trained."""
        return self.is_lengthened and super().is_scaled

    @property
    def num_rows(self) -> int:
        """The number of all rows."""
        return self.num_special + self.context_length

    @property
    def num_unused(self) -> int:
        """The number of untrained rows at the end of the source table."""
        return 0 if self.is_lengthened else max(self.context_length - self.trained_length, 0)

    @override
    def at_length(self, length: int) -> Self:
        return dataclasses.replace(super().at_length(length), is_lengthened=True)

    @property
    def feature(self) -> str:
        """The name of the feature, the same for tables of any length."""
        return "table"

    @property
    def learned_tensors(self) -> tuple[str, ...]:
        """Name suffixes of the table, and of a second one in some families."""
        return self.layout.tensors

    @property
    def first_index(self) -> int | None:
        """The number of special rows if the keys count them; otherwise the model adds them."""
        return self.num_special * self.layout.counts_special

    @override
    def describe(self) -> str:
        special = f" after {self.num_special} for others" if self.num_special else ""
        end = f"{self.trained_length} of them trained" if self.num_unused else "all of them trained"
        rows = f"a table with one row for each of {self.context_length} positions{special}"
        return f"learned position embeddings: {rows}, {end}"

    @override
    def state_length(self, text: Config, family: Family) -> None:
        # The class needs the first key; other keys are optional and are only updated.
        length = self.context_length + self.num_special * self.layout.counts_special
        for number, key in enumerate(self.layout.length_keys):
            if number == 0 or key in text:
                text[key] = length


@dataclass(frozen=True)
class DistanceTable(LearnedTable):
    """A table with a row for each distance (Shaw et al. 2018, 1803.02155)."""

    @override
    def describe(self) -> str:
        return (
            f"learned embeddings of distances, clipped at {self.context_length - 1}: all farther tokens get the "
            "same embedding, and more rows would have to be trained"
        )


@dataclass(frozen=True)
class ClippedTable(LearnedTable):
    """A table with a row for each distance from −k to k−1, to which farther distances are clipped (DeBERTa).

    He et al. 2021 (2006.03654), equation 3, after Shaw et al. 2018.

    Attributes:
        distance: The largest distance k, in tokens.
    """

    distance: int = 0

    @property
    def num_rows(self) -> int:
        """The number of rows: two for each distance."""
        return 2 * self.distance

    @property
    def num_unused(self) -> int:
        """0: an input of any length uses all rows."""
        return 0

    @property
    def first_index(self) -> None:
        """None: distances are those between tokens of the input."""

    @override
    def at_length(self, length: int) -> Self:
        # Distances grow as the context does, also if the two differ in the source.
        distance = round(self.distance * length / self.trained_length)
        return dataclasses.replace(super().at_length(length), distance=distance)

    @override
    def describe(self) -> str:
        return (
            f"learned embeddings of distances: {self.num_rows} rows, clipped at {self.distance}, so all farther tokens "
            "have the same embedding"
        )

    @override
    def to_record(self) -> dict[str, Any]:
        return {**super().to_record(), "source_distance": self.distance}

    @override
    def restore_source(self, record: Mapping[str, Any]) -> Self:
        plain = super().restore_source(record)
        return dataclasses.replace(plain, distance=int(record.get("source_distance") or self.distance))

    @override
    def state_length(self, text: Config, family: Family) -> None:
        super().state_length(text, family)
        text[self.layout.distance_key] = self.distance


@dataclass(frozen=True)
class ComputedTable(LearnedTable):
    """A table of sinusoids."""

    @property
    def is_scaled(self) -> bool:
        """Whether it is longer than the original context length; its rows are not trained."""
        return self.context_length > self.trained_length

    @property
    def learned_tensors(self) -> tuple[str, ...]:
        """None: sinusoids are not trained."""
        return ()

    @override
    def describe(self) -> str:
        return f"sinusoidal position embeddings: a table computed for {self.context_length} positions"


def read_learned(config: Config, family: Family, original_length: int | None = None) -> LearnedTable:
    """Read the length of a learned table."""
    fields = _read(config, family, LAYOUTS, original_length)
    if key := fields[2].distance_key:
        return ClippedTable(*fields, distance=read_distance(config, family, key))
    return (DistanceTable if is_of_distances(config, family) else LearnedTable)(*fields)


def is_of_distances(config: Config, family: Family) -> bool:
    """Return whether a configuration uses embeddings of distances instead of positions."""
    return text_config(config, family).get("position_embedding_type") in DISTANCES


def read_computed(config: Config, family: Family, original_length: int | None = None) -> ComputedTable:
    """Read the length of a computed table."""
    return ComputedTable(*_read(config, family, COMPUTED, original_length))


def _read(
    config: Config, family: Family, layouts: Mapping[str, Layout], original_length: int | None
) -> tuple[int, int, Layout, int, bool]:
    layout = layouts.get(family.model_type)
    if layout is None:
        raise CtxextError(
            f'"{family.model_type}" has {POSITIONS[family.positions]}; the location of its table is unknown.',
            hint=f"Supported: {', '.join(layouts)}.",
        )
    text = text_config(config, family)
    special, key = layout.num_special(text), layout.length_keys[0]
    length = text.get(key, family.defaults.get(key))
    smallest = 2 + special * layout.counts_special
    if not isinstance(length, int) or isinstance(length, bool) or not smallest <= length <= 10**8:
        raise CtxextError(
            f'config.json has no usable {key}: "{length}".',
            hint="Add the number of positions the model was trained on to config.json.",
        )
    positions = length - special * layout.counts_special
    recorded = provenance(config).get("trained_length")
    return int(original_length or recorded or positions), positions, layout, special, bool(recorded)


def tensors_named(names: Sequence[str], ending: str) -> list[str]:
    """Return the names that equal an ending or end with it, by whole dotted parts."""
    return [name for name in names if name == ending or name.endswith(f".{ending}")]
