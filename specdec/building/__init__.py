"""How an engine is built: settings, checks, loaded weights, memory of the cache, and ranks."""
