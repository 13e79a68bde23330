"""Text of tokens: decoding as they come, stop strings, and what a token is called."""
