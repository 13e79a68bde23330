"""The GPU clock on a simulated GPU: every kernel call can be captured and replayed, and the host waits for none."""

import time
from itertools import chain

import pytest
import torch

from benchmarks import gpu_attention, gpu_clock, gpu_operations, gpu_walks
from benchmarks.gpu_race import Race
from benchmarks.gpu_sizes import TINY
from tests.simulated_gpu import GPU, simulated_gpu

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


def test_every_kernel_is_captured_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_clock, "FLUSHED_BYTES", 1 << 10)
    with simulated_gpu(monkeypatch), torch.cuda.device(GPU):
        race = Race(gpu_clock.CudaClock(GPU), 1, 1, time.monotonic() + 600)
        parts = (gpu_operations, gpu_walks, gpu_attention)
        measured = set()
        for subject in chain.from_iterable(part.subjects(TINY, GPU) for part in parts):
            case = subject.build()
            row = race.measure(subject._replace(build=lambda case=case: case._replace(peers={})))
            assert row["error"] <= row["error_bound"]
            assert row["us"] > 0
            measured.add(subject.kernel)
    assert {"swap", "filter_logits", "tree_walk", "rejection_walk", "block_walk", "tree_attention"} < measured
