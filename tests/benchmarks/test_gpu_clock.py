"""The GPU clock on a simulated GPU: every kernel call can be captured and replayed, and the host waits for none."""

import time

import pytest
import torch

from benchmarks.gpu import clock
from benchmarks.gpu.kernels import subjects
from benchmarks.gpu.race import Race
from benchmarks.gpu.sizes import TINY
from tests.simulated_gpu import GPU, simulated_gpu

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")]


@pytest.mark.long
def test_every_kernel_is_captured_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "FLUSHED_BYTES", 1 << 10)
    with simulated_gpu(monkeypatch), torch.cuda.device(GPU):
        race = Race(clock.CudaClock(GPU), 1, 1, time.monotonic() + 600)
        measured = set()
        for subject in subjects(TINY, GPU):
            case = subject.build()
            row = race.measure(subject._replace(build=lambda case=case: case._replace(peers={})))
            assert row["error"] <= row["error_bound"]
            assert row["us"] > 0
            measured.add(subject.kernel)
    assert {"swap", "filter_logits", "coupled_walk", "rejection_walk", "tree_attention"} < measured
