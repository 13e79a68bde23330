"""Counts of what the host asks of simulated GPUs: each request takes it time, whatever its size."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Counts:
    """Requests outside captures.

    Attributes:
        places: by kind ("upload", "operation", "launch", "replay"), how often which module asked for what.
        replays: graphs since the start.
        left: of each event that the host waited for, the graphs that were asked for behind it: what the GPU still has
            to do when the host goes on.
    """

    def __init__(self) -> None:
        self.places: dict[str, Counter[str]] = {}
        self.replays, self.left = 0, list[int]()

    def add(self, kind: str, what: str = "") -> None:
        frame = sys._getframe(1)
        while not _is_asking(frame.f_globals["__name__"]) and frame.f_back is not None:
            frame = frame.f_back
        self.places.setdefault(kind, Counter())[f"{frame.f_globals['__name__']}:{frame.f_lineno} {what}"] += 1

    def add_operation(self, name: str, made: Sequence[Tensor], given: Sequence[Tensor], *, writes: bool) -> None:
        """Count a torch function, unless it makes a view.

        Args:
            made: its results, on the host.
            given: its arguments on GPUs, likewise.
            writes: whether it was told where its result goes.
        """
        held = {one.untyped_storage().data_ptr() for one in given}
        writes |= (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        if writes or any(one.untyped_storage().data_ptr() not in held for one in made):
            self.add("operation", name)

    def take(self) -> dict[str, int]:
        """Return the number of each kind since the last call."""
        found = {kind: places.total() for kind, places in self.places.items()}
        self.places, self.left = {}, []
        return found


def _is_asking(module: str) -> bool:
    return module.startswith("specdec.") and module != "specdec.kernels.types.upload"


def with_counts(graph: Any, counts: Counts) -> None:
    """Have the replays of a graph counted."""
    replay = graph.replay

    def counted() -> None:
        counts.add("replay")
        counts.replays += 1
        replay()

    graph.replay = counted
