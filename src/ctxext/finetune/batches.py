"""What each step is trained on: which sequences, at which length, with which positions."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ctxext.errors import CtxextError
from ctxext.finetune.data import IGNORE, START, sequence_file
from ctxext.finetune.loss import IGNORED
from ctxext.finetune.options import TrainingOptions


def pose_positions(length: int, target: int, rng: random.Random) -> list[int]:
    """Positions of a short window that jump once, so that over many windows every distance of a long one is seen.

    PoSE (arXiv 2309.10400, section 3.2) with two chunks: the first begins at 0, the second is moved by a skip that is
    uniform from 0 to target - length. Where the window is cut is uniform too.
    """
    cut = rng.randint(1, max(1, length - 1))
    skip = rng.randint(0, max(0, target - length))
    return [position if position < cut else position + skip for position in range(length)]


def restarting_positions(starts: Sequence[bool]) -> list[int]:
    """Positions that start again with each document, which also keeps attention inside it."""
    positions: list[int] = []
    for is_start in starts:
        positions.append(0 if is_start or not positions else positions[-1] + 1)
    return positions


Masker = Callable[[torch.Tensor, torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]
"""Gives ids with some of them masked, and labels for just those; from ids, labels and a seed, each (rows, length)."""


def make_masker(tokenizer: Any, probability: float) -> Masker:
    """What masks tokens as BERT was trained (arXiv 1810.04805, section 3.1).

    Of the share that is chosen 80 % are masked, 10 % replaced, 10 % left; special tokens are never chosen, nor what the
    loss leaves out anyway.
    """
    from transformers import DataCollatorForLanguageModeling

    if tokenizer.mask_token_id is None:
        raise CtxextError("The tokenizer has no mask token, without which no token can be guessed.")
    special = torch.tensor(sorted(tokenizer.all_special_ids))

    def mask(ids: torch.Tensor, labels: torch.Tensor, seed: str) -> tuple[torch.Tensor, torch.Tensor]:
        collator = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=probability, seed=1 + random.Random(seed).getrandbits(62)
        )
        kept = torch.isin(ids, special) | (labels == IGNORED)
        batch = collator(
            [{"input_ids": row, "special_tokens_mask": no} for row, no in zip(ids, kept.long(), strict=True)]
        )
        return batch["input_ids"], batch["labels"]

    return mask


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """How a model takes its sequences.

    Attributes:
        first_index: What `position_ids` call the first position; None where the model takes none.
        mask: What masks tokens that are to be guessed; None where the next one is.
    """

    first_index: int | None = 0
    mask: Masker | None = None


class Sequences(Dataset[Tensors]):
    """All sequences of all steps in order; entry i belongs to step i // batch_size, whoever computes it.

    So the order depends on the seed alone: not on the number of processes, nor on where a run was taken up again. A
    step at a shorter length has as many more sequences as make up the tokens of a step at the full length.
    """

    def __init__(self, folder: Path, options: TrainingOptions, reading: Reading = Reading()) -> None:
        self.options, self.reading = options, reading
        full, self._rows = options.sequence_length, {}
        for length in sorted(options.sequences_wanted()):
            path = sequence_file(folder, length)
            # A length for which the data holds nothing, or that a run of other steps did not have, is left out.
            if path.is_file() and path.stat().st_size:
                self._rows[length] = np.memmap(path, dtype=np.int32, mode="r").reshape(-1, length)
        self.lengths = [
            length if length in self._rows else full for length in map(options.length_of_step, range(options.steps))
        ]
        # How many sequences were used before each step.
        self._used: list[int] = []
        used = dict.fromkeys(self._rows, 0)
        for length in self.lengths:
            self._used.append(used[length])
            used[length] += options.batch_size * (full // length)

    def __len__(self) -> int:
        return self.options.steps * self.options.batch_size

    def __getitem__(self, index: int) -> Tensors:
        """Tensors of shape (rows, length): one row, or several short ones."""
        step, place = divmod(index, self.options.batch_size)
        length = self.lengths[step]
        count = self.options.sequence_length // length
        first = self._used[step] + place * count
        rows = torch.stack([self._row(length, number) for number in range(first, first + count)])
        ids = rows & (IGNORE - 1)
        starts = (rows & START) != 0
        # Nothing is learned from the end of one document about the beginning of the next.
        labels = ids.masked_fill(starts | ((rows & IGNORE) != 0), IGNORED)
        labels[:, 0] = IGNORED
        if self.reading.mask is not None:
            ids, labels = self.reading.mask(ids, labels, f"{self.options.seed} masks {step} {first}")
        tensors = {"input_ids": ids, "labels": labels}
        if self.reading.first_index is not None:
            numbered = enumerate(starts.tolist(), start=first)
            positions = torch.tensor([self._positions(piece, step, number) for number, piece in numbered])
            tensors["position_ids"] = positions + self.reading.first_index
        if self.options.pack == "restart":
            return tensors  # Without a mask transformers sees from the positions where documents begin.
        return {**tensors, "attention_mask": torch.ones_like(ids)}

    def _row(self, length: int, number: int) -> torch.Tensor:
        """One of rows without end: all of them in a random order, then all of them in another."""
        rows = self._rows[length]
        epoch, place = divmod(number, len(rows))
        order = _order(len(rows), f"{self.options.seed} {length} {epoch}")
        return torch.from_numpy(rows[order[place]].astype(np.int64))

    def _positions(self, starts: list[bool], step: int, number: int) -> list[int]:
        if self.options.pack == "restart":
            return restarting_positions(starts)
        if self.options.positions == "pose" and not self.options.is_short(step):
            assert self.options.length is not None
            rng = random.Random(f"{self.options.seed} positions {step} {number}")
            return pose_positions(len(starts), self.options.length, rng)
        return list(range(len(starts)))


@functools.lru_cache(maxsize=8)
def _order(count: int, seed: str) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(random.Random(seed).getrandbits(64)).permutation(count)


def stacked(entries: list[dict[str, Any]]) -> Tensors:
    """One batch of several entries of the same step."""
    return {name: torch.cat([entry[name] for entry in entries]) for name in entries[0]}
