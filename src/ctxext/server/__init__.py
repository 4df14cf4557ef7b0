"""A client of servers with an OpenAI-compatible API."""
