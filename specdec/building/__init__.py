"""Builds an engine: settings, checks, weights, the size of the cache, and ranks."""
