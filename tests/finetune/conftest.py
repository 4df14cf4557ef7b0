"""A base that several tests train, which none changes, and trainings without what takes longer than their steps."""

from tiny_base import base, short_trainings  # noqa: F401
