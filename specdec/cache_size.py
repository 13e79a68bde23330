"""How much memory the cache gets."""

import gc
from collections.abc import Callable

import torch

from specdec.config import EngineConfig

# On a CPU, where nothing is said: what other processes need cannot be known.
CPU_CACHE_BYTES = 1 << 30


def cache_bytes(config: EngineConfig, rehearse: Callable[[], int]) -> int:
    """`kv_cache_memory` where that is given; else 1 GiB on a CPU, and on a GPU what is left of it.

    Args:
        rehearse: runs the largest steps and forgets all they needed; the bytes its own cache took.

    Raises:
        ValueError: nothing is left.
    """
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if config.device.type != "cuda":
        return CPU_CACHE_BYTES
    return left_beside(config, rehearse)


def left_beside(config: EngineConfig, rehearse: Callable[[], int]) -> int:
    """Bytes that `gpu_memory_utilization` of the GPU leaves beside the weights and the peak of the largest steps.

    Raises:
        ValueError: nothing.
    """
    device = config.device
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    own = rehearse()
    # What captured graphs keep for themselves is reserved, and not allocated.
    peak = torch.cuda.max_memory_reserved(device) - own
    gc.collect()
    torch.cuda.empty_cache()
    # What is used outside of torch's own pool, as by the driver and other processes, only the driver knows.
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    left = int(total * config.gpu_memory_utilization) - peak - outside
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization {config.gpu_memory_utilization} of {total >> 20} MiB leaves no room for a cache: "
            f"weights and the largest step take {(peak + outside) >> 20} MiB; raise it or lower max_num_batched_tokens"
        )
    return left
