"""Prompts of a command: its argument, standard input, or a JSONL file."""

import sys
from pathlib import Path

from specdec.bench.prompt_file import GivenPrompt, read_prompt_file
from specdec.kernels.types.settings import check_text


def read_prompts(argument: str | None, file: Path | None, raw: bool) -> list[GivenPrompt]:
    """Read the prompts; at least one, none empty.

    Args:
        argument: the prompt itself, "-" for standard input, None if it was left out.
        file: JSONL with `prompt`, `messages`, `conversation` or `turns` in each line.
        raw: refuse conversations, because they need a chat template.

    Raises:
        ValueError: no usable prompt; names the place and the remedy.
    """
    if file is not None:
        if argument is not None:
            raise ValueError(f"the prompt {argument!r} and --prompts {file} exclude each other; give one of them")
        return read_prompt_file(file, raw, "--prompts")
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
