"""Running and waiting requests in the order in which they are served. Pure Python."""

import itertools
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter

from specdec.core.request import Request
from specdec.scheduling.scheduler_config import Policy

# A request is overtaken by requests of the next lower priority number only if they arrive within this many steps.
PRIORITY_STEPS = 1000
# A client's second queued request is overtaken by a first one of another client only if that arrives within this many
# steps; its third one, within twice as many.
TURN_STEPS = 1000

_rank_of = attrgetter("rank")


class RequestQueues:
    """Two lists in order of rank.

    With the policy "priority" the rank is the step of arrival plus `PRIORITY_STEPS` times the priority. With "fcfs" it
    is the step of arrival plus `TURN_STEPS` times the requests that its client has queued already; it falls when others
    come after some of those have ended. A client's requests keep the order of their arrival. So a client with many
    requests delays its own: it loses seats and blocks to clients that have fewer. A child ranks directly behind its
    parent and the parent's earlier children.

    Attributes:
        running: requests that hold a seat and blocks.
        waiting: requests that hold neither.
        waiting_for_kv: waiting requests whose blocks a connector is fetching (the state WAITING_FOR_KV). They delay no
            other request, unless there are as many as a connector may fetch for.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.waiting_for_kv: list[Request] = []
        self._arrivals = itertools.count()
        # By client: its queued requests, and the last of their turns or a later one.
        self._num_queued = Counter[str]()
        self._last_turns: dict[str, int] = {}

    def add(self, request: Request, step: int) -> None:
        """Append a new request to the waiting ones.

        Args:
            step: the current step.
        """
        client = request.client
        if self._policy == "priority":
            turn = step + PRIORITY_STEPS * request.priority
        else:
            # With a single client, the order of arrival is enough.
            has_others = len(self._last_turns) > (client in self._last_turns)
            if has_others and any(self._is_late(one, last - step) for one, last in self._last_turns.items()):
                self._renew_turns(step)
            turn = step + TURN_STEPS * self._num_queued[client]
            turn = self._last_turns[client] = max(turn, self._last_turns.get(client, turn))
        self._num_queued[client] += 1
        request.rank = (turn, next(self._arrivals), 0)
        self.wait(request)

    def _is_late(self, client: str, delay: int) -> bool:
        """Return whether a client's last turn is further off than its queued requests account for.

        A little further is let pass, since a long queue would be sorted whenever a request ends.
        """
        count = self._num_queued[client]
        return delay > TURN_STEPS * (count + count // 8)

    def _renew_turns(self, step: int) -> None:
        """Give requests the turns that they would have if they came now, where those are earlier.

        A client's next request ranks behind its last one, which may have come when many others of it were queued.
        """
        places, turns = Counter[str](), dict[int, int]()
        for request in sorted(self, key=_rank_of):
            client, (turn, arrival, child) = request.client, request.rank
            # Children have the turn of their parent.
            if arrival not in turns:
                turns[arrival] = min(turn, step + TURN_STEPS * places[client])
                places[client] += 1
            request.rank = (turns[arrival], arrival, child)
            self._last_turns[client] = turns[arrival]
        for queue in (self.running, self.waiting):
            queue.sort(key=_rank_of)

    def add_child(self, parent: Request, child: Request, runs: bool) -> None:
        """Insert a child of a queued request behind it."""
        child.client, child.rank = parent.client, (parent.rank[0], parent.rank[1], next(self._arrivals))
        self._num_queued[child.client] += 1
        insort(self.running if runs else self.waiting, child, key=_rank_of)

    def wait(self, request: Request) -> None:
        """Insert a request that has its rank among the waiting ones."""
        insort(self.waiting, request, key=_rank_of)

    def resume(self) -> None:
        """Let the requests that wait for their blocks be asked for again."""
        while self.waiting_for_kv:
            self.wait(self.waiting_for_kv.pop())

    def remove(self, request: Request) -> bool:
        """Remove a request; False if it is not queued."""
        for queue in (self.running, self.waiting, self.waiting_for_kv):
            if request in queue:
                queue.remove(request)
                self._num_queued[request.client] -= 1
                if not self._num_queued[request.client]:
                    del self._num_queued[request.client]
                    self._last_turns.pop(request.client, None)
                return True
        return False

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(self.running, self.waiting, self.waiting_for_kv)
