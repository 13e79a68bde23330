"""Host memory of a connector: blocks of all parts of the cache, copied from and to the device."""

from collections.abc import Iterable, Sequence

import torch

from specdec.kernels.types.pinned_memory import host_empty
from specdec.kernels.types.upload import upload
from specdec.kv_transfer.kv_connector import KVCaches


class HostBlocks:
    """A fixed number of blocks, pinned where the device is a GPU.

    Copies are queued on the device's current stream. Threads look at a block after `Copied.wait`.

    Args:
        num_blocks: number of blocks.
        caches: the device's cache.
    """

    def __init__(self, num_blocks: int, caches: KVCaches) -> None:
        self._device_parts, self._kernels = dict(caches.parts), caches.kernels
        self._device = next(iter(caches.parts.values())).device
        self._is_gpu = self._device.type == "cuda"
        self._parts = {
            name: host_empty((num_blocks, *part.shape[1:]), part.dtype, self._device)
            for name, part in caches.parts.items()
        }
        self._bytes = {name: part.view(num_blocks, -1).view(torch.uint8).numpy() for name, part in self._parts.items()}
        if self._is_gpu and self._kernels.on_device:
            self._warm_up()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(self._parts)

    def payload(self, part: str, block: int) -> memoryview:
        """Return the bytes of a part of a block."""
        return memoryview(self._bytes[part][block])

    def clear(self, part: str, block: int) -> None:
        """Fill a part of a block with zeros."""
        # By numpy: a thread may not write a tensor that was made in inference mode, as other ranks make it.
        self._bytes[part][block] = 0

    def load(self, sources: Sequence[int], targets: Sequence[int]) -> "Copied":
        """Copy blocks `sources` of the host to blocks `targets` of the device."""
        return self._copy(self._parts, self._device_parts, sources, targets, self._parts)

    def store(self, sources: Sequence[int], targets: Sequence[int], parts: Iterable[str]) -> "Copied":
        """Copy parts of blocks `sources` of the device to blocks `targets` of the host."""
        return self._copy(self._device_parts, self._parts, sources, targets, parts)

    def _warm_up(self) -> None:
        """Copy the null block to the host and back, so that no user's request waits for the kernels' compilation."""
        null = len(next(iter(self._device_parts.values()))) - 1
        self.store([null], [0], self.names)
        self.load([0], [null]).wait()

    def _copy(
        self,
        here: dict[str, torch.Tensor],
        there: dict[str, torch.Tensor],
        sources: Sequence[int],
        targets: Sequence[int],
        parts: Iterable[str],
    ) -> "Copied":
        old, new = upload(sources, self._device), upload(targets, self._device)
        for name in parts:
            self._kernels.copy_between(here[name], there[name], old, new)
        return Copied(self._is_gpu)


class Copied:
    """The moment when a copy is done: at once on a CPU, later on a GPU."""

    def __init__(self, is_gpu: bool) -> None:
        self._event = None
        if is_gpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def is_done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it is done."""
        if self._event is not None:
            self._event.synchronize()
