"""Resident size over 500 consecutive requests: the cache is allocated once, and nothing grows.

python -m benchmarks.memory

Two bounded caches fill first, during the warm-up: kept noise vectors, and oneDNN's kernels for each row count met.
"""

import argparse
import ctypes
from pathlib import Path

from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams


def resident_mib() -> float:
    """Resident size of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


class _Heap(ctypes.Structure):
    """glibc's `struct mallinfo2`: the fifth size, hblkhd, is in use and mapped, the eighth, uordblks, in use else."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def in_use_mib() -> float:
    """Return the MiB that this process has allocated and not freed; 0 if the C library does not say."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0.0
    mallinfo.restype = _Heap
    sizes = mallinfo().sizes
    return float(sizes[4] + sizes[7]) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--warm-up", type=int, default=700, help="requests before the count begins")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    llm = LLM(draft="eagle", adaptive_drafts=False)
    caches = [llm.engine.worker.cache.target, llm.engine.worker.cache.draft]
    places = [tensor.data_ptr() for tensor in caches if tensor is not None]
    # Pages of the cache become resident when first written, so all of it is written before the count begins.
    for tensor in caches:
        if tensor is not None:
            tensor.zero_()
    prompts = [llm.chat_prompt(messages) for name in ("sgd-eval", "gsm8k-eval") for messages in read_prompts(name)]
    samples = []
    for number in range(-args.warm_up, args.requests):
        params = SamplingParams(
            temperature=float(number % 2), seed=number + args.warm_up, max_tokens=args.max_tokens, ignore_eos=True
        )
        llm.generate([prompts[number % len(prompts)]], params)
        if number >= -1 and (number + 1) % 50 == 0:
            samples.append({"requests": number + 1, "resident_mib": round(resident_mib(), 1)})
            print(samples[-1], flush=True)
    assert places == [tensor.data_ptr() for tensor in caches if tensor is not None]
    growth = samples[-1]["resident_mib"] - samples[0]["resident_mib"]
    pool = llm.engine.scheduler.manager.pool
    assert pool.num_free == pool.num_blocks
    write("memory", {"warm_up": args.warm_up, "samples": samples, "growth_mib": round(growth, 1)})


if __name__ == "__main__":
    main()
