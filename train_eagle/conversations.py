"""Conversations from JSONL, as tokens with a mask of what the assistant said."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


class Sample(NamedTuple):
    """A tokenised conversation.

    Attributes:
        token_ids: the conversation through the chat template.
        mask: per token, whether the assistant said it, end token included.
    """

    token_ids: list[int]
    mask: list[bool]


def read_conversations(files: Sequence[Path], limit: int | None = None) -> list[list[Message]]:
    """The `messages` of each line, in the order of the files, at most `limit` of each.

    Raises:
        ValueError: a line that is no JSON object with messages; names file and line.
    """
    conversations: list[list[Message]] = []
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and number > limit:
                    break
                try:
                    conversations.append(json.loads(line)["messages"])
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f"{file}, line {number}: not a JSON object with 'messages'") from None
    return conversations


def write_conversations(file: Path, conversations: Sequence[Sequence[Message]]) -> None:
    """One `{"messages": [...]}` a line."""
    with file.open("a", encoding="utf-8") as lines:
        for messages in conversations:
            lines.write(json.dumps({"messages": list(messages)}, ensure_ascii=False) + "\n")


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], max_length: int) -> Sample:
    """Tokens and mask of a conversation, cut after `max_length` tokens.

    Raises:
        ValueError: the chat template marks no assistant text with `{% generation %}`.
    """
    encoded = tokenizer.apply_chat_template(list(messages), return_dict=True, return_assistant_tokens_mask=True)
    token_ids, mask = encoded["input_ids"][:max_length], encoded["assistant_masks"]
    if not any(mask) and any(message["role"] == "assistant" for message in messages):
        raise ValueError("the chat template marks no assistant text; wrap it in {% generation %} … {% endgeneration %}")
    return Sample(list(token_ids), [bool(bit) for bit in mask[:max_length]])
