"""The largest steps an engine may have, run once to see what memory they need."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.config import EngineConfig
from specdec.core.detokenizer import Detokenizer
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import LLMEngine
from specdec.verify.sampling import Sampling

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
    if not config.device.startswith("cuda"):
        return CPU_CACHE_BYTES
    return left_beside(config, rehearse)


def left_beside(config: EngineConfig, rehearse: Callable[[], int]) -> int:
    """Bytes that `gpu_memory_utilization` of the GPU leaves beside the weights and the peak of the largest steps.

    Raises:
        ValueError: nothing.
    """
    device = torch.device(config.device)
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


# The prompts' own step, and one with drafts behind each.
STEPS = 2


@dataclass(frozen=True)
class Rehearsal:
    """As many requests as may run, with prompts as long as fit one step together, and drafts after that.

    They are sampled with top_p, which takes the most memory.

    Args:
        longest: tokens a request may come to.
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
        """That no request of it waits for."""
        entries = self.prompt_length + STEPS * (1 + self.slots)
        # The scheduler keeps a share free.
        each = -(-entries // self.config.block_size)
        return 2 * each * self.config.scheduler.max_num_seqs

    def run(self, engine: LLMEngine) -> None:
        """Run it on an engine that has nothing else to do, and leave nothing behind."""
        requests = [self._request(index) for index in range(self.config.scheduler.max_num_seqs)]
        for request in requests:
            engine.add_request(request)
        for _ in range(STEPS):
            engine.step()
        for request in requests:
            engine.abort(request)

    def _request(self, index: int) -> Request:
        length = self.prompt_length
        return Request(
            request_id=f"rehearsal-{index}",
            token_ids=[0] * length,
            num_prompt=length,
            params=SamplingParams(seed=0),
            sampling=Sampling(temperature=1.0, top_p=0.5),
            max_length=min(self.longest, length + STEPS + 1 + self.slots),
            end_tokens=frozenset(),
            detokenizer=Detokenizer(None, ()),
            # None finds the beginning of another.
            cache_salt=str(index),
        )
