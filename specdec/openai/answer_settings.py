"""Settings of the server that decide the form of answers. Pure Python, so that options need no other package."""

from typing import Literal

MetricsChoice = Literal["none", "summary", "detailed"]
ToolCallParserChoice = Literal["auto", "hermes", "llama3_json", "pythonic", "qwen3_coder", "mistral", "none"]
