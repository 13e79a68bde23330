"""Compilations of grammars beside the engine's steps: several at once, each with limits, each can be cancelled."""

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from specdec.async_engine.compile_messages import CompileSetup, Refusal, send_end
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.models.grammar_source import GrammarSource

# Compilations at once. Further ones wait.
NUM_LANES = 4
# Bytes that one compilation may allocate.
MEMORY = 1 << 30
# Most characters of a compiled grammar that other ranks read, within a step.
MOST_TEXT = 32 << 20

logger = logging.getLogger(__name__)
T = TypeVar("T")


class CancelledCompilation(Exception):
    """The request that the grammar was compiled for has been aborted."""


class Compilation(Generic[T]):
    """One request's compilation, and what is made with its grammar.

    Attributes:
        future: what `CompileLanes.submit` was asked to make.
        pid: the process that tries the grammar out, None before and after.
    """

    def __init__(self) -> None:
        self.future: Future[T] = Future()
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

    def tried(self, connection: Connection, params: StructuredOutputsParams, timeout: float) -> GrammarSource:
        """Have a form tried out.

        Args:
            connection: to a process that is started.

        Raises:
            ValueError: no grammar, or one that exceeds a limit.
            CancelledCompilation: it was cancelled.
            EOFError: the process could not be started.
        """
        pid = connection.recv()
        with self._lock:
            self.pid = pid
            if self._is_cancelled:
                self._kill()
        try:
            with suppress(BrokenPipeError):
                connection.send(params)
            if not connection.poll(timeout):
                with self._lock:
                    self._kill()
                raise ValueError(
                    f"structured_outputs.{params.form} was not compiled within structured_compile_timeout, "
                    f"{timeout:g} seconds; make it smaller, or start the engine with a larger one"
                )
            answer = connection.recv()
        except (EOFError, ConnectionError):
            self.check()
            raise ValueError(
                f"structured_outputs.{params.form} cannot be compiled: its process ended, by a fault or for want of "
                f"memory (limit {MEMORY >> 20} MiB); make it smaller"
            ) from None
        finally:
            with self._lock:
                self.pid = None
        if isinstance(answer, Refusal):
            raise ValueError(answer.reason)
        assert isinstance(answer, GrammarSource)
        return answer


class CompileLanes:
    """Compiles grammars in threads. Each new form is tried out in a process before.

    What ends there within the limits is compiled again in this process: a compiled grammar cannot be handed over in
    less time. The compile process is started by the first form, and again if it ends.

    Args:
        timeout: seconds for one form.
    """

    def __init__(self, compiler: GrammarCompiler, timeout: float) -> None:
        self._compiler, self._timeout = compiler, timeout
        self._threads = ThreadPoolExecutor(NUM_LANES, "grammars")
        self._lock = threading.Lock()
        self._process: _CompileProcess | None = None

    def submit(self, params: StructuredOutputsParams, make: Callable[[], T]) -> Compilation[T]:
        """Compile a form, and run `make` with its grammar compiled."""
        compilation = Compilation[T]()
        self._threads.submit(self._run, compilation, params, make)
        return compilation

    def _run(self, compilation: Compilation[T], params: StructuredOutputsParams, make: Callable[[], T]) -> None:
        try:
            compilation.check()
            if self._compiler.known(params) is None:
                source = self._tried(compilation, params)
                self._compiler.compile(params, source)
            compilation.check()
            compilation.future.set_result(make())
        except Exception as error:
            compilation.future.set_exception(error)

    def _tried(self, compilation: Compilation[T], params: StructuredOutputsParams) -> GrammarSource:
        try:
            with self._connection() as connection:
                return compilation.tried(connection, params, self._timeout)
        except (EOFError, OSError):
            logger.warning("the compile process of structured outputs has ended; it is started again")
        try:
            with self._connection() as connection:
                return compilation.tried(connection, params, self._timeout)
        except (EOFError, OSError):
            raise RuntimeError("the compile process of structured outputs does not start") from None

    def _connection(self) -> Connection:
        """Return a connection to a new process for one form."""
        with self._lock:
            if self._process is None or not self._process.is_running:
                seconds = 1 + math.ceil(self._timeout)
                tokens = self._compiler.tokens.serialize_json()
                most_text = MOST_TEXT if self._compiler.is_shared else None
                self._process = _CompileProcess(CompileSetup(tokens, MEMORY, seconds, most_text))
            return send_end(self._process.control)

    def close(self) -> None:
        """End all compilations."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            if self._process is not None:
                self._process.close()


class _CompileProcess:
    """A running `specdec.async_engine.compile_process`."""

    def __init__(self, setup: CompileSetup) -> None:
        self.control, other = socket.socketpair()
        modules = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with other:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "specdec.async_engine.compile_process", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "PYTHONPATH": modules},
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        with send_end(self.control) as connection, suppress(BrokenPipeError):
            connection.send(setup)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def close(self) -> None:
        """End the process, and those of running compilations with it."""
        self.control.close()
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
