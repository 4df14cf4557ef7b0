"""Longer position tables, learned or computed. Of the methods, only these change existing weights."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from ctxext.checkpoint.families import Family
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.files.tensor_files import BITS, NewTensor
from ctxext.recipes.base import Reaching
from ctxext.recipes.encodings.base import Config, Encoding
from ctxext.recipes.encodings.learned import (
    BUFFERS,
    LAYOUTS,
    ClippedTable,
    Layout,
    LearnedTable,
    is_of_distances,
    tensors_named,
)
from ctxext.recipes.methods.fills import DISTANCE_FILLS, DTYPES, FILLS, KEEPS_ROWS, fill_rows
from ctxext.recipes.model_config import ModelConfig
from ctxext.recipes.param import param


class Rows(Reaching):
    """Base of the methods that lengthen a position table."""

    kind = "table"
    is_published = False
    layouts: ClassVar[Mapping[str, Layout]]
    """The families with supported tables."""

    may_be_absent: ClassVar[bool] = False
    """True if the table may be missing from the weights, as it can be computed."""

    def num_source_rows(self, table: LearnedTable) -> int:
        """Return the number of the source's rows from which new ones are computed, special rows included.

        By default, all rows are used.
        """
        return table.num_rows

    @abstractmethod
    def rows(self, raw: memoryview, dtype: str, width: int, new: LearnedTable) -> Iterator[bytes]:
        """Return an iterator over the bytes of the longer table.

        It is computed from the bytes of the old one (arguments as in `fills.fill_rows`).
        """

    @classmethod
    @override
    def refusal(cls, config: Config, family: Family) -> str:
        if reason := super().refusal(config, family):
            return reason
        if is_of_distances(config, family):
            return "its table contains distances, not positions"
        return "" if family.model_type in cls.layouts else "the location of its table is unknown"

    @override
    def edit(self, model: ModelConfig) -> ModelConfig:
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" has no table that {self.name} supports: {reason}.',
                hint="ctxext inspect MODEL lists the methods that apply.",
            )
        return model.with_context_length(self.resolve(model.encoding).length_after(model.encoding))

    @override
    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        # An encoder-decoder has two tables, and some classes also store buffers with an entry per row.
        if source.remote_sizes:  # A dry run on a repository without fetched weights.
            return ()
        table = model.encoding
        assert isinstance(table, LearnedTable)
        stored = source.stored_tensors()
        named = [(ending, tensors_named([*stored], ending)) for ending in table.layout.tensors]
        names = [name for _, listed in named for name in listed]
        if (table.layout.tensors and not (names or self.may_be_absent)) or any(len(listed) > 1 for _, listed in named):
            expected = " or ".join(table.layout.tensors)
            problem = f"several position tables: {', '.join(names)}" if names else f"no position table {expected}"
            raise CtxextError(f'The weights of "{source.name}" have {problem}.')
        new = table.at_length(self.length_after(table))
        old_length, new_length = (table.num_special + each.context_length for each in (table, new))
        buffers = [name for ending in BUFFERS for name in tensors_named([*stored], ending)]
        return (
            *(self._table(*stored[name], name, table, new) for name in names),
            *(_buffer(*stored[name], name, old_length, new_length) for name in buffers),
        )

    def _table(self, path: Path, entry: dict[str, Any], name: str, table: LearnedTable, new: LearnedTable) -> NewTensor:
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if len(shape) != 2 or shape[0] != table.num_rows or not shape[1]:
            raise CtxextError(
                f'"{name}" has the shape {list(shape)}; config.json specifies {table.num_rows} rows.',
                hint="Correct the length in config.json, or download the checkpoint again.",
            )
        if dtype not in DTYPES:
            raise CtxextError(f'"{name}" is {dtype}, which is not supported.', hint=f"Supported: {', '.join(DTYPES)}.")
        width = shape[1]
        used = self.num_source_rows(table) * width * BITS[dtype] // 8

        def pieces(raw: memoryview) -> Iterator[bytes]:
            return self.rows(raw[:used], dtype, width, new)

        return NewTensor(name, path, dtype, shape, (new.num_rows, width), pieces)


def _buffer(path: Path, entry: dict[str, Any], name: str, rows: int, new: int) -> NewTensor:
    """Return a longer buffer with one entry per row: 0, 1, 2 ... or zeros."""
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype not in ("I64", "I32") or shape[-1:] != (rows,) or math.prod(shape) != rows:
        raise CtxextError(f'"{name}" is {dtype} {list(shape)}; expected one whole number for each of {rows} rows.')
    size, counts = BITS[dtype] // 8, name.endswith("position_ids")

    def pieces(raw: memoryview) -> Iterator[bytes]:
        yield b"".join((index if counts else 0).to_bytes(size, "little") for index in range(new))

    return NewTensor(name, path, dtype, shape, (*shape[:-1], new), pieces)


class Table(Rows):
    """Lengthen a table of learned positions with rows computed from the existing ones. Meant for a short fine-tune.

    Use it for BERT, RoBERTa, GPT-2, OPT and other models without RoPE. tile repeats the rows, p_(k mod L), and leaves
    short inputs unchanged. linear interpolates over the new length, so every input changes. Tables of distances
    (DeBERTa v1, v2 without buckets) are filled on both sides of distance 0. Beltagy et al. 2020 (Longformer),
    section 5; Shaw et al. 2018 (1803.02155).
    """

    name = "table"
    title = "Longer position table"
    paper = "https://arxiv.org/abs/2004.05150"
    encoding = "learned"
    layouts = LAYOUTS

    fill: str = param(
        "tile",
        help="Computation of new rows: repetition, or interpolation between neighbours.",
        choices=tuple(FILLS),
    )

    @override
    def num_source_rows(self, table: LearnedTable) -> int:
        # Rows beyond the trained length may exist, but they are unused.
        return table.num_rows - table.num_unused

    @override
    def summary(self) -> str:
        return f"{super().summary()} ({self.fill})"

    @override
    def resolve(self, encoding: Encoding) -> "Table":
        step = super().resolve(encoding)
        length = encoding.trained_length
        if length > encoding.context_length:
            raise CtxextError(
                f"The table has {encoding.context_length} rows, fewer than the {length} positions it was trained with."
            )
        return step

    @override
    def caution_for(self, model: ModelConfig) -> str:
        unchanged = "inputs within the original context length give the same output"
        changed = "every input changes, including short ones"
        table, trained = model.encoding, model.encoding.trained_length
        computed = f"rows from {trained} on are computed from the first {trained}"
        if isinstance(table, ClippedTable):
            computed = f"rows of distances from {table.distance} on are computed from those of nearer ones"
            unchanged = f"inputs of up to {table.distance} tokens give the same output"
        return (
            f"{computed} and are untrained, so fine-tune briefly (ctxext finetune also trains the table) and measure "
            f"before and after; {unchanged if self.fill in KEEPS_ROWS else changed}."
        )

    @override
    def rows(self, raw: memoryview, dtype: str, width: int, new: LearnedTable) -> Iterator[bytes]:
        fills = DISTANCE_FILLS if new.layout.distance_key else FILLS
        return fill_rows(raw, dtype, width, new.num_special, new.num_rows - new.num_special, fills[self.fill])
