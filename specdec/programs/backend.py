"""Executes the expressions of programs by an engine or an endpoint, on an event loop of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from specdec.core.choices import ChoiceScore
from specdec.programs.expressions import Gen
from specdec.programs.transcript import Transcript

T = TypeVar("T")


class Generated(NamedTuple):
    """Text of a `gen`.

    Attributes:
        finish_reason: "stop" or "length".
        num_tokens: tokens of the text.
        num_prompt_tokens: tokens before it; None where an endpoint was not asked.
        num_cached_tokens: those of them that were found in the prefix cache; None where this is not known.
    """

    text: str
    finish_reason: str | None
    num_tokens: int
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None


class Selected(NamedTuple):
    """Scores of a `select`.

    Attributes:
        text: the choice that was taken.
        scores: of all choices, in their order.
    """

    text: str
    scores: list[ChoiceScore]


class Backend(Protocol):
    """An engine or an endpoint."""

    @property
    def loop(self) -> "LoopThread":
        """The thread in which the coroutines run."""
        ...

    async def generate(
        self, transcript: Transcript, asked: Gen, defaults: Mapping[str, Any], on_text: Callable[[str], None]
    ) -> Generated:
        """Return the text that follows a transcript.

        Args:
            defaults: parameters where `asked` gives none.
            on_text: called with each new part of the text.

        Raises:
            Exception: the request was refused, or could not be answered.
        """
        ...

    async def score(self, transcript: Transcript, choices: Sequence[str]) -> list[ChoiceScore]:
        """Return the scores of texts that may follow a transcript.

        Raises:
            Exception: the request was refused, or could not be answered.
        """
        ...


class LoopThread:
    """An event loop in a thread of its own, to which other threads hand coroutines."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        # The lock guards the flag: coroutines submitted before `close` run or are cancelled, later ones fail.
        self._lock, self._is_closed = threading.Lock(), False
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True until the loop is being closed."""
        return not self._is_closed

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine. Once the loop is being closed, the future fails with a RuntimeError."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        refused = Future[T]()
        refused.set_exception(closed_error())
        return refused

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return a coroutine's result, for which this waits."""
        self.check_outside()
        return self.submit(work).result()

    def check_outside(self) -> None:
        """Refuse to wait within the loop.

        Raises:
            RuntimeError: called by one of its coroutines.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a program cannot run within the event loop of its own backend; use another thread")

    def close(self) -> None:
        """End the loop and its thread; what still runs in it is cancelled."""
        self.check_outside()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def closed_error() -> RuntimeError:
    """Return what programs get whose backend is closed."""
    return RuntimeError("the backend is closed")


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
