"""One engine shared by interleaved calls and by threads."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple, TypeVar

from specdec.core.request import Request, RequestGroup
from specdec.engine.engine import LLMEngine

T = TypeVar("T")
CLOSED = "this LLM is closed; make another"


class _Owner(NamedTuple):
    """The group a request belongs to, and where news of the group go."""

    group: RequestGroup
    deliver: Callable[[RequestGroup], None]


class SharedEngine:
    """Runs the requests of several calls on one engine.

    Calls may come from several threads. One lock, the turn, guards the engine, and a call holds it for one step at a
    time. Requests of all calls run in the same steps. Whichever call steps the engine also queues the news of the other
    calls, so no state of a request is lost.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine: LLMEngine | None = engine
        self._owners: dict[Request, _Owner] = {}
        # Requests of closed calls. They are aborted by the call that holds the turn, because a closed iterator may be
        # collected in the middle of a step, by the very thread that takes it.
        self._abandoned: deque[Request] = deque()
        self._turn, self._next = Lock(), Lock()

    @contextmanager
    def turn(self) -> Iterator[LLMEngine]:
        """Exclusive use of the engine. Threads take turns: none gets a second one while another waits.

        Raises:
            ValueError: the engine was given up.
        """
        with self._next:
            self._turn.acquire()
        try:
            if self._engine is None:
                raise ValueError(CLOSED)
            yield self._engine
        finally:
            self._turn.release()
            self._abort_abandoned()

    def close(self) -> None:
        """Give the engine up after the running step. All calls, those that run included, raise a ValueError."""
        with self._next, self._turn:
            self._engine = None
            self._owners.clear()

    def run(self, groups: Sequence[RequestGroup], read: Callable[[RequestGroup], T]) -> Generator[T]:
        """Run groups to their end, and abort what is unfinished if the caller stops early.

        Yields:
            What `read` makes of a group, once per step in which the group got tokens, in the order of the steps. It is
            read right after the step, however late the caller asks.

        Raises:
            ValueError: a request that can never run, or the engine was given up; no other request of these groups is
                queued then.
            QueueFullError: likewise, if too many requests wait.
        """
        news: deque[T] = deque()

        def deliver(group: RequestGroup) -> None:
            news.append(read(group))

        owners = {request: _Owner(group, deliver) for group in groups for request in group.requests}
        try:
            with self.turn() as engine:
                for request in owners:
                    engine.add_request(request)
                self._owners |= owners
            while True:
                while news:
                    yield news.popleft()
                with self.turn() as engine:
                    if not news:
                        if all(group.finished for group in groups):
                            return
                        self.step(engine)
        finally:
            self._abandoned.extend(owners)
            self._abort_abandoned()

    def step(self, engine: LLMEngine) -> None:
        """Step the engine, whose turn the caller has, and queue the news of every call."""
        got: Iterable[Request] | None = None
        try:
            got = engine.step()
        finally:
            if got is None:
                # The step failed, perhaps after requests got tokens. The unfinished have news after the next step.
                got = [request for request in self._owners if request.finished]
            # Each group once, in the order of its first news.
            for group, deliver in dict.fromkeys(self._owners[request] for request in got if request in self._owners):
                deliver(group)
            for request in got:
                if request.finished:
                    self._owners.pop(request, None)

    def _abort_abandoned(self) -> None:
        while self._abandoned and self._turn.acquire(blocking=False):
            try:
                while self._abandoned:
                    request = self._abandoned.popleft()
                    self._owners.pop(request, None)
                    if self._engine is not None:
                        self._engine.abort(request)
            finally:
                self._turn.release()
