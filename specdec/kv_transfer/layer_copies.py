"""Copies of the target's blocks beside a pass, layer by layer (LayerKV, Xiong et al. 2024)."""

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.upload import upload
from specdec.kv_transfer.host_blocks import Copied
from specdec.kv_transfer.notes import Notes


class LayerCopies(Protocol):
    """Copies between the device's blocks and those of host memory. All methods are called by the engine's thread."""

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> "Loaded":
        """Begin to copy blocks `sources` of the host to blocks `targets` of the device, the first layer first."""
        ...

    def save(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Take which blocks of the device `save_kv_layer` copies to which of the host in the coming pass."""
        ...

    @property
    def is_pending(self) -> bool:
        """True if the coming pass has blocks to load or to save."""
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """Return when the device reads loaded blocks of this layer as they should be."""
        ...

    def save_kv_layer(self, layer: int) -> None:
        """Begin to copy a layer's blocks to the host. The pass is through with the layer."""
        ...

    def wait_for_load(self) -> None:
        """Wait for all layers of what is being loaded."""
        ...

    def wait_for_save(self) -> None:
        """Return when the device's blocks may be written again. Begins that were not followed by a pass are dropped."""
        ...

    def end(self) -> None:
        """Wait for all copies that a failed step has begun. Copies to host memory are complete on return."""
        ...


class Loaded(Protocol):
    """The moment when all layers of a load are copied."""

    @property
    def is_done(self) -> bool: ...


def layer_copies(device: Tensor, host: Tensor, kernels: KernelSet, notes: Notes) -> LayerCopies:
    """Return the copies that fit the device.

    Args:
        device: `[blocks, layers, block_size, …]`.
        host: the same with any number of blocks, pinned where the device is a GPU.
    """
    if device.device.type == "cuda":
        return StreamCopies(device, host, kernels.copy_between)
    return ThreadCopies(device, host, notes)


class _LayerCopy:
    """A copy that is run by the first thread to reach it."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy, self._lock, self.is_done = copy, threading.Lock(), False

    def run(self) -> None:
        """Copy, unless that is done; wait for a thread that is about it."""
        with self._lock:
            if not self.is_done:
                self._copy()
                self.is_done = True


class _LoadedByThread(NamedTuple):
    copies: list[_LayerCopy]

    @property
    def is_done(self) -> bool:
        return all(copy.is_done for copy in self.copies)


class ThreadCopies:
    """Copies between two parts of host memory, made by a background thread.

    The engine's thread makes a copy itself if it needs one that has not begun, or that failed.

    Args:
        device: `[blocks, layers, block_size, …]`, on a CPU.
        host: the same with any number of blocks.
        notes: for failures.
    """

    def __init__(self, device: Tensor, host: Tensor, notes: Notes) -> None:
        # numpy copies in the calling thread; torch would start threads of its own for each thread that calls it.
        self._device, self._host = (part.view(torch.uint8).numpy() for part in (device, host))
        self._loads: list[list[_LayerCopy]] = []
        self._saves: list[_LayerCopy] = []
        self._announced: tuple[np.ndarray, np.ndarray] | None = None
        self._queue: SimpleQueue[_LayerCopy | None] = SimpleQueue()
        threading.Thread(target=_carry_out, args=(self._queue, notes), name="kv-layers", daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    @property
    def is_pending(self) -> bool:
        return bool(self._loads) or self._announced is not None

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> _LoadedByThread:
        ends = np.asarray(sources), np.asarray(targets)
        layers = range(self._device.shape[1])
        copies = [self._new_copy(self._host, self._device, layer, *ends) for layer in layers]
        self._loads.append(copies)
        for copy in copies:
            self._queue.put(copy)
        return _LoadedByThread(copies)

    def save(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._announced = (np.asarray(sources), np.asarray(targets)) if sources else None

    def wait_for_layer_load(self, layer: int) -> None:
        for copies in self._loads:
            copies[layer].run()
        self._loads = [copies for copies in self._loads if layer < len(copies) - 1]

    def save_kv_layer(self, layer: int) -> None:
        if self._announced is not None:
            copy = self._new_copy(self._device, self._host, layer, *self._announced)
            self._saves.append(copy)
            self._queue.put(copy)

    def wait_for_load(self) -> None:
        for copies in self._loads:
            for copy in copies:
                copy.run()
        self._loads = []

    def wait_for_save(self) -> None:
        for copy in self._saves:
            copy.run()
        self._saves, self._announced = [], None

    def end(self) -> None:
        self.wait_for_load()
        self.wait_for_save()

    def _new_copy(
        self, here: np.ndarray, there: np.ndarray, layer: int, old: np.ndarray, new: np.ndarray
    ) -> _LayerCopy:
        def copy() -> None:
            there[:, layer][new] = here[:, layer][old]

        return _LayerCopy(copy)


def _carry_out(queue: "SimpleQueue[_LayerCopy | None]", notes: Notes) -> None:
    while (copy := queue.get()) is not None:
        try:
            copy.run()
        except Exception as error:
            notes.warn(f"a thread could not copy blocks of a layer: {error!r}; the step copies them itself", "layers")


class StreamCopies:
    """Copies between a GPU and pinned memory, on a stream beside the one of the pass.

    Args:
        device: `[blocks, layers, block_size, …]`, on the GPU.
        host: the same with any number of blocks, pinned.
        copy_between: the kernel set's.
    """

    def __init__(self, device: Tensor, host: Tensor, copy_between: Callable[[Tensor, Tensor, Tensor, Tensor], None]):
        self._device, self._host, self._copy_between = device, host, copy_between
        self._stream = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]
        self._loads: list[tuple[list[torch.cuda.Event], Tensor, Tensor]] = []
        self._announced: tuple[Tensor, Tensor] | None = None

    @property
    def is_pending(self) -> bool:
        return bool(self._loads) or self._announced is not None

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> Copied:
        # The indices are kept until the pass has waited, so that their memory is not reused before.
        old, new = upload(sources, self._device.device), upload(targets, self._device.device)
        # Blocks may still be read by the step before.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            events = [self._copy(self._host, self._device, layer, old, new) for layer in range(self._device.shape[1])]
            self._loads.append((events, old, new))
            return Copied(True)

    def save(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = self._device.device
        self._announced = (upload(sources, device), upload(targets, device)) if sources else None

    def wait_for_layer_load(self, layer: int) -> None:
        for events, *_ in self._loads:
            torch.cuda.current_stream().wait_event(events[layer])
        self._loads = [load for load in self._loads if layer < len(load[0]) - 1]

    def save_kv_layer(self, layer: int) -> None:
        if self._announced is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._copy(self._device, self._host, layer, *self._announced)

    def wait_for_load(self) -> None:
        for events, *_ in self._loads:
            torch.cuda.current_stream().wait_event(events[-1])
        self._loads = []

    def wait_for_save(self) -> None:
        if self._announced is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._announced = None

    def end(self) -> None:
        self.wait_for_load()
        if self._announced is not None:
            with torch.cuda.stream(self._stream):
                saved = Copied(True)
            saved.wait()
        self.wait_for_save()

    def _copy(self, here: Tensor, there: Tensor, layer: int, old: Tensor, new: Tensor) -> torch.cuda.Event:
        """Queue a layer's copy; return when it is done."""
        self._copy_between(here[:, layer : layer + 1], there[:, layer : layer + 1], old, new)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
