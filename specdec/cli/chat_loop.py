"""The loop of `specdec chat`: read a message as it is typed, answer it or run its command."""

import sys
from collections.abc import Callable
from contextlib import suppress

import typer
from prompt_toolkit import PromptSession
from prompt_toolkit.input import create_input
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

from specdec.cli.chat_commands import run_command
from specdec.cli.conversation import Conversation
from specdec.cli.screen import DIM, OWN, Screen
from specdec.core.outputs import RequestOutput

PROMPT, MORE = "> ", "... "
BRACKET = '"""'


class TerminalEntries:
    """Entries of a terminal, each ended by Enter, with line editing and the entries before by the arrow keys.

    A text that the terminal pastes is part of one entry, whatever lines it has. A terminal marks such a text where a
    program asks it to (bracketed paste). Python's `readline` leaves lines apart where it stands on libedit.
    """

    def __init__(self) -> None:
        self._output = create_output(always_prefer_tty=True)
        if isinstance(self._output, Vt100_Output):
            # The terminal's answer to a question for the cursor would be waited for, and be read as typed text.
            self._output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            input=create_input(sys.stdin), output=self._output, reserve_space_for_menu=0, enable_suspend=True
        )

    def read(self, prompt: str) -> str:
        """Return the next entry.

        Raises:
            EOFError: Ctrl-D, or there is none.
            KeyboardInterrupt: Ctrl-C.
        """
        entry = self._session.prompt(prompt, prompt_continuation=MORE)
        # So that what is pasted while an answer runs stays one entry too.
        self._output.enable_bracketed_paste()
        self._output.flush()
        return entry

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._output.disable_bracketed_paste()
        self._output.flush()


def read_message(read: Callable[[str], str]) -> str:
    r"""Return the next message or command.

    An entry that ends with a backslash goes on in the next line. One that begins with three quotation marks goes on up
    to the entry that ends with them. Quotation marks in pairs, as in a pasted program, are left as they are.

    Args:
        read: returns an entry, and takes the prompt that stands before it.
    """
    entry = read(PROMPT)
    if entry.startswith(BRACKET):
        if entry.count(BRACKET) % 2:
            return _read_to_bracket(read, entry.removeprefix(BRACKET))
        if entry.count(BRACKET) == 2 and entry.endswith(BRACKET):
            return entry[len(BRACKET) : -len(BRACKET)]
    lines = [entry]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read(MORE))
    return "\n".join(lines)


def _read_to_bracket(read: Callable[[str], str], first: str) -> str:
    lines = [first]
    while not lines[-1].endswith(BRACKET):
        lines.append(read(MORE))
    return "\n".join(lines).removesuffix(BRACKET)


class ChatLoop:
    """Reads standard input to its end, or to `/exit`.

    On a terminal, a message may have several lines, and Ctrl-C ends an answer and not the chat. Piped input gets an
    answer for each line, and answers and the output of commands alone, without colours; Ctrl-C ends the command.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._is_interactive = sys.stdin.isatty()
        self._screen = Screen(is_plain=not self._is_interactive)
        self._num_failed = 0
        self._entries: TerminalEntries | None = None

    def run(self) -> int:
        """Return the exit code: 1 if a line of piped input failed.

        Raises:
            KeyboardInterrupt: Ctrl-C while piped input is answered.
            ValueError: input that is no text.
        """
        if self._is_interactive:
            if self._conversation.llm.config.sources is not None:
                self._screen.write_legend()
            several = 'A line that ends with \\ goes on; """ begins and ends several lines.'
            self._note(f"/help lists the commands. {several} Ctrl-C ends an answer, Ctrl-D the chat.\n")
            self._entries = TerminalEntries()
        try:
            with suppress(EOFError):
                while True:
                    self._handle(self._read())
        finally:
            if self._entries is not None:
                self._entries.close()
        return 0 if self._is_interactive or not self._num_failed else 1

    def _read(self) -> str:
        """Return the next line, or of a terminal the next message.

        Raises:
            EOFError: there is none.
        """
        while True:
            try:
                return input() if self._entries is None else read_message(self._entries.read)
            except UnicodeDecodeError as error:
                raise ValueError(f"standard input: not UTF-8 text: {error}") from None
            except EOFError:
                self._note("")
                raise
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                self._note("\nCtrl-D or /exit ends the chat.")

    def _handle(self, text: str) -> None:
        """Answer a message or run a command, which is one line. An error is printed as one line."""
        try:
            if text.startswith("/") and "\n" not in text:
                if done := run_command(text, self._conversation, self._screen):
                    self._note(done)
            elif text.strip():
                # The indentation of the first of several lines is part of them.
                self._answer(text.strip("\n").rstrip() if "\n" in text else text.strip())
        except ValueError as error:
            self._num_failed += 1
            typer.echo(f"specdec: {error}", err=True)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            self._note("")

    def _answer(self, text: str) -> None:
        try:
            batch = self._conversation.answer(text, self._show)
        finally:
            self._screen.write(("\n", OWN))
        if batch.interrupted and not self._is_interactive:
            raise KeyboardInterrupt
        note = "interrupted" if batch.interrupted else batch.answers[0].cut
        self._note(f"[{note}]\n" if note else "")

    def _show(self, output: RequestOutput) -> None:
        thinking = self._conversation.thinking
        if thinking is None:
            self._screen.write_segments(output.segments)
            return
        for segment in output.segments:
            self._screen.write_items(thinking.push(segment.text), segment.accepted, self._is_interactive)
        if output.finished:
            self._screen.write_items(thinking.finish(), False, self._is_interactive)

    def _note(self, text: str) -> None:
        """Write a line for people, and nothing for programs."""
        if self._is_interactive:
            self._screen.write((f"{text}\n", DIM))
