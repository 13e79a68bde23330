"""Which kernels are profiled, and what is read from the profiler's report."""

import json
import sys
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


def test_a_report_of_each_is_left_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a profiler that runs nothing."""
    words, details = tmp_path / "words", tmp_path / "details"
    details.write_text(DETAILS)
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\necho "$@" >>{words}\n[ "$1" != --import ] || cat {details}\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "kernels.json").write_text(json.dumps({"rows": [row("a", 1, n=1), row("b", 5, n=2), row("c", 7, n=4)]}))
    stage = Stage("profile", torch.device("cuda"), tmp_path, time.monotonic() + 60)
    profile.run(stage)
    assert stage.failures == []
    assert [(one["kernel"], one["shape"], len(one["launches"])) for one in stage.figures["kernels"]] == [
        ("c", {"n": 4}, 2),
        ("b", {"n": 2}, 2),
    ]
    profiled, read = words.read_text().splitlines()[:2]
    assert f"--clock-control none --force-overwrite --export {tmp_path}/c.ncu-rep {sys.executable} -m" in profiled
    assert profiled.endswith('benchmarks.gpu.one_kernel c --shape {"n": 4} --large')
    assert read == f"--import {tmp_path}/c.ncu-rep --page details --csv"
    assert stage.table is not None
    assert [*stage.table.columns[3].cells] == ["81.5 us", "3.1 us"] * 2


def test_without_figures_of_kernels_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kernels.json is not there; run the stage kernels first, or name"):
        profile.run(Stage("profile", torch.device("cpu"), tmp_path, time.monotonic()))
