# mypy: allow-untyped-defs, allow-untyped-decorators
"""What a GPU would not forgive is not forgiven by Triton's interpreter in tests either."""

import pytest
import torch
import triton
import triton.language as tl

from specdec.execution.cuda_graphs import CudaGraphs
from tests.simulated_gpu import GPU, simulated_gpu
from tests.triton_interpreter import SEED

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels do not run in the interpreter")
PROGRAMS = 12


@triton.jit
def _sum_before(p_sums):
    """Add its own number to what another program has written, which nothing orders."""
    i = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(p_sums + i + 1, tl.load(p_sums + i) + i)


@triton.jit(do_not_specialize=["kept"])
def _product(p_product, count, kept, scale):
    tl.store(p_product, count * kept.to(tl.int64) * scale)


@triton.jit
def _cast(p_product, count):
    tl.store(p_product, count.to(tl.int64))


@triton.jit
def _count(p_counts):
    i = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(p_counts + i, tl.load(p_counts + i) + 1)


def test_a_race_between_programs_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by another result with another seed; the same seed gives the same."""
    found = []
    for seed in (1, 2, 1):
        monkeypatch.setenv(SEED, str(seed))
        sums = torch.zeros(PROGRAMS + 1, dtype=torch.int64)
        _sum_before[(PROGRAMS // 4, 4)](sums)
        assert sums[1:].tolist() != [i * (i + 1) // 2 for i in range(PROGRAMS)]
        found.append(sums.tolist())
    assert found[0] == found[2] != found[1]


def test_every_program_runs_once() -> None:
    counts = torch.zeros(30, dtype=torch.int32)
    _count[(2, 5, 3)](counts)
    assert counts.tolist() == [1] * 30


def test_a_captured_kernel_runs_at_its_replay_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_gpu(monkeypatch):
        counts = torch.zeros(30, dtype=torch.int32, device=GPU)
        replay = CudaGraphs(GPU).capture(lambda: _count[(2, 5, 3)](counts))
        # The run before the capture.
        assert counts.tolist() == [1] * 30
        replay()
        assert counts.tolist() == [2] * 30


def test_integers_of_one_are_constants() -> None:
    """But for those that are not to be specialised, for other integers, and for other types."""
    product = torch.zeros(1, dtype=torch.int64)
    _product[(1,)](product, 1, 1, 7.0)
    assert product.item() == 7
    _cast[(1,)](product, 3)
    assert product.item() == 3
    with pytest.raises(Exception, match="'int' object has no attribute 'to'"):
        _cast[(1,)](product, 1)


def test_bfloat16_is_rounded_to_nearest() -> None:
    @triton.jit
    def rounded(p_x, p_rounded):
        o = tl.arange(0, 4)
        tl.store(p_rounded + o, tl.load(p_x + o))

    x = torch.tensor([1.0, 1 + 3 * 2.0**-9, 1 + 2.0**-8, float("inf")])
    found = torch.empty(4, dtype=torch.bfloat16)
    rounded[(1,)](x, found)
    assert found.tolist() == x.bfloat16().tolist() != x.tolist()
