"""Models that answer: loaded by transformers or asked on a server; answers, losses and shared prefixes."""
