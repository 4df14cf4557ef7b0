"""What each step is trained on: which sequences, at which length, with which positions."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ctxext.finetune.data import TOKENS
from ctxext.finetune.loss import IGNORED
from ctxext.finetune.options import Options
from ctxext.finetune.positions import pose_positions, restarting_positions

Tensors = dict[str, torch.Tensor]


class Sequences(Dataset[Tensors]):
    """All sequences of all steps in order; entry i belongs to step i // batch_size, whoever computes it.

    So the order depends on the seed alone: not on the number of processes, nor on where a run was taken up again.

    Args:
        folder: Where `write_sequences` wrote them.
        options: The options, settled.
        trained_length: The context length of the base before it was extended, in tokens.
    """

    def __init__(self, folder: Path, options: Options, trained_length: int) -> None:
        self.options, self.trained_length = options, trained_length
        self.rows = np.memmap(folder / TOKENS, dtype=np.int32, mode="r").reshape(-1, options.sequence_length)
        self._epoch, self._order = -1, torch.empty(0)

    def __len__(self) -> int:
        return self.options.steps * self.options.batch_size

    def __getitem__(self, index: int) -> Tensors:
        """Tensors of shape (rows, length): one row, or several short ones."""
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            shuffle = torch.Generator().manual_seed(self.options.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.rows), generator=shuffle)
        row = torch.from_numpy(self.rows[int(self._order[place])].astype(np.int64))
        is_short = self.is_short(index // self.options.batch_size)
        size = min(self.trained_length, len(row)) if is_short else len(row)
        pieces = row[: len(row) // size * size].reshape(-1, size)
        starts = pieces < 0
        ids = torch.where(starts, -1 - pieces, pieces)
        # Nothing is learned from the end of one document about the beginning of the next.
        labels = ids.masked_fill(starts, IGNORED)
        labels[:, 0] = IGNORED
        positions = torch.tensor([self._positions(piece, index, is_short) for piece in starts.tolist()])
        tensors = {"input_ids": ids, "labels": labels, "position_ids": positions}
        if self.options.pack == "restart":
            return tensors  # Without a mask transformers sees from the positions where documents begin.
        return {**tensors, "attention_mask": torch.ones_like(ids)}

    def is_short(self, step: int) -> bool:
        """Whether a step trains on pieces of the trained length; such steps are spread evenly."""
        share = self.options.short_share
        useful = self.trained_length < self.options.sequence_length or self.options.positions == "pose"
        return useful and int((step + 1) * share) > int(step * share)

    def _positions(self, starts: list[bool], index: int, is_short: bool) -> list[int]:
        if self.options.pack == "restart":
            return restarting_positions(starts)
        if self.options.positions == "pose" and not is_short:
            assert self.options.length is not None
            rng = random.Random(f"{self.options.seed} positions {index}")
            return pose_positions(len(starts), self.options.length, rng)
        return list(range(len(starts)))


def stacked(entries: list[dict[str, Any]]) -> Tensors:
    """One batch of several entries of the same step."""
    return {name: torch.cat([entry[name] for entry in entries]) for name in entries[0]}
