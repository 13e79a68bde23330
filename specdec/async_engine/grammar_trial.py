"""The process of trials, `python -m specdec.async_engine.grammar_trial FD`: it compiles the grammars that it is sent.

What llguidance (1.9) does with a grammar has limits, but some escape them, and one may end the process.
"""

import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.models.grammar_source import grammar_source
from specdec.verify.grammar_state import Grammar, GrammarError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Priority of trials: the engine's steps go first.
_NICENESS = 4
# Bytes that one trial may allocate.
MEMORY = 1 << 30
# The grammar of a form, and why it has none; neither when the process is ready.
Answer = tuple[str | None, str | None]


def _limit() -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            (taken,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
        most = taken + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _answer(params: StructuredOutputsParams, tokens: "LLTokenizer") -> Answer:
    try:
        source = grammar_source(params)
    except ValueError as error:
        return None, str(error)
    # The engine process finds the same error.
    with suppress(GrammarError):
        Grammar(source, tokens)
    return source, None


def _end_with_engine() -> None:
    """Wait until the engine process has ended, and its end of the pipe with it; a trial may go on for ever."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve until the engine process has ended."""
    # A service manager sends it to all processes, and the engine may have requests to finish.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_engine, daemon=True).start()
    connection = Connection(socket.socket(fileno=int(sys.argv[1])).detach())
    tokens = connection.recv().library_tokens()
    _limit()
    answer: Answer = None, None
    try:
        while True:
            connection.send(answer)
            answer = _answer(connection.recv(), tokens)
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
