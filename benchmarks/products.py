"""Products of few rows by each form of the compiled kernels, beside the speed of reading memory.

    python -m benchmarks.products

Weights are bfloat16 numbers of the widened target's shapes, more than a processor caches, so that each product reads
its own from memory. For comparison torch sums one large tensor in each round, on as many threads; memory may be faster
than that.
"""

import argparse
import statistics
import time
from collections import defaultdict

import torch
from torch import Tensor

from benchmarks.report import finish
from specdec.kernels.native.library import Library, processor_forms
from specdec.kernels.native.operations import NativeProjection

SHAPES = [(4096, 1024), (1024, 4096)]
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
COPIES = 24
SUMMED = 2**26  # float32 numbers, 256 MiB


def seconds_of_all(products: list[NativeProjection], x: Tensor) -> float:
    start = time.perf_counter()
    for product in products:
        product(x)
    return time.perf_counter() - start


def read_speed(numbers: Tensor) -> float:
    """Return the bytes a second at which a tensor is summed."""
    start = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    libraries = {form: Library(args.threads, torch.bfloat16, form) for form in processor_forms()}
    numbers = torch.ones(SUMMED)
    rows = []
    for shape in SHAPES:
        weights = [torch.randn(*shape).bfloat16() for _ in range(COPIES)]
        weight_bytes = sum(weight.nbytes for weight in weights)
        packed = {
            form: [NativeProjection(library, weight) for weight in weights] for form, library in libraries.items()
        }
        inputs = {count: torch.randn(count, shape[1]).bfloat16() for count in ROWS}
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        speeds = []
        for _ in range(args.rounds + 1):
            speeds.append(read_speed(numbers))
            for form in libraries:
                for count in ROWS:
                    seconds[form, count].append(seconds_of_all(packed[form], inputs[count]))
        summed = statistics.median(speeds[1:])
        for form in libraries:
            for count in ROWS:
                took = statistics.median(seconds[form, count][1:])
                one = statistics.median(seconds[form, 1][1:])
                rows.append(
                    {
                        "columns": shape[0],
                        "inputs": shape[1],
                        "form": form,
                        "rows": count,
                        "ms": round(took / COPIES * 1e3, 3),
                        "over_sum_speed": round(weight_bytes / took / summed, 2),
                        "over_one_row": round(took / one, 2),
                        "sum_gb_s": round(summed / 1e9, 1),
                    }
                )
    finish("products", {"rounds": args.rounds}, rows)


if __name__ == "__main__":
    main()
