"""Read untrusted files strictly, and write output atomically."""
