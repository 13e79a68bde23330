"""Pinned memory takes what it holds, for as long as something holds it."""

import gc
import math
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.kernels.types.pinned_memory import host_empty
from tests.simulated_pinned import SimulatedPinned

pytestmark = pytest.mark.slow

GPU, CPU = torch.device("cuda"), torch.device("cpu")
SMAPS = Path("/proc/self/smaps")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedPinned]:
    driver = SimulatedPinned()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    yield driver
    gc.collect()
    driver.check()
    assert driver.taken == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4), st.sampled_from([torch.uint8, torch.bfloat16, torch.float64])
)
def test_less_than_a_page_is_wasted(driver: SimulatedPinned, shape: list[int], dtype: torch.dtype) -> None:
    memory = host_empty(shape, dtype, GPU)
    assert (list(memory.shape), memory.dtype, memory.is_contiguous()) == (shape, dtype, True)
    size = math.prod(shape) * dtype.itemsize
    assert size <= driver.taken < size + mmap.PAGESIZE
    memory.fill_(3)
    assert bool((memory == 3).all())
    assert driver.holds(memory) == (size > 0)
    del memory
    assert driver.taken == 0


def test_views_keep_it_pinned(driver: SimulatedPinned) -> None:
    memory = host_empty((5, 3, 7), torch.float32, GPU)
    last = memory[4, 2]
    row = memory.view(5, -1).view(torch.uint8).numpy()[4]
    payload = memoryview(row)
    del memory, row
    assert driver.holds(last)
    del last
    assert driver.taken == mmap.PAGESIZE
    payload[0] = 1
    driver.check()
    del payload
    assert driver.taken == 0


def test_a_refusal_names_the_settings(driver: SimulatedPinned) -> None:
    driver.limit = 1 << 20
    kept = host_empty((1 << 19,), torch.uint8, GPU)
    with pytest.raises(ValueError, match=r"^0.000977 GiB of host memory .* \(out of memory\); lower cpu_bytes_to_use "):
        host_empty((1 << 20,), torch.uint8, GPU)
    assert driver.taken == kept.nbytes
    with pytest.raises(ValueError, match=r"GiB of host memory cannot be pinned .*Cannot allocate memory"):
        host_empty((1 << 60,), torch.uint8, GPU)


def test_a_forked_process_has_none_of_it(driver: SimulatedPinned) -> None:
    if not SMAPS.exists():
        pytest.skip("no /proc/self/smaps")
    memory = host_empty((1 << 16,), torch.uint8, GPU)
    lines = SMAPS.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"{memory.data_ptr():x}-"))
    flags = next(line for line in lines[place:] if line.startswith("VmFlags:"))
    # Linux: do not copy area on fork.
    assert "dc" in flags.split()
    assert driver.taken == 1 << 16


def test_a_cpu_pins_nothing(driver: SimulatedPinned) -> None:
    assert host_empty((3, 4), torch.float32, CPU).shape == (3, 4)
    assert driver.peak == 0


def test_the_simulation_counts_and_finds_faults() -> None:
    driver = SimulatedPinned()
    ours = torch.empty(5000, dtype=torch.uint8)
    driver.allocate(ours)
    assert (driver.taken, driver.holds(ours[4999:])) == (8192, True)
    del ours
    assert (driver.taken, driver.peak) == (0, 8192)
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    assert driver.cudaHostRegister(address, len(pages), 0) == 0
    assert driver.cudaHostRegister(address + mmap.PAGESIZE, 5, 0) == 712
    driver.check()
    del memory, pages
    with pytest.raises(AssertionError, match="was freed while registered"):
        driver.check()
    assert driver.cudaHostUnregister(address) == 0
    assert driver.cudaHostUnregister(address) == 713
    assert len(driver.faults) == 2
