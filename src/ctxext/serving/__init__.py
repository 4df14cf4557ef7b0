"""The vLLM plugin, which runs relation maps in an engine that packs sequences end to end."""
