"""A base that several tests train, which none changes, and trainings without what takes longer than their steps."""

import functools
from importlib import import_module
from types import SimpleNamespace

import pytest

from tiny_base import leave_file, make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="session", autouse=True)
def short_trainings():
    """No curve of losses (`tune` draws it where asked), no collecting of garbage, and peft's card is compiled once."""
    import jinja2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("ctxext.finetune.run"), "draw_losses", leave_file)
        patch.setattr("accelerate.utils.memory.gc", SimpleNamespace(collect=lambda: 0))
        patch.setattr(jinja2, "Template", functools.cache(jinja2.Template))
        yield
