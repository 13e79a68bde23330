"""All that only a GPU can tell, in one command of nine minutes at most.

    python -m benchmarks.gpu            # an NVIDIA GPU of 80 GB
    python -m benchmarks.gpu --tiny     # shows that it runs, on any machine; writes no result

The kernels' tests on the GPU, every kernel at the shapes of Llama-3.1-8B (`benchmarks.gpu_kernels`), and the engine's
step at that shape (`benchmarks.gpu_cycle`). Tables, and one JSON file of both.
"""

import argparse
import json
import sys
import time

import torch
from rich.console import Console

from benchmarks.gpu_device import device_for

# Whatever brings Triton is imported late: it asks then whether it is to interpret its kernels.

SECONDS = 520
TEST_SECONDS = 120
KERNEL_SECONDS = 180


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few rows and two layers; no tests, no result written")
    args = parser.parse_args()
    device = device_for(parser, args.tiny)
    from benchmarks import gpu_cycle, gpu_kernels
    from benchmarks.report import write

    start = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 140)
    tests = None
    if not args.tiny:
        tests = gpu_kernels.run_tests(TEST_SECONDS)
        print("tests:", tests["passed"], f"{tests['seconds']} s", *tests["end"], sep="\n", flush=True)

    def say(line: str) -> None:
        print(line, flush=True)

    kernels = gpu_kernels.run(args.tiny, device, KERNEL_SECONDS, say)
    console.print(gpu_kernels.table_of(kernels["rows"]))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    cycle = gpu_cycle.run(args.tiny, device, SECONDS - (time.monotonic() - start), say)
    console.print(gpu_cycle.table_of(cycle["rows"]))
    for part in (kernels["failed"], kernels["cut"], cycle["cut"]):
        for missing in part:
            print("missing:", missing)
    document = {"seconds": round(time.monotonic() - start, 1), "tests": tests, "kernels": kernels, "cycle": cycle}
    if args.tiny:
        print(json.dumps(document))
    else:
        write("gpu", document)
    if kernels["failed"] or (tests and tests["passed"] is False):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
