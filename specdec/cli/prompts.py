"""Prompts of a command: its argument, standard input, or a JSONL file."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.kernels.settings import check_text

if TYPE_CHECKING:
    from specdec.llm import LLM


class GivenPrompt(NamedTuple):
    """A prompt as the user gave it.

    Attributes:
        text: the prompt's text; of a conversation, its last message.
        messages: the conversation, None for plain text.
    """

    text: str
    messages: list[dict[str, str]] | None = None

    def for_engine(self, llm: "LLM", chat: bool | None) -> str | list[int]:
        """Return the prompt as `llm` takes it.

        Args:
            chat: whether plain text goes through the chat template; None if there is one.

        Raises:
            ValueError: the chat template is needed but missing.
        """
        if chat is None:
            chat = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        if self.messages is None and not chat:
            return self.text
        return llm.chat_prompt(self.messages or [{"role": "user", "content": self.text}])


def read_prompts(argument: str | None, file: Path | None, raw: bool) -> list[GivenPrompt]:
    """Read the prompts; at least one, none empty.

    Args:
        argument: the prompt itself, "-" for standard input, None if it was left out.
        file: JSONL with `prompt`, `messages` or `turns` in each line.
        raw: refuse conversations, because they need a chat template.

    Raises:
        ValueError: no usable prompt; names the place and the remedy.
    """
    if file is not None:
        if argument is not None:
            raise ValueError(f"the prompt {argument!r} and --prompts {file} exclude each other; give one of them")
        return _read_file(file, raw)
    if argument is None and sys.stdin.isatty():
        raise ValueError("no prompt; give it as an argument, on standard input, or with --prompts FILE")
    if argument is None or argument == "-":
        try:
            text, place = sys.stdin.read().removesuffix("\n"), "standard input"
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input: not UTF-8 text: {error}") from None
    else:
        text, place = argument, f"the prompt {argument!r}"
    if not text.strip():
        raise ValueError(f"{place} is empty; give a prompt of at least one word")
    check_text("the prompt", text)
    return [GivenPrompt(text)]


def _read_file(file: Path, raw: bool) -> list[GivenPrompt]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"--prompts {file}: no such file") from None
    except OSError as error:
        raise ValueError(f"--prompts {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {file}: not UTF-8 text: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_parse(line, raw))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"--prompts {file}: the file is empty; give one JSON object a line")
    return prompts


def _parse(line: str, raw: bool) -> GivenPrompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a prompt: brackets nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError('not a JSON object; write it as {"prompt": "..."}')
    messages = None
    if "prompt" in value:
        text = value["prompt"]
        if not isinstance(text, str):
            raise ValueError(f"prompt is {text!r}; it must be a string")
    elif "messages" in value:
        if raw:
            raise ValueError("messages need the chat template; leave out --raw, or give prompt")
        messages = _messages(value["messages"])
        text = messages[-1]["content"]
    elif "turns" in value:
        turns = value["turns"]
        if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
            raise ValueError(f"turns is {turns!r}; it must be a list of strings")
        text = turns[0]
    else:
        raise ValueError("neither prompt nor messages nor turns; give one of them")
    if not text.strip():
        raise ValueError("the prompt is empty; give at least one word")
    for each in [text, *(part for message in messages or () for part in message.values())]:
        check_text("the prompt", each)
    return GivenPrompt(text, messages)


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages is {value!r}; it must be a list of at least one message")
    for message in value:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"message {message!r} must be an object with the strings role and content")
    return [{"role": message["role"], "content": message["content"]} for message in value]
