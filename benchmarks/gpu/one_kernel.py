"""Run cases of some kernels once each, for a profiler or a checker to look at.

    python -m benchmarks.gpu.one_kernel coupled_walk rejection_walk                                # all at tiny sizes
    python -m benchmarks.gpu.one_kernel coupled_walk --shape '{"rows": 64}' --large                # one, of an 8B model

A profiler that begins when the program asks for it sees the last call alone, with all that it had to compile before.
"""

import argparse
import json

import torch

from benchmarks.gpu.device import day_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="+")
    parser.add_argument("--shape", type=json.loads, help="of the one case to run; default: all")
    parser.add_argument("--large", action="store_true", help="shapes of an 8B model")
    args = parser.parse_args()
    device = day_device()
    from benchmarks.gpu.kernels import subjects
    from benchmarks.gpu.sizes import LLAMA_8B, TINY

    chosen = [
        subject
        for subject in subjects(LLAMA_8B if args.large else TINY, device)
        if subject.kernel in args.kernels and args.shape in (None, subject.shape)
    ]
    missing = {*args.kernels} - {subject.kernel for subject in chosen}
    if missing:
        parser.error(f"no case of {', '.join(sorted(missing))}" + (f" with {args.shape}" if args.shape else ""))
    for subject in chosen:
        case = subject.build()
        case.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        case.run()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        print(f"{subject.kernel} {subject.shape}: done", flush=True)


if __name__ == "__main__":
    main()
