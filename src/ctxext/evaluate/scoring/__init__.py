"""Scoring: teacher-forced with shared prefixes, as written token by token, or by generating."""
