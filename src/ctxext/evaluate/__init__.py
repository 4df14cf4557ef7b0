"""Measurement of a checkpoint's use of its context: tasks, scoring and plots."""
