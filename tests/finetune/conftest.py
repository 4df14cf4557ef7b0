"""A base that several tests train; none changes it."""

import pytest

from tiny_base import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("finetune"))
