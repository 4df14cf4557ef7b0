"""One file per task."""
