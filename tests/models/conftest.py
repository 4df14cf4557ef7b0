"""Fixtures of tests/evaluation_fixtures.py."""

from evaluation_fixtures import checkpoint, no_pictures, tokenizer, words  # noqa: F401
