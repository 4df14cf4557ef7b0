"""Configurations of other trainers for the same run; one file per trainer."""
