"""The compile process: `python -m specdec.async_engine.compile_process FD`. It tries grammars out beside the engine.

It has imported what a compilation needs, and forks a process for each, which can be killed at any moment and has limits
of memory and time. What is sent back is the grammar's text, not the compiled grammar: xgrammar (0.2.8) writes all
states once per rule, which takes far longer than to compile it again.
"""

import gc
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from specdec.async_engine.compile_messages import Answer, CompileSetup, Refusal, receive_end
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.models.grammar_source import grammar_source, one_line_errors

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

# Priority of compilations: the engine's steps go first.
_NICENESS = 4


def _limit(setup: CompileSetup) -> None:
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (setup.seconds, setup.seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/status") as status:
            (taken,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
        most = taken + setup.memory
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _answer(params: StructuredOutputsParams, tokens: "TokenizerInfo", setup: CompileSetup) -> Answer:
    most = setup.most_text
    try:
        source = grammar_source(params)
        with one_line_errors(params):
            # One thread: where memory runs out, an error of another one ends the process.
            compiled = source.compiled(tokens, 1)
            if most is not None and (size := len(compiled.serialize_json())) > most:
                remedy = f"with several ranks at most {most} are supported; make it smaller"
                return Refusal(f"{params.shown_form} has {size} bytes when it is compiled; {remedy}")
    except (ValueError, MemoryError) as error:
        if isinstance(error, MemoryError) or "std::bad_alloc" in str(error):
            needs = f"needs more than {setup.memory >> 20} MiB of memory to be compiled"
            return Refusal(f"{params.shown_form} {needs}; make it smaller")
        return Refusal(str(error))
    return source


def _serve(connection: Connection, tokens: "TokenizerInfo", setup: CompileSetup) -> None:
    """Answer one request."""
    connection.send(os.getpid())
    params = connection.recv()
    _limit(setup)
    connection.send(_answer(params, tokens, setup))


def main() -> None:
    """Serve until the engine process has ended; end all compilations then."""
    # A service manager sends it to all processes, and the engine may have requests to finish.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    connection = receive_end(control)
    assert connection is not None
    setup: CompileSetup = connection.recv()
    from xgrammar import TokenizerInfo

    tokens = TokenizerInfo.deserialize_json(setup.tokens)
    gc.freeze()
    # Compilations that have ended leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while (connection := receive_end(control)) is not None:
        if os.fork() == 0:
            code = 1
            try:
                control.close()
                _serve(connection, tokens, setup)
                code = 0
            finally:
                os._exit(code)
        connection.close()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
