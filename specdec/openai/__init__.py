"""Requests and answers of the OpenAI-compatible API: what their fields mean, without a server."""
