"""Running and waiting requests in the order in which they are served. Pure Python."""

import itertools
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from specdec.core.request import Request

# A request is overtaken by requests of the next lower priority number only if they arrive within this many steps.
PRIORITY_STEPS = 1000


class RequestQueues:
    """Two lists in order of rank.

    The rank is the order of arrival, or with the policy "priority" the step of arrival plus `PRIORITY_STEPS` times the
    priority. A child ranks directly behind its parent and the parent's earlier children.

    Attributes:
        running: requests that hold a seat and blocks.
        waiting: requests that hold neither.
        waiting_for_kv: waiting requests whose blocks a connector is fetching (the state WAITING_FOR_KV). They delay no
            other request.
    """

    def __init__(self) -> None:
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.waiting_for_kv: list[Request] = []
        self._arrivals = itertools.count()

    def add(self, request: Request, step: int) -> None:
        """Append a new request to the waiting ones.

        Args:
            step: the current step under the policy "priority", 0 under "fcfs".
        """
        request.rank = (step + PRIORITY_STEPS * request.priority, next(self._arrivals), 0)
        self.wait(request)

    def add_child(self, parent: Request, child: Request, runs: bool) -> None:
        """Insert a child of a queued request behind it."""
        child.rank = (parent.rank[0], parent.rank[1], next(self._arrivals))
        insort(self.running if runs else self.waiting, child, key=attrgetter("rank"))

    def wait(self, request: Request) -> None:
        """Insert a request that has its rank among the waiting ones."""
        insort(self.waiting, request, key=attrgetter("rank"))

    def resume(self) -> None:
        """Let the requests that wait for their blocks be asked for again."""
        while self.waiting_for_kv:
            self.wait(self.waiting_for_kv.pop())

    def remove(self, request: Request) -> bool:
        """Remove a request; False if it is not queued."""
        for queue in (self.running, self.waiting, self.waiting_for_kv):
            if request in queue:
                queue.remove(request)
                return True
        return False

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self.running, self.waiting, self.waiting_for_kv)
