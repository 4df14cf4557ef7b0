"""Settings of a stopped run and of the run that continues it."""

import pytest

from ctxext.errors import CtxextError
from ctxext.files.resuming import check_same_settings

OLD = {"rank": 4, "lengths": [64, 128], "model": {"name": "a", "digest": "1", "recipe": None}, "seed": None}


def test_equal_settings_are_accepted():
    check_same_settings("out", OLD, {**OLD, "lengths": (64, 128)})
    check_same_settings("out", OLD, {key: value for key, value in OLD.items() if key != "seed"})


def test_the_message_has_every_different_setting_with_both_values():
    model = {"name": "a", "digest": "2", "recipe": {"steps": ["yarn"]}}
    with pytest.raises(CtxextError) as refused:
        check_same_settings("out", OLD, {"rank": 8, "lengths": [64], "model": model, "seed": 1, "width": 0.5})
    assert refused.value.message == (
        '"out" cannot be resumed with other settings: rank 4, now 8; lengths 64,128, now 64; '
        "model digest 1, now 2; model recipe none, now yarn; seed none, now 1; width none, now 0.5."
    )
    assert refused.value.hint == "Use the same options as before, or start over with --overwrite."


def test_values_are_on_one_line_and_not_long():
    with pytest.raises(CtxextError) as refused:
        check_same_settings("out", {"data": "a\nb"}, {"data": "c" * 200})
    assert refused.value.message == f'"out" cannot be resumed with other settings: data a b, now {"c" * 80}….'
