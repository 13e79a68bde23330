"""What makes a graph of work on a device."""

from collections.abc import Callable
from typing import Protocol, TypeVar

Result = TypeVar("Result")


class Capture(Protocol):
    """Hands back the replay of some work, which reads and writes the same memory each time."""

    def __call__(self, work: Callable[[], Result], /) -> Callable[[], Result]: ...
