"""Prompts of a JSONL file: the formats of `specdec generate`, of chat data, of Spec-Bench, and of SPEED-Bench."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.llama.unreadable_files import missing_path
from specdec.kernels.types.settings import ParameterError, check_text

if TYPE_CHECKING:
    from specdec.llm import LLM


# What stands for texts in SPEED-Bench as it is downloaded; NVIDIA's script fetches them from their sources.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"


class GivenPrompt(NamedTuple):
    """A prompt as the user gave it.

    Attributes:
        text: the prompt's text; of a conversation, its last message.
        messages: the conversation, None for plain text.
        category: its kind of text, for figures per category; empty if none is given.
        place: file and line; empty for none.
    """

    text: str
    messages: list[dict[str, str]] | None = None
    category: str = ""
    place: str = ""

    def for_engine(self, llm: "LLM", chat: bool | None, params: SamplingParams) -> list[int]:
        """Return the prompt's tokens, which `llm` takes with these parameters.

        Args:
            chat: whether plain text goes through the chat template; None if there is one.

        Raises:
            ValueError: the chat template is needed but missing, or the engine refuses the prompt; names the place.
        """
        if chat is None:
            chat = llm.tokenizer is not None and llm.tokenizer.has_chat_template
        given: str | list[int] = self.text
        try:
            if self.messages is not None or chat:
                given = llm.chat_prompt(self.messages or [{"role": "user", "content": self.text}])
            return llm.request_maker.add(given, params).prompt
        except ValueError as error:
            # Of the parameters, no line is the cause.
            is_own = not isinstance(error, ParameterError) or error.field == "prompt"
            raise ValueError(f"{self.place}: {error}" if self.place and is_own else str(error)) from None


def read_prompt_file(
    file: Path, raw: bool, option: str, known: Sequence[str] = (), *, is_dataset: bool = False
) -> list[GivenPrompt]:
    """Read the prompts of a file; at least one, none empty.

    Args:
        file: JSONL with `prompt`, `messages`, `conversation` or `turns` in each line; `category` is optional. Of
            `turns` the first is taken.
        raw: refuse conversations, because they need a chat template.
        option: the command's option that names the file.
        known: words that the option takes in place of a file.
        is_dataset: whether messages that are all a user's are turns, as in SPEED-Bench, of which the first is taken.

    Raises:
        ValueError: no usable prompt; names the place and the remedy.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise ValueError(f"{option} {missing_path(file, 'file', known)}") from None
    except OSError as error:
        raise ValueError(f"{option} {file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {file}: not UTF-8 text: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_parse(line, raw, is_dataset)._replace(place=f"{file}, line {number}"))
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{option} {file}: the file is empty; give one JSON object a line")
    return prompts


def _parse(line: str, raw: bool, is_dataset: bool) -> GivenPrompt:
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
    elif key := next((key for key in ("messages", "conversation") if key in value), None):
        if raw:
            raise ValueError("messages need the chat template; leave out --raw, or give prompt")
        messages = _messages(key, value[key])
        if is_dataset and all(message["role"] == "user" for message in messages):
            messages = messages[:1]
        text = messages[-1]["content"]
    elif "turns" in value:
        turns = value["turns"]
        if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
            raise ValueError(f"turns is {turns!r}; it must be a list of strings")
        text = turns[0]
    else:
        raise ValueError("neither prompt nor messages nor turns nor conversation; give one of them")
    if not text.strip():
        raise ValueError("the prompt is empty; give at least one word")
    if text.startswith(PLACEHOLDER):
        raise ValueError("the prompt is a placeholder of SPEED-Bench; write the texts with NVIDIA's prepare.py first")
    for each in [text, *(part for message in messages or () for part in message.values())]:
        check_text("the prompt", each)
    return GivenPrompt(text, messages, str(value.get("category") or ""))


def _messages(key: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is {value!r}; it must be a list of at least one message")
    for message in value:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"message {message!r} must be an object with the strings role and content")
    return [{"role": message["role"], "content": message["content"]} for message in value]
