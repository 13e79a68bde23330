"""The loop of `specdec chat`: read a message, answer it or run its command."""

import sys
from contextlib import suppress

import typer

from specdec.cli.chat_commands import run_command
from specdec.cli.conversation import Conversation
from specdec.cli.message_input import TerminalEntries, read_message
from specdec.cli.screen import DIM, OWN, Screen
from specdec.core.outputs import RequestOutput


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
