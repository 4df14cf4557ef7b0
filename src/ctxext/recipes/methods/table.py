"""Longer tables of positions, learned or computed: the methods that write weights, and only these."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ctxext.checkpoint.families import Family
from ctxext.checkpoint.new_tensor import SIZES, NewTensor, stored_tensors
from ctxext.checkpoint.opening import Checkpoint
from ctxext.errors import CtxextError
from ctxext.recipes.base import Reaching
from ctxext.recipes.encodings.base import Encoding
from ctxext.recipes.encodings.learned import (
    BUFFERS,
    LAYOUTS,
    Layout,
    LearnedTable,
    is_of_distances,
    tensors_named,
)
from ctxext.recipes.encodings.rotary import Config, ModelConfig
from ctxext.recipes.methods.fills import DTYPES, FILLS, KEEPS_ROWS, filled
from ctxext.recipes.param import param


@dataclass(frozen=True, kw_only=True)
class Rows(Reaching):
    """What methods share that give a table of positions more rows."""

    kind = "table"
    is_published = False
    layouts: ClassVar[Mapping[str, Layout]]
    """The families whose tables are known."""

    may_be_absent: ClassVar[bool] = False
    """Whether the table need not lie among the weights, as it can be computed."""

    @abstractmethod
    def rows(self, raw: memoryview, dtype: str, width: int, special: int, new: int) -> Iterator[bytes]:
        """The bytes of the longer table, given those of the old one (`fills.filled`)."""

    @classmethod
    def refusal(cls, config: Config, family: Family) -> str:
        """Why the table cannot be written; empty where it can."""
        if is_of_distances(config, family):
            return "its table is one of distances, clipped at its end"
        untried = "" if family.model_type in cls.layouts else "where its table lies was not tried"
        return super().refusal(config, family) or untried

    def edit(self, model: ModelConfig) -> ModelConfig:
        """Write the new length wherever the configuration states the old one.

        Raises:
            CtxextError: the model has no learned table, or none that was tried.
        """
        if reason := self.refusal(model.config, model.family):
            raise CtxextError(
                f'"{model.family.model_type}" has no table that {self.name} could lengthen: {reason}.',
                hint="ctxext inspect MODEL lists the methods that apply.",
            )
        return model.with_context_length(self.resolved(model.encoding).reach(model.encoding))

    def new_tensors(self, source: Checkpoint, model: ModelConfig) -> tuple[NewTensor, ...]:
        """The table, or both of them in an encoder-decoder, and the buffers that count its rows.

        Raises:
            CtxextError: no safetensors file has it, or its rows are not as many as config.json says.
        """
        if source.remote_sizes:  # A dry run on a repository whose weights were not fetched.
            return ()
        table = model.encoding
        assert isinstance(table, LearnedTable)
        found = stored_tensors(source)
        named = [(ending, tensors_named([*found], ending)) for ending in table.layout.tensors]
        names = [name for _, listed in named for name in listed]
        if (table.layout.tensors and not (names or self.may_be_absent)) or any(len(listed) > 1 for _, listed in named):
            told = f"several: {', '.join(names)}" if names else f"none named {' or '.join(table.layout.tensors)}"
            raise CtxextError(f'"{source.name}" has no one position table in its weights but {told}.')
        rows = table.num_special + table.context_length
        new = table.num_special + self.reach(table)
        buffers = [name for ending in BUFFERS for name in tensors_named([*found], ending)]
        return (
            *(self._table(*found[name], name, table, rows) for name in names),
            *(_buffer(*found[name], name, rows, new) for name in buffers),
        )

    def _table(self, path: Path, entry: dict[str, Any], name: str, table: LearnedTable, rows: int) -> NewTensor:
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if len(shape) != 2 or shape[0] != rows or not shape[1]:
            raise CtxextError(
                f'"{name}" has the shape {list(shape)}; config.json says {rows} rows.',
                hint="Correct the length in config.json, or download the checkpoint again.",
            )
        if dtype not in DTYPES:
            raise CtxextError(
                f'"{name}" is {dtype}, in which no rows can be made.', hint=f"It takes {', '.join(DTYPES)}."
            )
        new, special, width = self.reach(table), table.num_special, shape[1]

        def pieces(raw: memoryview) -> Iterator[bytes]:
            return self.rows(raw, dtype, width, special, new)

        return NewTensor(name, path, dtype, shape, (special + new, width), pieces)


def _buffer(path: Path, entry: dict[str, Any], name: str, rows: int, new: int) -> NewTensor:
    """A buffer with one entry per row: 0, 1, 2 ... or zeros."""
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype not in ("I64", "I32") or shape[-1:] != (rows,) or math.prod(shape) != rows:
        raise CtxextError(f'"{name}" is {dtype} {list(shape)}; expected one whole number for each of {rows} rows.')
    size, counts = SIZES[dtype], name.endswith("position_ids")

    def pieces(raw: memoryview) -> Iterator[bytes]:
        yield b"".join((index if counts else 0).to_bytes(size, "little") for index in range(new))

    return NewTensor(name, path, dtype, shape, (*shape[:-1], new), pieces)


@dataclass(frozen=True, kw_only=True)
class Table(Rows):
    """Give a model with learned positions more of them, made of the rows it has. Meant to be trained a little.

    tile p_(k mod L); hierarchical α u_i + (1 − α) u_j, up to L² positions: both leave the first L rows as they are.
    linear and cubic spread the rows over the new length, so that every input changes.
    """

    name = "table"
    title = "Longer position table"
    paper = "https://arxiv.org/abs/2004.05150"
    encoding = "learned"
    layouts = LAYOUTS

    fill: str = param(
        "tile",
        help="Of which rows the new ones are made: the old ones again, two of them weighed, or their neighbours.",
        choices=tuple(FILLS),
    )
    alpha: float = param(0.4, help="The weight of the coarse row in the hierarchical fill.", min=0.0, max=0.9)

    def summary(self) -> str:
        """The step with its fill."""
        return f"{super().summary()} ({self.fill})"

    def resolved(self, encoding: Encoding) -> "Table":
        """The same step with its factor known.

        Raises:
            CtxextError: no length was given, or the fill cannot reach it.
        """
        step = super().resolved(encoding)
        length, reach = encoding.trained_length, step.reach(encoding)
        if step.fill == "hierarchical" and reach > length**2:
            raise CtxextError(
                f"hierarchical reaches {length**2} positions from {length}, not {reach}.",
                hint="--fill tile has no end.",
            )
        return step

    def caution_for(self, model: ModelConfig) -> str:
        """What the rows beyond the old end are, and whether short inputs stay as they were."""
        kept = "inputs within the original context length give what they gave"
        changed = "every input changes, short ones too"
        return (
            "no position beyond the original context length was ever trained, so train a little (ctxext finetune "
            "trains the table itself) and measure before and after; "
            f"{kept if self.fill in KEEPS_ROWS else changed}."
        )

    def rows(self, raw: memoryview, dtype: str, width: int, special: int, new: int) -> Iterator[bytes]:
        """By the fill."""
        return filled(raw, dtype, width, special, new, self.fill, self.alpha)
