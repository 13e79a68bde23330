"""Target models and what their checkpoint folders hold."""
