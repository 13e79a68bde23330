"""Compilations of grammars beside the engine's steps: several at once, each with limits, each can be cancelled.

Clients have turns, and forms that take long do not keep others waiting.
"""

import logging
import math
import os
import signal
import socket
import subprocess
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from specdec.async_engine.client_threads import ClientThreads
from specdec.async_engine.compile_messages import CompileSetup, Refusal, send_end
from specdec.core.started_module import start_module
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.kernels.types.settings import ParameterError
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.grammar_source import GrammarSource
from specdec.verify.grammar_state import Grammar

# Lanes in which a new form may take `QUICK` seconds, and lanes for forms that have taken longer.
NUM_QUICK, NUM_LONG = 2, 2
QUICK = 0.25
# Bytes that one compilation may allocate.
MEMORY = 1 << 30
# Most characters of a compiled grammar that other ranks read, within a step.
MOST_TEXT = 32 << 20

# Seconds that the system takes to end a process whose files are closed, at most.
_ENDING = 5.0

# The parameter that is wrong if a form cannot be compiled.
_FIELD = "structured_outputs"
logger = logging.getLogger(__name__)


class CancelledCompilation(Exception):
    """The request that the grammar was compiled for has been aborted."""


class Compilation:
    """One request's compilation.

    Args:
        client: the client whose request it is.

    Attributes:
        future: the grammar.
        pid: the process that tries the form out, None before and after.
    """

    def __init__(self, params: StructuredOutputsParams, client: str) -> None:
        self.params, self.client = params, client
        self.future: Future[Grammar] = Future()
        self.pid: int | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False

    def cancel(self) -> None:
        """End it. Its process is killed at once."""
        with self._lock:
            self._is_cancelled = True
            self._kill()

    def _kill(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def check(self) -> None:
        """Raise an error once it is cancelled."""
        if self._is_cancelled:
            raise CancelledCompilation

    def tried(self, connection: Connection, timeout: float) -> GrammarSource | None:
        """Have the form tried out.

        Args:
            connection: to a process that is started.

        Returns:
            None if it took longer.

        Raises:
            ValueError: no grammar, or one that exceeds a limit.
            CancelledCompilation: it was cancelled.
            EOFError: the process could not be started.
        """
        form, pid = self.params.shown_form, connection.recv()
        with self._lock:
            self.pid = pid
            if self._is_cancelled:
                self._kill()
        try:
            with suppress(BrokenPipeError):
                connection.send(self.params)
            if not connection.poll(timeout):
                with self._lock:
                    self._kill()
                return None
            answer = connection.recv()
        except (EOFError, ConnectionError):
            self.check()
            raise ParameterError(
                _FIELD,
                f"{form} cannot be compiled: its process ended, by a fault or for want of memory "
                f"(limit {MEMORY >> 20} MiB); make it smaller",
            ) from None
        finally:
            with self._lock:
                self.pid = None
        if isinstance(answer, Refusal):
            raise ParameterError(_FIELD, answer.reason)
        assert isinstance(answer, GrammarSource)
        return answer


class CompileLanes:
    """Compiles grammars in threads. Each new form is tried out in a process before.

    What ends there within the limits is compiled again in this process: a compiled grammar cannot be handed over in
    less time. The compile process is started by the first form, and again if it ends. A form that takes longer than
    `QUICK` seconds begins anew in another lane.

    Args:
        timeout: seconds for one form.
    """

    def __init__(self, compiler: GrammarCompiler, timeout: float) -> None:
        self._compiler, self._timeout = compiler, timeout
        self._quick, self._long = ClientThreads(NUM_QUICK, "grammars"), ClientThreads(NUM_LONG, "large grammars")
        self._lock = threading.Lock()
        self._process: _CompileProcess | None = None

    def submit(self, params: StructuredOutputsParams, client: str) -> Compilation:
        """Compile a form."""
        compilation = Compilation(params, client)
        self._quick.submit(client, partial(self._run, compilation, min(QUICK, self._timeout)))
        return compilation

    def _run(self, compilation: Compilation, timeout: float) -> None:
        try:
            compilation.check()
            grammar = self._compiler.known(compilation.params)
            if grammar is None:
                source = self._tried(compilation, timeout)
                if source is None and timeout < self._timeout:
                    self._long.submit(compilation.client, partial(self._run, compilation, self._timeout))
                    return
                if source is None:
                    raise ParameterError(
                        _FIELD,
                        f"{compilation.params.shown_form} was not compiled within "
                        f"structured_compile_timeout, {timeout:g} seconds; make it smaller, or start the engine with a "
                        "larger one",
                    )
                grammar = self._compiler.compile(compilation.params, source)
            compilation.check()
            compilation.future.set_result(grammar)
        except Exception as error:
            compilation.future.set_exception(error)

    def _tried(self, compilation: Compilation, timeout: float) -> GrammarSource | None:
        for _ in range(2):
            process = self._running()
            try:
                with send_end(process.control) as connection:
                    return compilation.tried(connection, timeout)
            except (EOFError, OSError):
                logger.warning("the compile process of structured outputs has ended")
                process.wait()
        raise RuntimeError("the compile process of structured outputs does not start")

    def _running(self) -> "_CompileProcess":
        """Return the compile process, a new one if it has ended."""
        with self._lock:
            if self._process is None or not self._process.is_running:
                seconds = 1 + math.ceil(self._timeout)
                tokens = self._compiler.tokens.serialize_json()
                most_text = MOST_TEXT if self._compiler.is_shared else None
                self._process = _CompileProcess(CompileSetup(tokens, MEMORY, seconds, most_text))
            return self._process

    def close(self) -> None:
        """End all compilations."""
        self._quick.close()
        self._long.close()
        with self._lock:
            if self._process is not None:
                self._process.close()


class _CompileProcess:
    """A running `specdec.async_engine.compile_process`, which is `popen`."""

    def __init__(self, setup: CompileSetup) -> None:
        self.control, other = socket.socketpair()
        with other:
            number = other.fileno()
            self.popen = start_module("specdec.async_engine.compile_process", str(number), pass_fds=[number])
        with send_end(self.control) as connection, suppress(BrokenPipeError):
            connection.send(setup)

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def wait(self) -> None:
        """Wait until a process whose files are closed can be seen to have ended."""
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_ENDING)

    def close(self) -> None:
        """End the process, and those of running compilations with it."""
        self.control.close()
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
