"""What every command needs of the machine: folders, locks, processes, limits, tokens, loading."""
