"""A run of a program: executes what its branches append, each in its order, all beside each other."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from specdec.programs.backend import Backend, Generated, Selected, closed_error
from specdec.programs.expressions import Gen, Operation, RoleBegin, RoleEnd, Select
from specdec.programs.text_stream import TextPieces
from specdec.programs.transcript import Transcript

T = TypeVar("T")


class Variable(NamedTuple):
    """A variable's text.

    Attributes:
        info: how it came about; None where the program set it.
    """

    text: str
    info: Generated | Selected | None


class Run:
    """The operations of all branches of one program.

    Args:
        defaults: sampling parameters of each `gen` that gives none.

    Attributes:
        has_returned: whether the program's function appends nothing more.
        thread: the one in which the function runs; None before it does.
        changed: notified of new text, and where streams of text may have ended.
    """

    def __init__(self, backend: Backend, defaults: Mapping[str, Any]) -> None:
        self.backend, self.defaults = backend, defaults
        self.has_returned = False
        self.thread: threading.Thread | None = None
        self.changed = threading.Condition()
        # Ends of transcripts. One that another continues is left out: its text would stay in memory, and the other one
        # has its error.
        self._tails: dict[Future[Transcript], None] = {}
        # Errors that the program has met. The list keeps them, so that no other one gets their identity.
        self._raised: list[BaseException] = []

    def appends_nothing_more(self) -> bool:
        """Return whether the function has returned or waits for the caller, which it has called itself."""
        return self.has_returned or threading.current_thread() is self.thread

    def append(
        self,
        tail: "Future[Transcript]",
        operations: Sequence[Operation],
        results: "Sequence[Future[Variable]]",
        stream: TextPieces,
    ) -> "Future[Transcript]":
        """Execute operations behind a transcript; return the transcript with them.

        Args:
            results: take the variables of `Gen` and `Select`, in order.
            stream: takes the text.
        """
        new = self.backend.loop.submit(self._execute(tail, operations, results, stream))
        # Here and not in the coroutine, which never begins if the loop is closed first.
        new.add_done_callback(partial(_fail_rest, results))
        self._tails.pop(tail, None)
        self._tails[new] = None
        return new

    def result(self, future: "Future[T]") -> T:
        """Wait for a variable or a transcript.

        Raises:
            Exception: an error of its branch.
        """
        self.backend.loop.check_outside()
        error = self._error(future)
        if error is not None:
            self._raised.append(error)
            raise error
        return future.result()

    def finish(self) -> None:
        """Wait for all branches.

        Raises:
            Exception: the first error that the program has not met.
        """
        errors = [self._error(tail) for tail in self._tails]
        for error in errors:
            if error is not None and not any(error is one for one in self._raised):
                raise error

    def _error(self, future: "Future[Any]") -> BaseException | None:
        """Wait for a variable or a transcript, and return its error."""
        try:
            return future.exception()
        except CancelledError:
            if self.backend.loop.is_running:
                raise
            return closed_error()

    def cancel(self) -> None:
        """End all branches."""
        for tail in self._tails:
            tail.cancel()

    async def _execute(
        self,
        tail: "Future[Transcript]",
        operations: Sequence[Operation],
        results: "Sequence[Future[Variable]]",
        stream: TextPieces,
    ) -> Transcript:
        transcript = await asyncio.wrap_future(tail)
        left = iter(results)
        for operation in operations:
            if not isinstance(operation, Gen | Select):
                transcript = _with_constant(transcript, operation)
                if isinstance(operation, str):
                    stream.add(None, operation)
                continue
            transcript.check_output()
            variable = await self._output(transcript, operation, partial(stream.add, operation.name))
            transcript = transcript.with_output(variable.text)
            # The run may have been cancelled meanwhile.
            with suppress(InvalidStateError):
                next(left).set_result(variable)
            stream.notify()
        return transcript

    async def _output(self, transcript: Transcript, asked: Gen | Select, on_text: Callable[[str], None]) -> Variable:
        if isinstance(asked, Gen):
            found = await self.backend.generate(transcript, asked, self.defaults, on_text)
            return Variable(found.text, found)
        scores = await self.backend.score(transcript, asked.choices)
        text = asked.choices[asked.method(scores)]
        on_text(text)
        return Variable(text, Selected(text, scores))


def _with_constant(transcript: Transcript, operation: str | RoleBegin | RoleEnd) -> Transcript:
    if isinstance(operation, RoleBegin):
        return transcript.begun(operation.role)
    return transcript.ended() if isinstance(operation, RoleEnd) else transcript.with_text(operation)


def _fail_rest(results: "Sequence[Future[Variable]]", branch: "Future[Transcript]") -> None:
    """Have readers of variables that a branch has not reached get its error."""
    error = None if branch.cancelled() else branch.exception()
    for result in results:
        if error is None:
            result.cancel()
        else:
            with suppress(InvalidStateError):
                result.set_exception(error)
