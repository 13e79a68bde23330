"""Compilations of grammars beside the engine's steps, each behind a trial in a process that is killed at its limits."""

import socket
import subprocess
import threading
from concurrent.futures import CancelledError, Future
from functools import partial
from multiprocessing.connection import Connection

from specdec.async_engine.client_threads import ClientThreads
from specdec.async_engine.grammar_trial import MEMORY, Answer
from specdec.core.started_module import start_module
from specdec.core.structured_outputs import StructuredOutputsParams
from specdec.kernels.types.settings import ParameterError
from specdec.models.grammar_compiler import GrammarCompiler
from specdec.verify.grammar_state import Grammar

NUM_THREADS = 2
# Seconds until a trial's process is ready; it imports the grammar library.
_STARTING = 60.0


class GrammarTrials:
    """Compiles grammars in threads, in which clients have turns. Each new form is tried out in a process before.

    The processes are started by the first forms, and again if they end.

    Args:
        timeout: seconds for one form.
    """

    def __init__(self, compiler: GrammarCompiler, timeout: float) -> None:
        self._compiler, self._timeout = compiler, timeout
        self._threads = ClientThreads(NUM_THREADS, "grammars")
        self._lock = threading.Lock()
        self._idle: list[_TrialProcess] = []
        self._running: set[_TrialProcess] = set()
        self._is_closed = False

    def submit(self, params: StructuredOutputsParams, client: str) -> Future[Grammar]:
        """Compile a form in a thread. A compilation that has not begun can be cancelled by its future."""
        return self._threads.submit(client, partial(self._compiled, params))

    def _compiled(self, params: StructuredOutputsParams) -> Grammar:
        if (grammar := self._compiler.known(params)) is not None:
            return grammar
        process = self._take()
        try:
            answer = process.answer(params, self._timeout)
        except (EOFError, ConnectionError):
            reason = f"its trial ended, by a fault or for want of memory (limit {MEMORY >> 20} MiB); make it smaller"
            raise ParameterError("structured_outputs", f"{params.shown_form} cannot be compiled: {reason}") from None
        finally:
            self._give_back(process)
        if answer is None:
            message = f"was not compiled within structured_compile_timeout, {self._timeout:g} seconds; make it smaller"
            message = f"{params.shown_form} {message}, or start the engine with a larger one"
            raise ParameterError("structured_outputs", message)
        source, problem = answer
        if problem is not None:
            raise ParameterError("structured_outputs", problem)
        return self._compiler.compile(params, source)

    def _take(self) -> "_TrialProcess":
        with self._lock:
            if self._is_closed:
                raise CancelledError
            while self._idle:
                process = self._idle.pop()
                if not process.has_ended:
                    break
                process.close()
            else:
                process = _TrialProcess(self._compiler)
            self._running.add(process)
            return process

    def _give_back(self, process: "_TrialProcess") -> None:
        with self._lock:
            self._running.remove(process)
            if process.is_idle and not self._is_closed:
                self._idle.append(process)
                return
        process.close()

    def close(self) -> None:
        """End all trials."""
        self._threads.close()
        with self._lock:
            self._is_closed = True
            processes, self._idle = self._idle, []
            # The threads wait for these.
            for process in self._running:
                process.popen.kill()
        for process in processes:
            process.close()


class _TrialProcess:
    """A running `specdec.async_engine.grammar_trial`, which is `popen`.

    Attributes:
        is_idle: whether it waits for a grammar.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.is_idle, self._compiler = False, compiler
        own, other = socket.socketpair()
        self._connection = Connection(own.detach())
        with other:
            number = other.fileno()
            self.popen: subprocess.Popen[bytes] = start_module(
                "specdec.async_engine.grammar_trial", str(number), pass_fds=[number], stdin=subprocess.PIPE
            )

    @property
    def has_ended(self) -> bool:
        """Return whether an idle process has ended. While idle it sends nothing, so only its end is readable."""
        return self._connection.poll()

    def answer(self, params: StructuredOutputsParams, timeout: float) -> Answer | None:
        """Return the answer about a form; None if there is none within the time.

        Raises:
            EOFError, ConnectionError: the process has ended.
        """
        if not self.is_idle:
            self._connection.send(self._compiler.token_texts)
            if self._received(_STARTING) is None:
                return None
        self._connection.send(params)
        return self._received(timeout)

    def _received(self, timeout: float) -> Answer | None:
        self.is_idle = False
        answer: Answer | None = self._connection.recv() if self._connection.poll(timeout) else None
        self.is_idle = answer is not None
        return answer

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.kill()
        self.popen.wait()
