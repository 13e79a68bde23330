"""Collectives through shared memory: their results, and ranks that leave or cannot share."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist

from specdec.parallel import shared_slots as module
from specdec.parallel.rank_group import RankGroup, file_store
from specdec.parallel.shared_slots import FOLDER, SLOT, SharedSlots, shared_slots

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no memory that has files")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
SIZES = st.one_of(st.integers(0, 40), st.integers(SLOT // 8 - 2, SLOT + 2))


def each(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what ranks in threads return."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, range(size)))


def opened(size: int, timeout: float = 60.0) -> list[SharedSlots | None]:
    """Return the slots of all ranks, whose files have no name any more."""
    store = dist.HashStore()  # type: ignore[attr-defined, unused-ignore]
    with TemporaryDirectory(dir=FOLDER) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "FOLDER", Path(folder))
        found = each(size, lambda rank: shared_slots(rank, size, store, timeout))
        assert not list(Path(folder).iterdir())
    return found


def drawn(dtype: torch.dtype, length: int, seed: int) -> Tensor:
    numbers = torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (9 * numbers).to(dtype)


@pytest.mark.long
@settings(max_examples=25)
@given(
    st.integers(2, 4), st.lists(st.tuples(st.sampled_from(DTYPES), SIZES, st.booleans()), min_size=1, max_size=6),
    st.integers(0, 99),
)  # fmt: skip
def test_ranks_get_all_parts_and_one_sum(size: int, operations: list[tuple[torch.dtype, int, bool]], seed: int) -> None:
    """Operations of all lengths in turn, also of several slots; ranks come to them at any time."""
    slots = opened(size)
    given = [[drawn(dtype, length, seed + 7 * rank) for dtype, length, _ in operations] for rank in range(size)]

    def work(rank: int) -> list[Tensor]:
        own, found = slots[rank], []
        assert own is not None
        for place, (x, (dtype, _, is_sum)) in enumerate(zip(given[rank], operations, strict=True)):
            if (place + rank + seed) % 3 == 0:
                time.sleep(0.003)
            if is_sum and dtype != torch.bool:
                out = x.clone()
                own.all_reduce(out)
            else:
                parts = [torch.empty_like(x) for _ in range(size)]
                own.all_gather(x, parts)
                out = torch.stack(parts)
            found.append(out)
        return found

    for place, outs in enumerate(zip(*each(size, work), strict=True)):
        dtype, _, is_sum = operations[place]
        parts = [own[place] for own in given]
        expected = torch.stack(parts)
        if is_sum and dtype != torch.bool:
            expected = parts[0] + parts[1]
            for part in parts[2:]:
                expected = expected + part
        for out in outs:
            assert torch.equal(out, expected)


def test_a_rank_that_has_left_is_noticed_long_before_the_timeout() -> None:
    slots = opened(3, timeout=600.0)
    slots[1] = None
    start = time.monotonic()

    def work(rank: int) -> None:
        own = slots[rank]
        if own is not None:
            with pytest.raises(RuntimeError, match="rank 1 has closed its memory"):
                own.all_reduce(torch.zeros(3))

    each(3, work)
    assert time.monotonic() - start < 300


@pytest.mark.parametrize("lacks", ["memory", "library"])
def test_ranks_share_nothing_where_one_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacks: str) -> None:
    """They go on with gloo."""
    real, own_file, failed = module.SharedSlots, module._slot_file, []

    def fails_once(*args: Any) -> Any:
        if not failed:
            failed.append(True)
            if lacks == "memory":
                return None
            raise ValueError("not built")
        return (own_file if lacks == "memory" else real)(*args)

    monkeypatch.setattr(module, "_slot_file" if lacks == "memory" else "SharedSlots", fails_once)
    store = str(tmp_path / "store")
    groups = each(2, lambda rank: RankGroup(rank, 2, file_store(store), torch.device("cpu"), 60.0))
    assert failed
    assert [group._slots for group in groups] == [None, None]
    sums = each(2, lambda rank: groups[rank].all_reduce(torch.full([3], 1.0 + rank)))
    assert all(torch.equal(found, torch.full([3], 3.0)) for found in sums)
