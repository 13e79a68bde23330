"""Messages that are typed in a terminal: a line, a pasted text, or several lines that belong together."""

import sys
from collections.abc import Callable

from prompt_toolkit import PromptSession
from prompt_toolkit.input import create_input
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output

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
