"""Messages between an engine process and its compile process, over a connection for each compilation."""

import socket
from multiprocessing.connection import Connection
from typing import NamedTuple

from specdec.models.grammar_source import GrammarSource


class CompileSetup(NamedTuple):
    """Tokens and limits of all compilations.

    Attributes:
        tokens: the model's tokens, as xgrammar's JSON.
        memory: most bytes that one compilation allocates.
        seconds: most processor time of one.
        most_text: most characters of a compiled grammar as text, which other ranks read; None if there are none.
    """

    tokens: str
    memory: int
    seconds: int
    most_text: int | None


class Refusal(NamedTuple):
    """A form that cannot be followed.

    Attributes:
        reason: one line.
    """

    reason: str


Answer = GrammarSource | Refusal


def send_end(control: socket.socket) -> Connection:
    """Return a connection whose other end goes to the compile process.

    Raises:
        OSError: the process has ended.
    """
    mine, other = socket.socketpair()
    with other:
        socket.send_fds(control, [b"."], [other.fileno()])
    return Connection(mine.detach())


def receive_end(control: socket.socket) -> Connection | None:
    """Return the next connection; None at the end of the engine process."""
    _, ends, _, _ = socket.recv_fds(control, 1, 1)
    return Connection(ends[0]) if ends else None
