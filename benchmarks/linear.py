"""A model's matrices, in bfloat16 on a CPU: torch's `linear` against weights laid out once for oneDNN.

    python -m benchmarks.linear

Each round runs all matrices of the demo target in the order of a step, so weights come from where they come from in
serving and not from the nearest cache. Then products of row counts never met before, as many rows as there are, and
padded to one of a few counts as `Projection` does.
"""

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from benchmarks.report import write
from specdec.kernels.reference.projection import Projection

LAYERS = 10
SHAPES = [(512, 256), (256, 256), (1408, 256), (256, 704)]


def first_products(packed: list[Projection], name: str, rows: int) -> float:
    """Ms of all matrices once."""
    inputs = [torch.randn(rows, projection.weight.shape[1], dtype=torch.bfloat16) for projection in packed]
    start = time.perf_counter()
    for x, projection in zip(inputs, packed, strict=True):
        if name == "padded":
            projection(x)
        else:
            torch.ops.mkldnn._linear_pointwise.default(x, projection._packed, None, "none", [], "")
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weights = [torch.randn(*shape, dtype=torch.bfloat16) for _ in range(LAYERS) for shape in SHAPES]
    packed = [Projection(weight) for weight in weights]
    rows = []
    with torch.inference_mode():
        for count in (1, 4, 13, 61, 256):
            inputs = [torch.randn(count, weight.shape[1], dtype=torch.bfloat16) for weight in weights]
            plain_ms, packed_ms = [], []
            for _ in range(args.rounds):
                start = time.perf_counter()
                for x, weight in zip(inputs, weights, strict=True):
                    F.linear(x, weight)
                middle = time.perf_counter()
                for x, projection in zip(inputs, packed, strict=True):
                    projection(x)
                plain_ms.append((middle - start) * 1e3)
                packed_ms.append((time.perf_counter() - middle) * 1e3)
            ratio = statistics.median(a / b for a, b in zip(plain_ms, packed_ms, strict=True))
            rows.append(
                {
                    "rows": count,
                    "linear_ms": round(statistics.median(plain_ms), 3),
                    "projection_ms": round(statistics.median(packed_ms), 3),
                    "ratio": round(ratio, 2),
                }
            )
        first_ms = {
            name: [first_products(packed, name, rows) for rows in range(33, 64)] for name in ("padded", "exact")
        }
    medians = {name: round(statistics.median(ms), 3) for name, ms in first_ms.items()}
    table = Table("rows", "linear, ms", "laid out once, ms", "ratio")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
    print(f"of a row count never met before, ms: padded {medians['padded']}, exact {medians['exact']}")
    write("linear", {"matrices": len(weights), "rows": rows, "first_ms": medians})


if __name__ == "__main__":
    main()
