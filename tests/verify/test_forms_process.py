"""The state of torch while the forms of a checkpoint run."""

import pytest
import torch

from ctxext.verify.forms_process import unwritten_memory_as_nan


@pytest.mark.parametrize(("mode", "warn_only"), [(False, False), (True, False), (True, True)])
def test_new_memory_is_nan_and_the_mode_is_restored(mode, warn_only):
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        with unwritten_memory_as_nan():
            assert torch.empty(100).isnan().all()
        assert torch.are_deterministic_algorithms_enabled() == mode
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
    finally:
        torch.use_deterministic_algorithms(mode=False)
