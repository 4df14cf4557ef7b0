"""Fixtures: a shared base that no test changes, and trainings without slow extras, in float32 on every processor."""

import pytest

from ctxext.checkpoint import loading
from tiny_base import base, short_trainings  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def without_bf16(tmp_path_factory):
    """Describe a processor without bf16, so that results do not depend on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_CPU_FLAGS", tmp_path_factory.getbasetemp() / "no-flags")
        yield
