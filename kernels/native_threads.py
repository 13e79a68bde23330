"""How many threads the compiled library computes with, measured on the machine as it is."""

import time

import torch

from specdec.kernels.native_library import Library
from specdec.kernels.native_operations import NativeProjection

# A weight of 16 MB, as a step reads many: larger than a processor's own caches, and done in a millisecond or two.
ROWS, COLUMNS = 8192, 1024
TIMES = 7
# Fewer threads are preferred unless more are faster by this factor.
GAIN = 1.05


def fastest_threads(dtype: torch.dtype, most: int) -> int:
    """Return the number of threads, `most` or a part of it, with which a product of one row is fastest.

    Such products are limited by the memory, which a few threads may exhaust; more would only wait for each other.

    Args:
        dtype: of activations.
    """
    if most == 1:
        return 1
    counts = [1]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    weight, x = torch.zeros(ROWS, COLUMNS, dtype=dtype), torch.zeros(1, COLUMNS, dtype=dtype)
    products = [NativeProjection(Library(count, dtype), weight) for count in counts]
    seconds = [float("inf")] * len(counts)
    # In turn, so that whatever else runs meanwhile is no disadvantage for one of them.
    for _ in range(TIMES):
        for index, product in enumerate(products):
            began = time.perf_counter()
            product(x)
            seconds[index] = min(seconds[index], time.perf_counter() - began)
    best = 0
    for index in range(1, len(counts)):
        if seconds[index] * GAIN < seconds[best]:
            best = index
    return counts[best]
