"""One engine shared by interleaved calls and by threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Generic, Self, TypeVar

from specdec.core.commands import Abort, Add, EndSearches, Search
from specdec.core.request import Request, RequestGroup
from specdec.core.sampling_params import BeamSearchParams
from specdec.engine.beam_search import BeamSearch
from specdec.engine.engine import LLMEngine

T = TypeVar("T")
CLOSED = "this LLM is closed; make another"


class SharedEngine:
    """Runs the requests of several calls on one engine.

    Calls may come from several threads. One lock, the turn, guards the engine, and a call holds it for one step at a
    time. Requests of all calls run in the same steps. Whichever call steps the engine also queues the news of the other
    calls, so no state of a request is lost.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine: LLMEngine | None = engine
        # The group that a request belongs to, and where news of the group go.
        self._owners: dict[Request, tuple[RequestGroup, Callable[[RequestGroup], None]]] = {}
        # Requests of closed calls. They are aborted by the call that holds the turn, because a closed iterator may be
        # collected in the middle of a step, by the very thread that takes it.
        self._abandoned: deque[RequestGroup] = deque()
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

    def call(self, adds: Sequence[Add], read: Callable[[RequestGroup], T]) -> "EngineCall[T]":
        """Queue the requests of a call.

        Args:
            read: makes of a group with news what the caller gets.

        Raises:
            ValueError: a request that can never run, or the engine was given up; no request of the call is queued then.
            QueueFullError: likewise, if too many requests wait.
        """
        groups: list[RequestGroup] = []
        news: deque[T] = deque()

        def deliver(group: RequestGroup) -> None:
            news.append(read(group))

        try:
            with self.turn() as engine:
                for add in adds:
                    group = engine.handle(add)
                    groups.append(group)
                    self._owners |= dict.fromkeys(group.requests, (group, deliver))
        except BaseException:
            self.abandon(groups)
            raise
        return EngineCall(self, groups, news)

    def abandon(self, groups: Sequence[RequestGroup]) -> None:
        """Abort what is unfinished of these, now or after the running step."""
        self._abandoned.extend(groups)
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
                    group = self._abandoned.popleft()
                    for request in group.requests:
                        self._owners.pop(request, None)
                    if self._engine is not None:
                        self._engine.handle(Abort(group.request_id))
            finally:
                self._turn.release()


class EngineCall(Generic[T]):
    """The queued requests of a call. What is unfinished at the end of its `with` block is aborted.

    Attributes:
        groups: in the order of their commands.
    """

    def __init__(self, shared: SharedEngine, groups: Sequence[RequestGroup], news: deque[T]) -> None:
        self._shared, self.groups, self._news = shared, groups, news

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.abandon(self.groups)

    def run(self) -> Iterator[T]:
        """Run the requests to their end, and until other engines can go on with their prompts.

        Yields:
            What `read` makes of a group, once per step in which the group got tokens, in the order of the steps. It is
            read right after the step, however late the caller asks.

        Raises:
            ValueError: the engine was given up.
        """
        news = self._news
        while True:
            while news:
                yield news.popleft()
            with self._shared.turn() as engine:
                if not news:
                    requests = (request for group in self.groups for request in group.requests)
                    if all(request.finished and not engine.is_sending(request) for request in requests):
                        return
                    self._shared.step(engine)


def run_searches(shared: SharedEngine, adds: Sequence[Add], params: BeamSearchParams) -> list[BeamSearch]:
    """Run searches to their end. If it is interrupted, no beam stays queued.

    Raises:
        ValueError: a beam that the cache can never hold; nothing has run then.
    """
    with shared.turn() as engine:
        searches = engine.handle(Search(list(adds), params))
    try:
        while not all(search.finished for search in searches):
            with shared.turn() as engine:
                shared.step(engine)
    finally:
        if left := [search.number for search in searches if not search.finished]:
            with shared.turn() as engine:
                engine.handle(EndSearches(left))
    return searches
