"""Routing facts of one call: read and filled in by the request router of its process."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Route:
    """Route of one call. The router reads it before the call is sent; the replica gets an empty one.

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
