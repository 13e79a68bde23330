"""Which kernels are profiled, and what is read from the profiler's report."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import profile
from benchmarks.gpu.stage import Stage

# What `ncu --page details --csv` prints, with the columns that are read, and some that are not.
DETAILS = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Description"
"0","7","tree_attention_kernel","GPU Speed Of Light Throughput","Duration","us","81.5","",""
"0","7","tree_attention_kernel","GPU Speed Of Light Throughput","Memory Throughput","%","73.20","",""
"0","7","tree_attention_kernel","GPU Speed Of Light Throughput","","","","SOLBottleneck","Memory is, more or less, busy"
"0","7","tree_attention_kernel","Launch Statistics","Grid Size","","1,024","",""
"1","7","join_kernel","GPU Speed Of Light Throughput","Duration","us","3.1","",""
"""


def row(kernel: str, us: float, **shape: int) -> dict[str, Any]:
    return {"kernel": kernel, "us": us, "shape": shape}


def test_the_slowest_kernels_are_profiled_each_at_its_slowest_shape() -> None:
    rows = [row("copy", 900), row("a", 1, n=1), row("b", 5, n=2), row("b", 50, n=3), row("c", 7, n=4), row("b", 9, n=5)]
    assert profile.slowest(rows) == [row("b", 50, n=3), row("c", 7, n=4)]


def test_metrics_are_read_by_launch() -> None:
    first, second = profile.launches_of(DETAILS.splitlines())
    assert first == {
        "name": "tree_attention_kernel",
        "metrics": {
            "GPU Speed Of Light Throughput: Duration": "81.5 us",
            "GPU Speed Of Light Throughput: Memory Throughput": "73.20 %",
            "Launch Statistics: Grid Size": "1,024",
        },
    }
    assert second["name"] == "join_kernel"
    with pytest.raises(ValueError, match="names no launch: ==ERROR== ERR_NVGPUCTRPERM"):
        profile.launches_of(["==ERROR== ERR_NVGPUCTRPERM"])


def test_without_figures_of_kernels_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kernels.json is not there; run the stage kernels first, or name"):
        profile.run(Stage("profile", torch.device("cpu"), tmp_path, time.monotonic()))
