"""Pinned (page-locked) host memory of exactly the size that is asked for, which a GPU reads and writes itself."""

import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def host_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor on the host, pinned if `device` is a GPU.

    Pinned memory is taken in whole pages: less than 4 KiB more than the tensor has. torch's `pin_memory=True` rounds
    each tensor up to a power of two instead (`CachingHostAllocator`; torch 2.13 has a threshold for it, as an
    environment variable alone, and 2.11 none): 20 GiB take 32. Chunks of powers of two would waste nothing either, but
    no tensor could span them. So pages are mapped here, and registered with the GPU's driver by `cudaHostRegister`, as
    vLLM's and SGLang's host caches are. With unified addressing, as on Linux, all GPUs and contexts can use them, and
    Triton finds their address on the GPU by the host's.

    Raises:
        ValueError: the system or the driver refuses so much memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cuda" or size == 0:
        return torch.empty(*shape, dtype=dtype)
    try:
        pages = _PinnedPages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refusal(size, str(error)) from None
    # A fork would copy all pinned pages, or, on older kernels, give this process new ones that the GPU does not see.
    pages.madvise(mmap.MADV_DONTFORK)
    # The tensor's storage holds the mapping, and so do views of it, those of numpy too.
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    pages.pin(memory.data_ptr())
    return memory.view(dtype).view(*shape)


class _PinnedPages(mmap.mmap):
    """A mapping that is unregistered before it is unmapped.

    It has a finaliser, since weak references to a mapping are called when it is unmapped already. The driver waits for
    the device's work before it unregisters pages, but CUDA's documents do not promise it: who has copies under way
    waits for them first.
    """

    _unpin: Callable[[int], object] | None = None
    _address = 0

    def pin(self, address: int) -> None:
        """Register all pages, which begin at `address`.

        Raises:
            ValueError: the driver refuses.
        """
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(address, len(self), 0)
        if int(status):
            raise _refusal(len(self), runtime.cudaGetErrorString(status))
        # Kept, since modules may be gone when the program ends.
        self._address, self._unpin = address, runtime.cudaHostUnregister

    def __del__(self) -> None:
        if self._unpin is not None:
            self._unpin(self._address)


def _refusal(size: int, reason: str) -> ValueError:
    return ValueError(
        f"{size / (1 << 30):.3g} GiB of host memory cannot be pinned ({reason}); lower cpu_bytes_to_use of "
        "kv_transfer_config"
    )
