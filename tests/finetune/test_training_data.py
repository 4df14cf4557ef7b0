"""Documents to sequences, and sequences to batches."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from ctxext.errors import CtxextError
from ctxext.finetune.batches import Sequences, stacked
from ctxext.finetune.data import TOKENS, write_sequences
from ctxext.finetune.options import Options
from ctxext.finetune.positions import pose_positions, restarting_positions
from tiny_base import documents

DOCUMENTS = [[2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]


def write(folder, length=3, pack="off", wanted=99, end=1, data=DOCUMENTS):
    report = write_sequences(iter(data), folder, length=length, pack=pack, wanted=wanted, end=end)
    return report, np.fromfile(folder / TOKENS, dtype=np.int32).reshape(-1, length).tolist()


def test_each_sequence_comes_from_one_document(tmp_path):
    report, rows = write(tmp_path)
    assert rows == [[-3, 3, 4], [-10, 10, 11], [12, 13, 14]]
    assert (report.num_documents, report.num_tokens, report.num_sequences) == (3, 14, 3)
    assert (report.num_short, report.num_dropped) == (1, 5)


def test_documents_are_joined_with_an_end_between_them(tmp_path):
    report, rows = write(tmp_path, pack="run-on")
    assert rows == [[-3, 3, 4], [5, 6, 1], [-8, 8, 1], [-10, 10, 11], [12, 13, 14]]
    assert (report.num_short, report.num_sequences) == (0, 5)


def test_reading_stops_when_there_is_enough(tmp_path):
    def endless():
        while True:
            yield [2, 3, 4]

    report, rows = write(tmp_path, wanted=5, data=endless())
    assert len(rows) == 5
    assert report.num_documents == 5


@pytest.mark.parametrize(
    ("data", "pack", "message"),
    [
        ([], "off", "no text"),
        ([[]], "run-on", "no text"),
        ([[2, 3]], "off", "longest has 2"),
        ([[2]], "run-on", "3 tok"),
    ],
)
def test_unusable_data_is_refused(tmp_path, data, pack, message):
    with pytest.raises(CtxextError, match=message):
        write(tmp_path, pack=pack, data=data)


def make(folder, trained=8, **changes):
    options = Options(**{"length": 32, "steps": 10, "batch_size": 2, **changes})
    options = options.settled(window=32, trained_length=trained)
    write(folder, length=options.sequence_length, pack=options.pack, data=documents(6, 40))
    return Sequences(folder, options, trained)


def test_one_step_in_five_is_short(tmp_path):
    data = make(tmp_path, short_share=0.2)
    shapes = [tuple(data[2 * step]["input_ids"].shape) for step in range(10)]
    assert shapes.count((4, 8)) == 2
    assert shapes.count((1, 32)) == 8
    short = data[2 * shapes.index((4, 8))]
    assert short["position_ids"].tolist() == [list(range(8))] * 4


def test_labels_leave_out_what_no_token_predicts(tmp_path):
    data = make(tmp_path, pack="run-on", short_share=0.0)
    for index in range(6):
        entry = data[index]
        starts = torch.from_numpy(data.rows.copy()) < 0
        assert (entry["labels"] == -100).sum() >= 1
        assert entry["labels"][0, 0] == -100
        assert (entry["input_ids"] >= 0).all()
        assert entry["attention_mask"].all()
    assert starts.sum() == sum((data[i]["labels"] == -100)[:, 1:].sum() for i in range(len(data.rows))) + sum(
        bool(row[0] < 0) for row in data.rows
    )


def test_restarting_positions_and_no_mask(tmp_path):
    entry = make(tmp_path, pack="restart", short_share=0.0)[0]
    assert "attention_mask" not in entry
    positions = entry["position_ids"][0].tolist()
    assert positions[0] == 0
    assert positions.count(0) >= 1
    assert restarting_positions([False, False, True, False, True]) == [0, 1, 0, 1, 0]


def test_every_epoch_has_each_sequence_once_in_another_order(tmp_path):
    data = make(tmp_path, steps=6, batch_size=2, short_share=0.0)
    count = len(data.rows)
    first, second = ([data[e * count + i]["input_ids"].tolist() for i in range(count)] for e in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert stacked([data[0], data[1]])["input_ids"].shape == (2, 32)


def test_pose_positions_reach_the_target():
    """Section 3.2: the first chunk at 0, the second skipped uniformly; all below the target, unit steps but one."""
    found = [pose_positions(16, 64, random.Random(seed)) for seed in range(2000)]
    for positions in found:
        assert positions[0] == 0
        assert positions[-1] < 64
        steps = [b - a for a, b in pairwise(positions)]
        assert sum(step != 1 for step in steps) <= 1
    skips = [positions[-1] - 15 for positions in found]
    assert min(skips) == 0
    assert max(skips) == 48
    assert abs(sum(skips) / len(skips) - 24) < 1.5
    assert pose_positions(16, 16, random.Random(0)) == list(range(16))


def test_pose_windows_are_short_and_skip(tmp_path):
    data = make(tmp_path, positions="pose", short_share=0.5)
    entries = [data[index] for index in range(len(data))]
    assert all(entry["input_ids"].shape == (1, 8) for entry in entries)
    assert max(int(entry["position_ids"].max()) for entry in entries) > 8
    plain = [entry["position_ids"][0].tolist() == list(range(8)) for entry in entries]
    assert sum(plain) >= 10
    assert torch.equal(data[3]["position_ids"], data[3]["position_ids"])
