"""Messages between the ranks of an engine: commands, decisions of the first rank, and values that all ranks share.

All ranks run the same program on the same commands: they plan the same steps and come to the same outcomes. What could
differ, such as a measured time, is decided by the first one.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar, cast

import torch

from specdec.core.errors import QueueFullError
from specdec.kernels.types.settings import one_line
from specdec.parallel.rank_group import LOOPBACK, Store
from specdec.parallel.rank_layout import RankGroups, RankLayout, join_groups
from specdec.parallel.work_time import worked_seconds

T = TypeVar("T")
# Errors of a command that cannot be carried out, which changes nothing.
REFUSALS = (ValueError, OSError, QueueFullError)
# Seconds between signs of life.
BEAT = 1.0
# Beats in which a rank that is watched has neither worked nor waited for others, after which it counts as hung, and
# the seconds of processor time in one from which on it has worked.
MOST_IDLE, LEAST_WORK = 7, 0.005


class Alive(NamedTuple):
    """Sign of life of a rank beside the first, once it has loaded the target: one every `BEAT` seconds."""


class Hung(NamedTuple):
    """Last message of a rank that hangs."""


class Shared(NamedTuple):
    """A rank's value for `Ranks.share`."""

    value: Any


class Raised(NamedTuple):
    """An error of `Ranks.decide` on the first rank. The others raise a ValueError, for not every error can be sent."""

    message: str


class Failure(NamedTuple):
    """Last message of a rank that fails."""

    reason: str


class RankDeadError(RuntimeError):
    """A rank is gone, and the engine with it. The message is one line."""


class Ranks:
    """A rank's view of all of them. Every rank calls `decide` and `share` at the same places.

    This class is a single rank, which holds the whole model.

    Attributes:
        rank: number of this one. The first one has the program that uses the engine.
        layout: which part of the model each rank holds.
    """

    rank = 0
    layout = RankLayout(1, 1)

    def groups(self, device: torch.device) -> RankGroups | None:  # noqa: ARG002
        """Return the groups of the model's operations, None for a single rank.

        Raises:
            RankDeadError: a rank is gone; every other method raises it as well.
        """
        return None

    def tell(self, record: object) -> None:
        """Have all other ranks do what this one, the first, does next."""

    def tell_stages(self, make: Callable[[], object]) -> None:
        """Tell the ranks of earlier pipeline stages what `make` returns, which this one, the first, has found."""

    def receive(self) -> Any:
        """Return what the first rank tells next."""
        raise AssertionError("nobody tells the first rank")

    def decide(self, make: Callable[[], T]) -> T:
        """Call `make` on the first rank, and return its result on every rank.

        Raises:
            ValueError, OSError, QueueFullError: what `make` raises of `REFUSALS`.
        """
        return make()

    def share(self, value: T, *, in_step: bool = False) -> list[T]:  # noqa: ARG002
        """Return the value of each rank, in the order of their numbers.

        Args:
            in_step: whether all come to it at about the same time, as within a step. One that is late then counts as
                hung; elsewhere it may still load.
        """
        return [value]

    def together(self, *refusals: type[Exception]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context for what all ranks do. What interrupts it leaves the others waiting, so it ends them.

        Args:
            refusals: errors that all ranks meet alike, and go on.
        """
        return nullcontext()

    def check(self) -> None:
        """Check that all ranks are there."""

    def close(self) -> None:
        """End the other ranks, once they have done what they were told. Nothing may be called afterwards."""


class OtherRank(Ranks):
    """A rank beside the first; see `Ranks`. Its process ends with the connection, however that ends.

    Args:
        connection: to the first rank.
        store: through which the ranks find each other.
        host: address of this machine that the other ranks reach.
    """

    def __init__(self, connection: Connection, store: Store, rank: int, host: str = LOOPBACK) -> None:
        self._connection, self._store, self.rank, self._host = connection, store, rank, host
        self._is_sending, self._has_ended = threading.Lock(), threading.Event()
        self._groups: RankGroups | None = None
        self._is_watched = self._is_receiving = False
        self._timeout: float

    def join(self, layout: RankLayout, timeout: float) -> None:
        """Take the sizes of all ranks, which the first one tells.

        Args:
            timeout: seconds of an operation between ranks.
        """
        self.layout, self._timeout = layout, timeout

    def begin_beats(self, end: Callable[[int], object] = os._exit) -> None:
        """Give signs of life from now on.

        Args:
            end: ends the process with an exit code if this rank hangs: nothing else may be able to.
        """
        threading.Thread(target=self._beat, args=(end,), name="signs of life", daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """End this rank if it hangs within this context.

        Code that waits for anything but other ranks, such as a file, must not run in it: it uses no processor either,
        and would count as hung.
        """
        self._is_watched = True
        try:
            yield
        finally:
            self._is_watched = False

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Send a failure to the first rank, whose end ends this silently."""
        try:
            yield
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            # The first rank may be gone.
            with suppress(OSError):
                self._send(Failure(f"{type(error).__name__}: {one_line(error)}"))
        finally:
            self._has_ended.set()

    def _beat(self, end: Callable[[int], object]) -> None:
        num_idle, spent = 0, worked_seconds()
        with suppress(OSError):
            while not self._has_ended.wait(BEAT):
                spent_before, spent = spent, worked_seconds()
                is_idle = self._is_watched and not self._is_waiting() and spent - spent_before < LEAST_WORK
                num_idle = num_idle + 1 if is_idle else 0
                if num_idle == MOST_IDLE:
                    self._send(Hung())
                    end(1)
                    return
                self._send(Alive())

    def _is_waiting(self) -> bool:
        """Return whether this rank waits for another one."""
        return self._is_receiving or (self._groups is not None and any(group.is_waiting for group in self._groups))

    def _send(self, message: Alive | Hung | Shared | Failure) -> None:
        with self._is_sending:
            self._connection.send(message)

    def groups(self, device: torch.device) -> RankGroups:
        self.share(None)
        self._groups = join_groups(self.rank, self.layout, self._store, device, self._timeout, self._host)
        return self._groups

    def receive(self) -> Any:
        self._is_receiving = True
        try:
            return self._connection.recv()
        finally:
            self._is_receiving = False

    def decide(self, make: Callable[[], T]) -> T:  # noqa: ARG002
        decided = self.receive()
        if isinstance(decided, Raised):
            raise ValueError(decided.message)
        return cast(T, decided)

    def share(self, value: T, *, in_step: bool = False) -> list[T]:  # noqa: ARG002
        self._send(Shared(value))
        values: list[T] = self.receive()
        return values
