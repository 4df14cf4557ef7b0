"""Conversion of documents to sequences, and of sequences to batches."""

import numpy as np
import pytest
import torch

from ctxext.errors import CtxextError
from ctxext.finetune.batches import Sequences, collate
from ctxext.finetune.data import COUNTS, IGNORE, START, read_report, sequence_file, write_sequences
from ctxext.finetune.documents import Document
from ctxext.finetune.options import TrainingOptions
from tiny_base import documents

DOCUMENTS = [[2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15]]


def write(folder, length=3, pack="off", num_needed=99, end=1, data=DOCUMENTS):
    return write_marked(folder, {length: num_needed}, pack, map(Document, data), end)


def write_marked(folder, num_needed, pack, data, end=1):
    report = write_sequences(iter(data), folder, num_needed=num_needed, pack=pack, end=end)
    assert read_report(folder, max(num_needed)) == report
    return report, rows_of(folder, max(num_needed))


def rows_of(folder, length):
    return np.fromfile(sequence_file(folder, length), dtype=np.int32).reshape(-1, length).tolist()


def starting(token):
    return token | START


def ignored(token):
    return token | IGNORE


def test_each_sequence_comes_from_one_document(tmp_path):
    report, rows = write(tmp_path)
    assert rows == [[starting(2), 3, 4], [starting(9), 10, 11], [12, 13, 14]]
    assert (report.num_documents, report.num_tokens, report.num_sequences) == (3, 14, 3)
    assert (report.num_short, report.num_dropped) == (1, 5)


def test_documents_are_joined_with_an_end_between_them(tmp_path):
    report, rows = write(tmp_path, pack="run-on")
    assert rows == [[starting(2), 3, 4], [5, 6, 1], [starting(7), 8, 1], [starting(9), 10, 11], [12, 13, 14]]
    assert (report.num_short, report.num_sequences) == (0, 5)


def test_counts_that_are_damaged_are_named(tmp_path):
    assert read_report(tmp_path, 3) is None
    write(tmp_path)
    (tmp_path / COUNTS).write_text('{"num_documents": ')
    with pytest.raises(CtxextError, match="is damaged"):
        read_report(tmp_path, 3)


def test_reading_stops_when_there_is_enough(tmp_path):
    def endless():
        while True:
            yield [2, 3, 4]

    report, rows = write(tmp_path, num_needed=5, data=endless())
    assert len(rows) == 5
    assert report.num_documents == 5


@pytest.mark.parametrize(
    ("data", "pack", "message"),
    [
        ([], "off", "no text"),
        ([[]], "run-on", "no text"),
        ([[2, 3]], "off", "longest document has 2"),
        ([[2]], "run-on", "3 tok"),
    ],
)
def test_unusable_data_is_refused(tmp_path, data, pack, message):
    with pytest.raises(CtxextError, match=message):
        write(tmp_path, pack=pack, data=data)


def make(folder, trained=8, **changes):
    options = TrainingOptions(**{"length": 32, "steps": 10, "batch_size": 2, **changes})
    options = options.resolve(window=32, trained_length=trained)
    write_marked(folder, options.count_sequences(), options.pack, map(Document, documents(6, 40)))
    return Sequences(folder, options)


def test_every_sequence_of_a_step_has_its_own_jump(tmp_path):
    """A batch has as many distances as rows; the same seed gives the same ones."""
    data, again = (make(tmp_path, steps=2, batch_size=16, short_share=0.0, positions="pose", length=4096) for _ in "ab")
    rows = [tuple(data[index]["position_ids"][0].tolist()) for index in range(32)]
    assert len(set(rows[:16])) == len(set(rows[16:])) == 16
    assert len(set(rows)) == 32
    assert rows == [tuple(again[index]["position_ids"][0].tolist()) for index in range(32)]


def test_labels_leave_out_what_no_token_predicts(tmp_path):
    data = make(tmp_path, pack="run-on", short_share=0.0)
    rows = torch.tensor(rows_of(tmp_path, 32))
    num_starts = int(((rows & START) != 0)[:, 1:].sum())
    entries = [data[index] for index in range(len(rows))]
    for entry in entries:
        assert entry["labels"][0, 0] == -100
        assert entry["input_ids"].max() < 64
        assert entry["attention_mask"].all()
    assert num_starts == sum(int((entry["labels"] == -100)[:, 1:].sum()) for entry in entries) > 0


def marked(size, answer, first=2):
    """A document with an answer at its end."""
    return Document(list(range(first, first + size)), [False] * (size - answer) + [True] * answer)


