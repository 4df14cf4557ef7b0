"""Fixtures of tests/push_fixtures.py."""

from push_fixtures import commands, converted, extended, originals, server  # noqa: F401
