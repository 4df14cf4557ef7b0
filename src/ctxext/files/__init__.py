"""Read untrusted files strictly, write output completely or not at all, and hide secrets."""