def test_marked_documents_stay_whole_in_the_best_fit(tmp_path):
    data = [marked(3, 1), marked(9, 2), marked(5, 1), marked(17, 1)]
    report, rows = write_marked(tmp_path, {4: 9, 8: 9, 16: 9}, "off", data)
    assert [row[:9] for row in rows] == [[starting(ignored(2)), *map(ignored, range(3, 9)), 9, 10]]
    assert rows[0][9:] == [ignored(1)] * 7
    assert rows_of(tmp_path, 4) == [[starting(ignored(2)), ignored(3), 4, ignored(1)]]
    assert rows_of(tmp_path, 8) == [[starting(ignored(2)), *map(ignored, (3, 4, 5)), 6, *[ignored(1)] * 3]]
    assert (report.num_sequences, dict(report.num_shorter)) == (1, {"4": 1, "8": 1})
    assert (report.num_learned, report.num_long, report.num_dropped) == (4, 1, 17)


def test_marked_documents_are_joined_and_never_cut(tmp_path):
    data = [marked(3, 1), marked(4, 1), marked(5, 1)]
    report, rows = write_marked(tmp_path, {8: 9}, "restart", data)
    assert [token & (IGNORE - 1) for token in rows[0]] == [2, 3, 4, 2, 3, 4, 5, 1]
    assert [bool(token & START) for token in rows[0]] == [True, False, False, True, False, False, False, False]
    assert [token & (IGNORE - 1) for token in rows[1]] == [2, 3, 4, 5, 6, 1, 1, 1]
    assert (report.num_sequences, report.num_learned, report.num_dropped) == (2, 3, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [([marked(40, 1)], "longer than 32"), ([marked(6, 1)], "No document needs")],
)
def test_marked_documents_of_the_wrong_size_are_refused(tmp_path, data, message):
    with pytest.raises(CtxextError, match=message):
        write_marked(tmp_path, {8: 4, 32: 4}, "off", data)


def test_a_length_without_documents_is_left_out_of_the_run(tmp_path):
    options = TrainingOptions(length=32, steps=10, batch_size=1, short_share=0.5).resolve(window=32, trained_length=8)
    write_marked(tmp_path, options.count_sequences(), "off", [marked(20, 3)])
    data = Sequences(tmp_path, options)
    assert set(data.lengths) == {32}
    assert [int((data[i]["labels"] != -100).sum()) for i in range(10)] == [3] * 10


def test_lengths_double_up_to_the_full_one(tmp_path):
    data = make(tmp_path, start_length=4, steps=8, short_share=0.0, pack="run-on")
    assert data.lengths == [4, 4, 8, 8, 16, 16, 32, 32]
    shapes = [tuple(data[2 * step]["input_ids"].shape) for step in range(8)]
    assert shapes == [(8, 4), (8, 4), (4, 8), (4, 8), (2, 16), (2, 16), (1, 32), (1, 32)]
    assert data[0]["position_ids"].tolist() == [list(range(4))] * 8


def test_no_sequence_is_repeated_before_all_were_seen(tmp_path):
    """Over steps of several lengths, read in any order."""
    data = make(tmp_path, start_length=8, steps=6, batch_size=2, short_share=0.4, pack="run-on")
    for length in (8, 16, 32):
        seen = [
            tuple(row) for i in range(12) if data.lengths[i // 2] == length for row in data[i]["input_ids"].tolist()
        ]
        count = len(rows_of(tmp_path, length))
        assert len(set(seen[:count])) == min(count, len(seen))
    again = [data[index]["input_ids"] for index in reversed(range(12))]
    assert all(torch.equal(data[index]["input_ids"], again[11 - index]) for index in range(12))


def test_restarting_positions_and_no_mask(tmp_path):
    entry = make(tmp_path, pack="restart", short_share=0.0)[0]
    assert "attention_mask" not in entry
    positions = entry["position_ids"][0].tolist()
    assert positions[0] == 0
    assert positions.count(0) >= 1


def test_every_epoch_has_each_sequence_once_in_another_order(tmp_path):
    data = make(tmp_path, steps=6, batch_size=2, short_share=0.0)
    count = len(rows_of(tmp_path, 32))
    first, second = ([data[e * count + i]["input_ids"].tolist() for i in range(count)] for e in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)
    assert collate([data[0], data[1]])["input_ids"].shape == (2, 32)


def test_pose_windows_are_short_and_skip(tmp_path):
    data = make(tmp_path, positions="pose", short_share=0.5)
    entries = [data[index] for index in range(len(data))]
    assert all(entry["input_ids"].shape == (1, 8) for entry in entries)
    assert max(int(entry["position_ids"].max()) for entry in entries) > 8
    plain = [entry["position_ids"][0].tolist() == list(range(8)) for entry in entries]
    assert sum(plain) >= 10
    assert torch.equal(data[3]["position_ids"], data[3]["position_ids"])
