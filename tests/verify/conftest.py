"""Fixtures of tests/push_fixtures.py."""

from push_fixtures import converted, extended, originals  # noqa: F401
