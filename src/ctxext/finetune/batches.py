"""The batches of each step: sequences, their lengths and positions."""

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
from ctxext.files.offline import forbid_network
from ctxext.finetune.data import IGNORE, START, sequence_file
from ctxext.finetune.loss import IGNORED
from ctxext.finetune.options import TrainingOptions


def draw_pose_positions(length: int, target: int, rng: random.Random) -> list[int]:
    """Return positions of a short window with one jump; over many windows they cover every distance of a long one.

    PoSE (arXiv 2309.10400, section 3.2) with two chunks: the first begins at 0, the second is shifted by a skip drawn
    uniformly from 0 to target - length. The border between the chunks is uniform too.
    """
    cut = rng.randint(1, max(1, length - 1))
    skip = rng.randint(0, max(0, target - length))
    return [position if position < cut else position + skip for position in range(length)]


def make_restarting_positions(starts: Sequence[bool]) -> list[int]:
    """Return positions that restart with each document, which also keeps attention inside it."""
    positions: list[int] = []
    for is_start in starts:
        positions.append(0 if is_start or not positions else positions[-1] + 1)
    return positions


Masker = Callable[[torch.Tensor, torch.Tensor, str], tuple[torch.Tensor, torch.Tensor]]
"""Function from ids, labels and a seed to partly masked ids and the labels of the masked ones, each (rows, length)."""


def make_masker(tokenizer: Any, probability: float) -> Masker:
    """Return a function that masks tokens as in BERT's training (arXiv 1810.04805, section 3.1).

    Of the chosen share 80 % are masked, 10 % replaced, 10 % left unchanged. Special tokens and tokens without a loss
    are never chosen.
    """
    with forbid_network():
        from transformers import DataCollatorForLanguageModeling

    if tokenizer.mask_token_id is None:
        raise CtxextError("The tokenizer has no mask token, which training a masked language model needs.")
    special = torch.tensor(sorted(tokenizer.all_special_ids))

    def mask(ids: torch.Tensor, labels: torch.Tensor, seed: str) -> tuple[torch.Tensor, torch.Tensor]:
        collator = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=probability, seed=1 + random.Random(seed).getrandbits(62)
        )
        is_excluded = torch.isin(ids, special) | (labels == IGNORED)
        batch = collator(
            [
                {"input_ids": row, "special_tokens_mask": mask_flags}
                for row, mask_flags in zip(ids, is_excluded.long(), strict=True)
            ]
        )
        return batch["input_ids"], batch["labels"]

    return mask


Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelInputs:
    """Inputs that a model needs for its sequences.

    Attributes:
        first_index: Value of `position_ids` at the first position; None if the model has no such argument.
        mask: Function that masks the tokens to predict; None if the model predicts the next token.
    """

    first_index: int | None = 0
    mask: Masker | None = None


