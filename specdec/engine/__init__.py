"""The step loop, and the requests that enter it."""
