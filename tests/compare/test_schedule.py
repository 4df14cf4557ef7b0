"""What a comparison measures within a time limit, by a clock that only counts."""

import pytest

from ctxext.checkpoint.durations import Pace
from ctxext.compare.schedule import Judgement, Schedule, choose_schedule, list_choices
from ctxext.evaluate.stages import Stage

NAMES = ("unmodified", "yarn", "self-extend", "dca")
UNDECIDED = Judgement(frozenset(), is_decided=False, has_answers=True, measured=frozenset(NAMES))
CHOICES = list_choices(8192, 16384)


def quadratic(models, length):
    """Seconds of a text of SmolLM2 on two threads, for each model."""
    return models * (6.2e-4 * length + 2.74e-7 * length**2)


@pytest.mark.parametrize(
    ("left", "schedule"),
    [
        (36_000, Schedule((8192, 16384))),
        (4_000, Schedule((16384,), False, 3, 8)),
        (1_400, Schedule((16384,), False, 3, 4)),
        (600, Schedule((11264,), False, 3, 4)),
        (380, Schedule((9216,), False, 3, 4)),
        (350, Schedule((9216,), False, 2, 4)),  # Not 10240: the third method may fit too.
        (270, Schedule((9216,), False, 2, 4)),
        (200, Schedule((9216,), False, 2, 3)),
        (140, Schedule((9216,), False, 2, 2)),
        (100, Schedule((9216,), False, 2, 1)),
        (31, Schedule((9216,), False, 1, 1)),
        (20, None),
    ],
)
def test_the_longest_length_whose_texts_decide_something_is_chosen(left, schedule):
    assert choose_schedule((8192, 16384), CHOICES, whole=20_000, left=left, seconds=quadratic) == schedule


def test_lengths_to_choose_from_begin_beyond_the_original_one():
    assert CHOICES == [9216, 10240, 11264, 12288, 13312, 14336, 15360, 16384]
    assert list_choices(8192, 9000) == [9000]


def stages_of(judgements, asked=("needle",), samples=3):
    """The stages if the judgement changes with each question."""
    schedule, judgements = Schedule((9216,), False, 3, 3), iter(judgements)
    last = [UNDECIDED]

    def judge():
        last[0] = next(judgements, last[0])
        return last[0]

    return list(schedule.stages(NAMES, asked, ("short", "perplexity"), samples, judge))


def test_first_the_models_that_matter_then_their_cost_then_the_others():
    first, others = NAMES[:3], NAMES[3:]
    assert stages_of([UNDECIDED]) == [
        *(Stage(first, range(text, text + 1), ("needle",), (9216,)) for text in range(3)),
        *(Stage(NAMES[:2], range(text, text + 1), ("needle",), (9216,)) for text in range(3)),
        Stage(first, range(2), ("short",)),
        Stage(NAMES[:2], range(2), ("short",)),
        Stage(others, range(3), ("needle",), (9216,)),
        Stage(others, range(2), ("short",)),
        *(Stage(NAMES, range(sample, sample + 1)) for sample in range(3)),
    ]


def test_a_worse_model_is_left_out_and_a_clear_verdict_ends_the_run():
    worse = Judgement(frozenset({"self-extend"}), is_decided=False, has_answers=True, best="yarn")
    stages = stages_of([UNDECIDED, UNDECIDED, worse])
    assert "self-extend" in stages[0].models
    assert not any("self-extend" in stage.models for stage in stages[3:])
    decided = Judgement(frozenset({"self-extend", "dca"}), is_decided=True, has_answers=True)
    assert all(stage.tasks for stage in stages_of([decided])), "no further samples"


def test_documents_replace_questions_that_no_model_answers():
    stages = stages_of([Judgement(frozenset(), is_decided=False, has_answers=False)])
    tasks = ("needle", "needle", "short", "short", "perplexity", "perplexity")
    assert tuple(stage.tasks[0] for stage in stages[:6]) == tasks
    assert [stage.tasks for stage in stages_of([UNDECIDED], asked=())[:3]] == [("short",), ("short",), ("perplexity",)]


def test_a_pace_learns_both_kinds_of_operations_and_what_each_model_and_task_take():
    """By hand: 1 ms a token, and 0.15 s for a million pairs of tokens; the usual ratio is 0.12."""

    def seconds(length):
        return 1e-3 * length + 1.5e-7 * length**2

    pace = Pace({})
    assert pace.estimate("a", "needle", [1000]) == 0
    pace.begin("a", [(length, seconds(length)) for length in (1, 64, 512, 1024, 2048)])
    beside = 1.2  # Before a task is recorded; and answers have a fifth of the allowed tokens.
    assert pace.estimate("a", "", [16384]) == pytest.approx(seconds(16384), rel=0.2)
    expected = beside * (seconds(1024) + 2 * seconds(1))
    assert pace.estimate("a", "ruler", [1024], 10) == pytest.approx(expected, rel=0.05)
    assert pace.estimate("b", "needle", [4096], unseen=1.5) == pytest.approx(1.5 * beside * seconds(4096), rel=0.05)
    pace.record("a", "needle", [4096, 4096], 2 * 1.2 * seconds(4096))
    pace.record("b", "needle", [4096], 3 * seconds(4096))
    assert pace.estimate("b", "needle", [4096]) == pytest.approx(3 * seconds(4096), rel=0.01)
    assert pace.estimate("b", "needle", [8192]) == pytest.approx(3 * seconds(8192), rel=0.2)
    pace.record("a", "ruler", [1024], 5 * seconds(1024), is_written=True)
    assert pace.estimate("a", "ruler", [1024], 10) == pytest.approx(5 * seconds(1024), rel=0.05), "writing is included"


def test_short_texts_take_the_time_of_a_step():
    """Measured: 55 ms for a token, 160 for 64. Questions of 30 tokens after a text are mostly the time of a step."""
    pace = Pace({})
    pace.begin("a", [(1, 0.05), (64, 0.05 + 64 * 0.002), (128, 0.05 + 128 * 0.002)])
    assert pace.estimate("a", "", [30] * 10) == pytest.approx(10 * (0.05 + 30 * 0.002), rel=0.1)
    assert pace.estimate("a", "", [2048]) == pytest.approx(0.05 + 2048 * 0.002, rel=0.3)


SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    "read",
    [
        [(64, 0.29), (128, 0.42), (256, 0.94), (512, 1.4), (1024, 2.91)],
        [(64, 0.29), (128, 0.39), (256, 0.77), (512, 1.19), (1024, 3.41)],
        [(64, 0.32), (128, 0.5), (256, 0.82), (512, 2.05)],
    ],
)
def test_noisy_readings_of_a_second_are_enough_for_an_estimate_within_two_fifths(read):
    """As read by SmolLM2 in float32 on two threads, which read 13,312 tokens in 113 s."""
    pace = Pace(SMOLLM2)
    pace.begin("a", read)
    assert pace.estimate("a", "", [13312]) == pytest.approx(113, rel=0.4)
