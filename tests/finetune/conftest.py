"""Fixtures: a shared base that no test changes, and trainings without slow extras."""

from tiny_base import base, short_trainings  # noqa: F401
