"""Messages of several lines: how entries make them, and `specdec chat` in a terminal of its own."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from specdec import LLM, SamplingParams
from specdec.cli.chat_loop import MORE, PROMPT, read_message
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow

PASTE = "\x1b[200~{}\x1b[201~"
PASTED = "def f(a):\n    return a\n\n/reset"
# Seconds until the program has loaded its model, on a busy machine.
START = 120
SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["one"], "one"),
        (["one\ntwo"], "one\ntwo"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (["C:\\dir\\ "], "C:\\dir\\ "),
        (['"""one', "two", 'three"""'], "one\ntwo\nthree"),
        (['"""', "one\\", "/exit", '"""'], "\none\\\n/exit\n"),
        (['"""one"""'], "one"),
        (['"""one\ntwo"""'], "one\ntwo"),
        # A pasted program, by itself and in quotation marks.
        (['"""Doc."""\nimport os\n'], '"""Doc."""\nimport os\n'),
        (['"""Doc."""\nimport os\n"""Doc."""'], '"""Doc."""\nimport os\n"""Doc."""'),
        (['"""', 'def f():\n    """Doc."""\n    return', '"""'], '\ndef f():\n    """Doc."""\n    return\n'),
        (['one """two', "three"], 'one """two'),
    ],
)
def test_entries_of_one_message(entries: Sequence[str], message: str) -> None:
    left, prompts = list(entries), []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        return left.pop(0)

    assert read_message(read) == message
    num_read = len(entries) - len(left)
    assert prompts == [PROMPT, *[MORE] * (num_read - 1)]
    assert num_read == (1 if entries[0] == 'one """two' else len(entries))


class Keyboard:
    """A terminal of a running program: types, and waits for output.

    Attributes:
        output: all of it so far, without control sequences and carriage returns.
    """

    def __init__(self, terminal: int) -> None:
        self._terminal, self.output = terminal, ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the output has the text so many times."""
        ends = time.monotonic() + START
        while self.output.count(text) < count:
            assert time.monotonic() < ends, self.output
            if select.select([self._terminal], [], [], 1)[0]:
                self.output += SEQUENCE.sub("", os.read(self._terminal, 65536).decode(errors="replace")).replace(
                    "\r", ""
                )


@contextmanager
def chat_in_a_terminal(tiny: Tiny, **environment: str) -> Iterator[tuple[Keyboard, subprocess.Popen[bytes]]]:
    """Run `specdec chat` in a terminal of its own."""
    fixed = ["--model", str(tiny.target), "--draft", str(tiny.head), "--dtype", "float64", "--device", "cpu"]
    fixed += ["--fixed-drafts", "--prefill-stretch", "0", "--max-tokens", "12", "--ignore-eos"]
    outer, inner = pty.openpty()
    own = {name: text for name, text in os.environ.items() if not name.startswith(("SPECDEC_", "PYTHONIOENCODING"))}
    command = [sys.executable, "-m", "specdec", "chat", *fixed]
    environment = {**own, "TERM": "xterm", "NO_COLOR": "1", **environment}
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment) as process:
        os.close(inner)
        try:
            yield Keyboard(outer), process
        finally:
            process.kill()
            os.close(outer)


@pytest.mark.long
def test_a_pasted_text_is_one_message(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(tiny.target, draft=None, dtype="float64", device="cpu", prefill_stretch=0)
    messages = [{"role": "user", "content": PASTED}]
    first = llm.chat(messages, params)[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "a\nb"}]
    second = llm.chat(messages, params)[0].text
    with chat_in_a_terminal(tiny) as (keyboard, process):
        keyboard.wait_for("ends an answer, Ctrl-D the chat.")
        # Terminals send a carriage return for each line.
        keyboard.type(PASTE.format(PASTED.replace("\n", "\r")))
        keyboard.type("\r")
        keyboard.wait_for("[cut at --max-tokens 12]")
        assert f"{first}\n" in keyboard.output
        # Pasted while an answer may still run.
        keyboard.type(PASTE.format("a\nb") + "\r")
        keyboard.wait_for("[cut at --max-tokens 12]", 2)
        assert f"{second}\n" in keyboard.output
        keyboard.type("/stats\r")
        keyboard.wait_for("seed  ")
        assert re.search(r"all answers +24 tokens, .*; 2 of 2 cut at --max-tokens 12\n", keyboard.output)
        keyboard.type("/exit\r")
        assert process.wait(START) == 0


@pytest.mark.long
def test_a_chat_in_a_locale_with_few_characters(tiny: Tiny) -> None:
    """Trees have ASCII lines, and what the encoding lacks does not end the chat."""
    with chat_in_a_terminal(tiny, PYTHONIOENCODING="latin-1") as (keyboard, process):
        keyboard.wait_for("ends an answer, Ctrl-D the chat.")
        keyboard.type("Hello\r")
        keyboard.wait_for("[cut at --max-tokens 12]")
        keyboard.type("/tree\r")
        keyboard.wait_for("<- the target's own")
        assert re.search(r"\n(\+--|`--) '", keyboard.output)
        keyboard.type("/\N{SNOWMAN}\r")
        keyboard.wait_for("unknown command")
        keyboard.type("/exit\r")
        assert process.wait(START) == 0
        assert "Traceback" not in keyboard.output
