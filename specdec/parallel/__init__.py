"""Ranks that share a model: their places, and operations between them."""
