"""Text on its way into a model: where it comes from, how it becomes tokens, how a long prompt is laid out."""
