"""Ray Serve's request router for replicas of an engine."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from specdec.ray_serve.prefix_table import PrefixTable
from specdec.ray_serve.replicas import Route


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica with the longest known prefix that is not overloaded.

    Its settings are `request_router_kwargs` of the deployment's `request_router_config`; see `PrefixTable`. It lives in
    the process that calls the replicas; each such process learns from its own requests.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Take the settings of the deployment; Ray Serve calls this."""
        self._table = PrefixTable(**settings)
        self._under_way: list[Route] = []

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that run now."""
        super().update_replicas(replicas)
        self._table.keep([replica.replica_id.unique_id for replica in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas one by one, in the order in which they are to be tried."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        route = _route(pending_request)
        if route is None:
            return [candidate_replicas]
        self._under_way = [each for each in self._under_way if not each.done and each is not route]
        ranked = self._table.rank(route.blocks, self._loads(replicas))
        ranked.sort(key=lambda name: (name != route.only, name in route.avoid))
        if ranked and route.only is None:
            # Many requests may be routed before the first of them is sent.
            route.choice = ranked[0]
            self._under_way.append(route)
            self._table.note(route.choice, route.blocks)
        return [[replicas[name]] for name in ranked]

    def _loads(self, replicas: dict[str, RunningReplica]) -> dict[str, int]:
        """Return unfinished requests by replica: those of this process, or all, where the replica has told lately."""
        own = Counter(route.choice for route in self._under_way)
        told = self.replica_queue_len_cache
        return {name: max(own[name], told.get(replica.replica_id) or 0) for name, replica in replicas.items()}

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Note which replica took a request."""
        if route := _route(pending_request):
            route.replica = route.choice = replica_id.unique_id
            self._table.note(route.replica, route.blocks)


def _route(pending_request: PendingRequest | None) -> Route | None:
    arguments = pending_request.args if pending_request is not None else ()
    return next((each for each in arguments if isinstance(each, Route)), None)
