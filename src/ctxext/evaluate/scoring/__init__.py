"""Scoring: teacher-forced with shared prefixes, token by token, or by generation."""
