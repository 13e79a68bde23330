"""The device that the GPU benchmarks run on."""

import argparse
import os

import torch


def device_for(parser: argparse.ArgumentParser, tiny: bool) -> torch.device:
    """Return the GPU; without one, the CPU for a tiny run in Triton's interpreter.

    Call this before anything imports Triton, which decides at import whether it interprets its kernels.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not tiny:
        parser.error("there is no GPU: --tiny runs without")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    return torch.device("cpu")
