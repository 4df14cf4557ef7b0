"""Fixtures: a tiny checkpoint with a tokenizer, with a short original context, so that longer prompts are short too."""

import importlib.util
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ctxext.checkpoint.opening import open_checkpoint
from ctxext.models.model import wrap_model
from ctxext.models.recipe_applier import RecipeApplier
from databases import Postgres, find_programs, run_postgres
from hand_made import make_tokenizer, tiny_llama

TRAINED = 320


@pytest.fixture(scope="session", autouse=True)
def no_pictures():
    """Lay out the Pareto front without drawing it, which takes longer than a short search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("ctxext.report.pictures"), "as_png", lambda figure, **_: b"not drawn")
        yield


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A tiny random Llama with its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama(max_position_embeddings=TRAINED).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def applier(source, tmp_path_factory) -> RecipeApplier:
    """The same model, for trying recipes."""
    stock = wrap_model("tiny", AutoModelForCausalLM.from_pretrained(source), make_tokenizer())
    return RecipeApplier(stock, open_checkpoint(str(source)), tmp_path_factory.mktemp("bench") / "bench")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server. With CTXEXT_DATABASE, as `make database` sets it, a test fails where there is none."""
    programs = find_programs()
    missing = [] if programs else ["PostgreSQL (apt-get install postgresql)"]
    missing += [name for name in ("psycopg", "psycopg2") if importlib.util.find_spec(name) is None]
    if missing:
        (pytest.fail if os.environ.get("CTXEXT_DATABASE") else pytest.skip)(f"not installed: {', '.join(missing)}")
    with run_postgres(programs) as server:
        yield server
