"""The step loop and how an engine is built."""
