"""Memory for the cache: the rest beside the weights and the largest steps. A rehearsal measures these."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.building.kernel_warmup import dummy_request
from specdec.config import EngineConfig
from specdec.core.request import Request
from specdec.engine.engine import LLMEngine
from specdec.kernels.types.integers import ceil_div
from specdec.verify.sampling import Sampling

# Default on a CPU, where the needs of other processes are unknown.
CPU_CACHE_BYTES = 1 << 30


def cache_bytes(config: EngineConfig, rehearse: Callable[[], int]) -> int:
    """Return `kv_cache_memory` if it is set; otherwise 1 GiB on a CPU.

    On a GPU it is what `gpu_memory_utilization` leaves beside the weights and the peak of the largest steps.

    Args:
        rehearse: runs the largest steps on an engine of its own, frees it, and returns the bytes of its cache.

    Raises:
        ValueError: too little GPU memory.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if not config.device.startswith("cuda"):
        return CPU_CACHE_BYTES
    device = torch.device(config.device)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    own = rehearse()
    # The memory of captured graphs is reserved but not allocated.
    peak = torch.cuda.max_memory_reserved(device) - own
    gc.collect()
    torch.cuda.empty_cache()
    # The driver counts its own memory and that of other processes.
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    left = int(total * config.gpu_memory_utilization) - peak - outside
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total >> 20} MiB leaves no room for a cache: "
            f"weights, the largest step and all else on the GPU take {(peak + outside) >> 20} MiB; raise it, lower "
            "max_num_batched_tokens, or end what else uses the GPU"
        )
    return left


def small_cache(config: EngineConfig, memory: int, block_bytes: int) -> ValueError:
    """Return the error of cache memory that holds no block, with the setting that gave so little."""
    less = f"is less than one block of {block_bytes} bytes"
    if config.kv_cache_memory is not None:
        return ValueError(f"kv_cache_memory {memory} {less}; raise it")
    if not config.device.startswith("cuda"):
        return ValueError(f"the cache's default of {memory} bytes {less}; set kv_cache_memory")
    left = f"gpu_memory_utilization {config.gpu_memory_utilization} leaves the cache {memory} bytes, which {less}"
    return ValueError(f"{left}; raise it or lower max_num_batched_tokens")


# One step for the prompts, and one with drafts.
STEPS = 2


@dataclass(frozen=True)
class Rehearsal:
    """The largest steps: `max_num_seqs` prompts that fill one step together, then drafts for all of them.

    They are sampled with top_p, which needs the most memory.

    Args:
        longest: limit of a request's tokens.
        slots: cache entries of a request's draft tree.
    """

    config: EngineConfig
    longest: int
    slots: int

    @property
    def prompt_length(self) -> int:
        limits = self.config.scheduler
        return max(1, min(limits.max_num_batched_tokens // limits.max_num_seqs, self.longest - STEPS - 1))

    @property
    def num_blocks(self) -> int:
        """Number of blocks with which no request waits."""
        entries = self.prompt_length + STEPS * (1 + self.slots)
        # Twice as many, as the scheduler keeps a share free.
        each = ceil_div(entries, self.config.block_size)
        return 2 * each * self.config.scheduler.max_num_seqs

    def run(self, engine: LLMEngine) -> None:
        """Run the steps on an idle engine, and remove the requests."""
        requests = [self._request(index) for index in range(self.config.scheduler.max_num_seqs)]
        for request in requests:
            engine.add_request(request)
        for _ in range(STEPS):
            engine.step()
        for request in requests:
            engine.abort(request)

    def _request(self, index: int) -> Request:
        length = self.prompt_length
        longest = min(self.longest, length + STEPS + 1 + self.slots)
        # A head drafts by itself; without one, requests may still bring predicted texts.
        predicted = 0 if self.config.draft else 2 + self.slots
        return dummy_request(f"rehearsal-{index}", length, Sampling(temperature=1.0, top_p=0.5), longest, predicted)
