"""A checkpoint that thinks, says a word and calls a tool, and the server's settings for it."""

from pathlib import Path
from typing import Any

from tests.specdec.metaspace_llama import CALL, TEMPLATE, byte_ids, ids, save_chain

# The conversation ends with "assistant". All marks are special tokens.
_CHAIN = ("<think>", "▁hello", "▁true", "</think>", "▁world", "<tool_call>", CALL, "</tool_call>", "</s>")
# What the model says.
THOUGHT, TEXT, CALLED = " hello true", " world", {"a": 1}
ENGINE: dict[str, Any] = {"dtype": "float64", "kv_cache_memory": 8 << 20, "reasoning_parser": "qwen3"}
# As Qwen3's template, which ends the thinking at once where it is switched off; and one that may show earlier thinking.
THINKING_TEMPLATE = (
    "{% if show_thoughts %}{% for m in messages %}{{ m.reasoning_content }}{% endfor %}{% endif %}"
    + TEMPLATE
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
SERVER: dict[str, Any] = {
    "tool_call_parser": "hermes",
    "chat_template": THINKING_TEMPLATE,
    "served_model_name": ["tiny"],
}


def save_thinking_chain(folder: Path) -> None:
    """Write the checkpoint."""
    save_chain(folder, [*byte_ids("t"), *ids(*_CHAIN)], max_position_embeddings=1024)
