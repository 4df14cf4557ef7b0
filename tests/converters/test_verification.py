"""The check in a clean process: what it must not let through."""

import re

import pytest

from ctxext.checkpoint import open_checkpoint
from ctxext.converters import convert
from ctxext.converters.plan import make_plan
from ctxext.errors import CtxextError
from ctxext.recipes import MsPoE, Recipe
from ctxext.verify.logits import compare_logits


def test_logits_that_are_a_little_off_are_refused(llama_source, tmp_path):
    """A checkpoint whose largest ratio is a hundredth off what the recipe asks for."""
    source = open_checkpoint(str(llama_source))
    convert(str(llama_source), tmp_path / "out", recipe(1.82), check=False)
    asked = make_plan(source, recipe(1.8))
    with pytest.raises(CtxextError, match="logits differ") as refusal:
        compare_logits(tmp_path / "out", source, asked.recipe, asked.model, asked.stock)
    (relative,) = re.findall(r"by (\S+) from", refusal.value.message)
    assert float(relative) < 0.05, "not so far off that anything would notice"


def recipe(ratio_max: float) -> Recipe:
    return Recipe([MsPoE(ratio_max=ratio_max, first_layer=0, head_order="fixed")])
