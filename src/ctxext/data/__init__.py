"""Text for a model: its sources, its encoding as tokens, and the layout of long prompts."""
