"""Streams of a simulated GPU: kernels beside the main stream run as late as they may."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from tests.simulated_counts import Counts
from tests.simulated_memory import Workspace


class Machine(Protocol):
    """What streams and events need of the simulated machine."""

    waits: list[str]
    downloads: "Downloads"
    counts: Counts

    @property
    def entered(self) -> "Device": ...

    def note(self, what: str, until: int | None = None) -> None:
        """Record that the host waits."""

    def forbid(self, what: str) -> None:
        """Refuse what is unsafe while a graph is captured."""


class Device(Protocol):
    """What a stream needs of its device."""

    index: int
    streams: "Streams"


class SimulatedStream:
    """A stream. What is launched on the main one runs at once; on another one, when something waits for it.

    Attributes:
        device: the device that it belongs to.
        pending: what has not run.
        launched: how many kernels were launched on a stream other than the main one.
        workspace: cuBLAS's, from the first product on.
    """

    def __init__(self, streams: "Streams", device: torch.device) -> None:
        self.streams, self.device = streams, device
        self.pending: list[Callable[[], Any]] = []
        self.launched = 0
        self.workspace: Workspace | None = None

    def launch(self, work: Callable[[], Any]) -> Any:
        if self is self.streams.main or not self.streams.are_late:
            return work()
        self.launched += 1
        self.pending.append(work)
        return None

    def catch_up(self, launched: int) -> None:
        """Run all but what was launched after the first `launched` kernels."""
        while self.pending and self.launched - len(self.pending) < launched:
            self.pending.pop(0)()

    def wait_stream(self, other: "SimulatedStream") -> None:
        assert other.device == self.device, "streams of two devices"
        self._wait(other, other.launched)

    def wait_event(self, event: "SimulatedEvent") -> None:
        self._wait(event.stream, event.launched)

    def _wait(self, other: "SimulatedStream", launched: int) -> None:
        if self is self.streams.main:
            other.catch_up(launched)
        else:
            # Nothing waits for the main stream, and no side stream here waits for another one.
            assert other in (self, self.streams.main)


class Downloads:
    """Copies to pinned memory, which holds their numbers once the host has waited, and others before.

    Attributes:
        begun: how many there have been.
    """

    def __init__(self) -> None:
        self.begun, self._left = 0, dict[int, Callable[[], Any]]()

    def begin(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Begin to copy what a tensor holds now."""
        numbers = source.clone()
        self._left[self.begun] = lambda: target.copy_(numbers)
        self.begun += 1
        target.fill_(-(1 << 40))
        return target

    def finish(self, until: int | None) -> None:
        """Finish the first `until` of all, or all."""
        with torch._C.DisableTorchFunction():
            for number in [number for number in self._left if until is None or number < until]:
                self._left.pop(number)()


class SimulatedEvent:
    """A moment in a stream's work. It is known once the host has waited for later work."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record(self) -> None:
        self.stream = self.machine.entered.streams.current
        self.moment, self.waits, self.launched = time.perf_counter(), len(self.machine.waits), self.stream.launched
        self.downloads, self.replays = self.machine.downloads.begun, self.machine.counts.replays

    def query(self) -> bool:
        self.machine.forbid("query of an event")
        return self.stream.launched - len(self.stream.pending) >= self.launched

    def synchronize(self) -> None:
        self.machine.forbid("synchronize of an event")
        self.machine.note("synchronize of an event", self.downloads)
        self.machine.counts.left.append(self.machine.counts.replays - self.replays)
        self.stream.catch_up(self.launched)

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        assert len(self.machine.waits) > end.waits, "the device may not be there yet"
        return (end.moment - self.moment) * 1e3


class Streams:
    """All streams of a device.

    Attributes:
        main: the one that is current where no other was chosen.
        are_late: whether kernels of other streams wait. Torch's operators do not; a test asks for it where none
            of them is used beside the main stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.are_late = False
        self.main = self.current = SimulatedStream(self, device)
