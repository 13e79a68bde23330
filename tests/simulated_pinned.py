"""Pinned host memory of a simulated GPU: what is really taken, and whether the driver's rules are kept."""

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

# Numbers of `cudaError_t`.
SUCCESS, OUT_OF_MEMORY, INVALID_VALUE, ALREADY_REGISTERED, NOT_REGISTERED = 0, 2, 1, 712, 713
_MS_ASYNC = 1
_libc = ctypes.CDLL(None, use_errno=True)


class SimulatedPinned:
    """All pinned memory, of torch's allocator and of `cudaHostRegister`. Also replaces `torch.cuda.cudart()`.

    Attributes:
        taken, peak: bytes that are pinned now, and the most there have been. torch rounds each tensor up to a power of
            two, the driver up to whole pages.
        limit: bytes beyond which the driver refuses to register more.
        faults: what a real driver would take badly without telling: memory that is freed while it is registered.
    """

    def __init__(self) -> None:
        self.taken = self.peak = 0
        self.limit: int | None = None
        self.faults: list[str] = []
        # Sizes of ranges by their first address.
        self._of_torch: dict[int, int] = {}
        self._registered: dict[int, int] = {}
        # What copies to a device read: memory, places in it, and the numbers when the copy was asked for.
        self._read: list[tuple[weakref.ref[torch.UntypedStorage], Tensor, tuple[int, torch.Size, tuple[int, ...]]]] = []

    def allocate(self, tensor: Tensor) -> None:
        """Count a tensor made with `pin_memory=True`, until its memory is freed."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return
        start, rounded = storage.data_ptr(), 1 << (storage.nbytes() - 1).bit_length()
        self._of_torch[start] = storage.nbytes()
        self._take(rounded)
        weakref.finalize(storage, self._free, start, rounded)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in pinned memory, as the driver says of its address."""
        address = tensor.data_ptr()
        ranges = [*self._of_torch.items(), *self._registered.items()]
        return any(start <= address < start + size for start, size in ranges)

    def lend(self, source: Tensor) -> None:
        """Note what a copy to a device reads, which is not to change before the host has waited."""
        place = source.storage_offset(), source.size(), source.stride()
        self._read.append((weakref.ref(source.untyped_storage()), source.clone(), place))

    def take_back(self) -> None:
        """Check that nothing has changed under a copy. Freed memory is no concern: torch keeps it until then."""
        read, self._read = self._read, []
        for memory, numbers, place in read:
            if (storage := memory()) is not None:
                now = torch.empty(0, dtype=numbers.dtype).set_(storage, *place)
                assert torch.equal(now, numbers), "pinned memory has changed while a copy may still have read it"

    def check(self) -> None:
        """Check that all registered memory is still mapped, and that it always was."""
        gone = [hex(start) for start, size in self._registered.items() if not _is_mapped(start, size)]
        if faults := [*self.faults, *(f"{address} was freed while registered" for address in gone)]:
            raise AssertionError("; ".join(faults))

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        pages = _whole_pages(size)
        if address % mmap.PAGESIZE or size <= 0 or flags or not _is_mapped(address, size):
            return INVALID_VALUE
        if any(start < address + pages and address < start + had for start, had in self._registered.items()):
            return ALREADY_REGISTERED
        if self.limit is not None and self.taken + pages > self.limit:
            return OUT_OF_MEMORY
        self._registered[address] = pages
        self._take(pages)
        return SUCCESS

    def cudaHostUnregister(self, address: int) -> int:
        pages = self._registered.pop(address, 0)
        if not pages:
            # Said here as well: a finaliser does not look at what it is told.
            self.faults.append(f"{address:#x} is not registered")
            return NOT_REGISTERED
        if not _is_mapped(address, pages):
            self.faults.append(f"{address:#x} was freed before it was unregistered")
        self.taken -= pages
        return SUCCESS

    def cudaGetErrorString(self, status: int) -> str:
        return {OUT_OF_MEMORY: "out of memory", ALREADY_REGISTERED: "part or all already mapped"}.get(status, "invalid")

    def _take(self, size: int) -> None:
        self.taken += size
        self.peak = max(self.peak, self.taken)

    def _free(self, start: int, rounded: int) -> None:
        del self._of_torch[start]
        self.taken -= rounded


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _is_mapped(address: int, size: int) -> bool:
    return bool(_libc.msync(ctypes.c_void_p(address), ctypes.c_size_t(size), _MS_ASYNC) == 0)
