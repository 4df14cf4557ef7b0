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
    Layout,
    LearnedTable,
    is_of_distances,
    tensors_named,
)
from ctxext.recipes.methods.fills import DTYPES, FILLS, KEEPS_ROWS, fill_rows
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
        """Return the number of the source's position rows from which new ones are computed.

        By default, all rows are used.
        """
        return table.context_length

    @abstractmethod
    def rows(self, raw: memoryview, dtype: str, width: int, special: int, new: int) -> Iterator[bytes]:
        """Return an iterator over the bytes of the longer table.

        It is computed from the bytes of the old one (arguments as in `fills.filled`).
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
        rows = table.num_special + table.context_length
        new = table.num_special + self.length_after(table)
        buffers = [name for ending in BUFFERS for name in tensors_named([*stored], ending)]
        return (
            *(self._table(*stored[name], name, table, rows) for name in names),
            *(_buffer(*stored[name], name, rows, new) for name in buffers),
        )

    def _table(self, path: Path, entry: dict[str, Any], name: str, table: LearnedTable, rows: int) -> NewTensor:
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if len(shape) != 2 or shape[0] != rows or not shape[1]:
            raise CtxextError(
                f'"{name}" has the shape {list(shape)}; config.json specifies {rows} rows.',
                hint="Correct the length in config.json, or download the checkpoint again.",
            )
        if dtype not in DTYPES:
            raise CtxextError(f'"{name}" is {dtype}, which is not supported.', hint=f"Supported: {', '.join(DTYPES)}.")
        new, special, width = self.length_after(table), table.num_special, shape[1]
        used = (special + self.num_source_rows(table)) * width * BITS[dtype] // 8

        def pieces(raw: memoryview) -> Iterator[bytes]:
            return self.rows(raw[:used], dtype, width, special, new)

        return NewTensor(name, path, dtype, shape, (special + new, width), pieces)


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
    short inputs unchanged. linear interpolates over the new length, so every input changes. Beltagy et al. 2020
    (Longformer), section 5.
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
        return table.trained_length

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
        trained = model.encoding.trained_length
        return (
            f"rows from {trained} on are computed from the first {trained} and are untrained, so fine-tune briefly "
            "(ctxext finetune also trains the table) and measure before and after; "
            f"{unchanged if self.fill in KEEPS_ROWS else changed}."
        )

    @override
    def rows(self, raw: memoryview, dtype: str, width: int, special: int, new: int) -> Iterator[bytes]:
        return fill_rows(raw, dtype, width, special, new, self.fill)
