"""Steps of dummy requests before the first user's: a rehearsal of the largest steps, and a warm-up.

The rehearsal measures what memory is left for the cache. The warm-up compiles a GPU's kernels, so that no user's
request waits for a compilation.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.cache.block_moves import BlockMove
from specdec.config import EngineConfig
from specdec.core.lora_request import LoadedAdapter, LoRARequest
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.drafting.chains import ChainRates
from specdec.draft_heads.drafting.predicted_text import PredictedText
from specdec.engine.engine import LLMEngine
from specdec.kernels.types.integers import ceil_div
from specdec.text.detokenizer import Detokenizer
from specdec.verify.sampling import Sampling

# Of the warm-up. They take different kernels, or the same with scores of another type.
PLAIN = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=0.7, top_p=0.9))
# They draft without graphs, level by level, and the number of levels follows from the tokens that are left.
EDITED = (Sampling(repetition_penalty=1.1), Sampling(temperature=0.7, repetition_penalty=1.1))
# Tokens of a prompt, and steps: the prompt's, one whose trees are drafted before it, and two for trees drafted ahead.
PROMPT, WARMUP_STEPS = 4, 4
# Tokens of prompts with which attention and quantised products take tiles of each height: each is at least twice the
# next lower one, and none is above 128.
LONG_PROMPTS = (8, 16, 32, 64, 128)
# Of the rehearsal: one for the prompts, and one with drafts.
REHEARSAL_STEPS = 2
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


def dummy_request(
    name: str, prompt: int, sampling: Sampling, longest: int, predicted: int, adapter: LoadedAdapter | None = None
) -> Request:
    """Return a request for warm-up and memory profiling.

    Args:
        prompt: its number of tokens.
        longest: limit of the request's tokens.
        predicted: tokens of a predicted text, of which chains are verified; 0 for none.
    """
    return Request(
        request_id=name,
        token_ids=[0] * prompt,
        num_prompt=prompt,
        params=SamplingParams(seed=0),
        sampling=sampling,
        max_length=longest,
        end_tokens=frozenset(),
        detokenizer=Detokenizer(None, ()),
        # No request shares the prefix of another.
        cache_salt=name,
        chain_sources=[PredictedText([0] * predicted, prompt, ChainRates())] if predicted else [],
        adapter=adapter,
    )


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
        return max(1, min(limits.max_num_batched_tokens // limits.max_num_seqs, self.longest - REHEARSAL_STEPS - 1))

    @property
    def num_blocks(self) -> int:
        """Number of blocks with which no request waits."""
        entries = self.prompt_length + REHEARSAL_STEPS * (1 + self.slots)
        # Twice as many, as the scheduler keeps a share free.
        each = ceil_div(entries, self.config.block_size)
        return 2 * each * self.config.scheduler.max_num_seqs

    def run(self, engine: LLMEngine) -> None:
        """Run the steps on an idle engine, and remove the requests."""
        requests = [self._request(index) for index in range(self.config.scheduler.max_num_seqs)]
        _run(engine, requests, REHEARSAL_STEPS)

    def _request(self, index: int) -> Request:
        length = self.prompt_length
        longest = min(self.longest, length + REHEARSAL_STEPS + 1 + self.slots)
        # A head drafts by itself; without one, requests may still bring predicted texts.
        predicted = 0 if self.config.draft else 2 + self.slots
        return dummy_request(f"rehearsal-{index}", length, Sampling(temperature=1.0, top_p=0.5), longest, predicted)


class WarmupKind(NamedTuple):
    """A warm-up request.

    Attributes:
        tokens: new ones.
        prompt: tokens of its prompt.
        adapter: what it has beside the target and the draft model.
    """

    sampling: Sampling
    tokens: int
    prompt: int = PROMPT
    adapter: LoadedAdapter | None = None


def warmup_kinds(depth: int, *, adapted: bool = False) -> list[WarmupKind]:
    """Return the requests of a warm-up.

    Args:
        depth: levels of draft trees.
        adapted: whether requests may have adapters.
    """
    first, new = PLAIN[0], WARMUP_STEPS * (1 + depth)
    kinds = [WarmupKind(sampling, new) for sampling in PLAIN]
    # A token after the prompt, the levels, and the target's own behind them.
    kinds += [WarmupKind(sampling, levels + 2) for levels in range(1, depth + 1) for sampling in EDITED]
    kinds += [WarmupKind(first, new, prompt) for prompt in LONG_PROMPTS]
    if adapted:
        # The first place, in which nothing is loaded yet, of the target's bank and of the draft model's.
        request = LoRARequest("warmup", 1, "none", "none")
        kinds.append(WarmupKind(first, new, adapter=LoadedAdapter(request, 1, "warmup")))
    return kinds


def run_warmup(engine: LLMEngine, kinds: Sequence[WarmupKind], longest: int, entries: int, predicted: int) -> None:
    """Decode a request of each kind, one at a time; other requests find none of what that leaves in the cache.

    Kernels are compiled at their first launch, of each type of scores anew, which takes seconds where a vocabulary is
    large. Larger batches take no others.

    Args:
        engine: an idle one, which is not used afterwards. On several ranks all run the same.
        kinds: of `warmup_kinds`.
        longest: limit of a request's tokens.
        entries: cache entries of a request's drafts.
        predicted: see `dummy_request`.
    """
    cache = engine.worker.cache
    cache.apply_moves([BlockMove(cache.null_block, cache.null_block)])
    room = min(longest, cache.num_blocks * cache.block_size // 2 - entries)
    for number, kind in enumerate(kinds):
        prompt = max(PROMPT, min(kind.prompt, room - kind.tokens))
        limit = min(prompt + kind.tokens, room)
        if limit < prompt + 2:
            continue
        request = dummy_request(f"warmup-{number}", prompt, kind.sampling, limit, predicted, kind.adapter)
        _run(engine, [request], WARMUP_STEPS)


def _run(engine: LLMEngine, requests: Sequence[Request], steps: int) -> None:
    """Run requests on an idle engine for at most `steps` steps, then abort those that are left."""
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(steps):
        if engine.has_unfinished:
            engine.step()
    for request in requests:
        engine.scheduler.abort(request)
