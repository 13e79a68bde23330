"""Calls of replicas: their interface, the route of one call, and errors in words. Without Ray."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.kernels.types.settings import one_line


@dataclass
class Route:
    """Route of one call, read and filled in by the request router of its process; the replica gets an empty one.

    Attributes:
        blocks: chained hashes of the prompt's full blocks.
        avoid: replicas that have failed this request.
        only: the replica that the call is for; another one only if it is gone.
        choice: the replica that the router has chosen last.
        replica: the replica that took the call; None before.
        done: whether the call has ended.
    """

    blocks: Sequence[bytes] = ()
    avoid: set[str] = field(default_factory=set)
    only: str | None = None
    choice: str | None = None
    replica: str | None = None
    done: bool = False

    def __reduce__(self) -> tuple[type["Route"], tuple[()]]:
        return Route, ()


class Replicas(Protocol):
    """Calls of the replicas, by the methods of `EngineReplica`."""

    async def start(self) -> None:
        """Wait until a replica takes calls.

        Raises:
            ValueError: a setting or file that the replicas refuse.
            EngineDeadError: they do not start for another reason.
        """

    def generate(self, name: str, command: bytes, route: Route) -> AsyncIterator[bytes]:
        """Call one replica. Closing the iterator cancels the call."""

    async def abort(self, name: str, route: Route) -> None:
        """Call one replica."""

    async def ask(self, command: bytes) -> Sequence[bytes]:
        """Call all replicas."""

    async def close(self) -> None:
        """End what `start` started."""


def reason_of(error: BaseException) -> str:
    """Return an error in one line; Ray's errors name the one that was raised in the replica as their cause."""
    cause = getattr(error, "cause", None)
    return one_line(cause if isinstance(cause, BaseException) else error).rstrip(".")
