"""Position encodings: each is read from config.json and written back."""