class Sequences(Dataset[Tensors]):
    """All sequences of all steps in order; entry i belongs to step i // batch_size in every process.

    The order depends only on the seed, not on the number of processes or on resuming. A step at a shorter length
    has more sequences, for the same number of tokens as a step at the full length.
    """

    def __init__(self, folder: Path, options: TrainingOptions, inputs: ModelInputs = ModelInputs()) -> None:
        self.options, self.inputs = options, inputs
        full, self._rows = options.sequence_length, {}
        for length in sorted(options.count_sequences()):
            path = sequence_file(folder, length)
            # Skip lengths without data, and those that a run with other steps did not have.
            if path.is_file() and path.stat().st_size:
                self._rows[length] = np.memmap(path, dtype=np.int32, mode="r").reshape(-1, length)
        self.lengths = [
            length if length in self._rows else full for length in map(options.length_of_step, range(options.num_steps))
        ]
        # Number of sequences used before each step.
        self._used: list[int] = []
        used = dict.fromkeys(self._rows, 0)
        for length in self.lengths:
            self._used.append(used[length])
            used[length] += options.batch_size * (full // length)

    def __len__(self) -> int:
        return self.options.num_steps * self.options.batch_size

    def __getitem__(self, index: int) -> Tensors:
        """Return tensors of shape (rows, length): one row, or several short ones."""
        step, place = divmod(index, self.options.batch_size)
        length = self.lengths[step]
        count = self.options.sequence_length // length
        first = self._used[step] + place * count
        rows = torch.stack([self._row(length, number) for number in range(first, first + count)])
        ids = rows & (IGNORE - 1)
        starts = (rows & START) != 0
        # The first token of a document must not be predicted from the document before it.
        labels = ids.masked_fill(starts | ((rows & IGNORE) != 0), IGNORED)
        labels[:, 0] = IGNORED
        if self.inputs.mask is not None:
            ids, labels = self.inputs.mask(ids, labels, f"{self.options.seed} masks {step} {first}")
        tensors = {"input_ids": ids, "labels": labels}
        if self.inputs.first_index is not None:
            numbered = enumerate(starts.tolist(), start=first)
            positions = torch.tensor([self._make_positions(piece, step, number) for number, piece in numbered])
            tensors["position_ids"] = positions + self.inputs.first_index
        if self.options.pack == "restart":
            return tensors  # Without a mask, transformers finds document starts from the positions.
        return {**tensors, "attention_mask": torch.ones_like(ids)}

    def _row(self, length: int, number: int) -> torch.Tensor:
        """Return a row from an endless sequence of epochs, each with all rows in its own random order."""
        rows = self._rows[length]
        epoch, place = divmod(number, len(rows))
        order = _draw_order(len(rows), f"{self.options.seed} {length} {epoch}")
        return torch.from_numpy(rows[order[place]].astype(np.int64))

    def _make_positions(self, starts: list[bool], step: int, number: int) -> list[int]:
        if self.options.pack == "restart":
            return make_restarting_positions(starts)
        if self.options.positions == "pose" and not self.options.is_short(step):
            assert self.options.length is not None
            rng = random.Random(f"{self.options.seed} positions {step} {number}")
            return draw_pose_positions(len(starts), self.options.length, rng)
        return list(range(len(starts)))


class Parts(Dataset[Tensors]):
    """Equal parts of sequences: entry i is part i % count of sequence i // count, so that each process gets its part.

    The rows of an entry are joined, as their positions restart. Targets are shifted before the split, because those of
    the last position are in the next part.

    Args:
        sequences: Entries with tensors of shape (rows, length).
        count: The number of parts.
    """

    def __init__(self, sequences: Sequence[Tensors] | Dataset[Tensors], count: int) -> None:
        self.sequences, self.count = sequences, count

    def __len__(self) -> int:
        return len(self.sequences) * self.count  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Tensors:
        """Return tensors of shape (1, rows × length / count), rounded up: the end of the last part is not learned."""
        number, part = divmod(index, self.count)
        whole = self.sequences[number]
        targets = torch.nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
        ids, targets, positions = (rows.flatten() for rows in (whole["input_ids"], targets, whole["position_ids"]))
        size = -(-len(ids) // self.count)
        missing = size * self.count - len(ids)
        ids, targets = (
            torch.nn.functional.pad(row, (0, missing), value=value) for row, value in ((ids, 0), (targets, IGNORED))
        )
        positions = torch.cat([positions, positions[-1] + 1 + torch.arange(missing)])
        ids, targets, positions = (row[None, part * size :][:, :size] for row in (ids, targets, positions))
        # The Trainer counts the learned tokens of a step from `shift_labels`, if there are `labels`.
        return {"input_ids": ids, "labels": targets, "shift_labels": targets, "position_ids": positions}


@functools.lru_cache(maxsize=8)
def _draw_order(count: int, seed: str) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(random.Random(seed).getrandbits(64)).permutation(count)


def collate(entries: list[dict[str, Any]]) -> Tensors:
    """Concatenate several entries of the same step into one batch."""
    return {name: torch.cat([entry[name] for entry in entries]) for name in entries[0]}
