"""Requests: parameters, state, text and outputs."""
