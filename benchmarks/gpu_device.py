"""Where the benchmarks for a GPU run."""

import argparse
import os

import torch


def device_for(parser: argparse.ArgumentParser, tiny: bool) -> torch.device:
    """The GPU; where there is none, the CPU for a tiny run, with kernels to be interpreted.

    To be called before anything imports Triton, which asks then whether it is to interpret its kernels.
    """
    if torch.cuda.is_available():
        return torch.device("cuda")
    if not tiny:
        parser.error("there is no GPU: --tiny runs without")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    return torch.device("cpu")
