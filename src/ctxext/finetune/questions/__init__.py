"""Questions about a user's texts, for training: conversations with made-up facts and continuations."""
