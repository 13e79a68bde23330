"""Work in several threads, each of which computes alone."""

import threading

import pytest
import torch

from specdec.kernels.types.threads import in_threads


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("items", [0, 1, 5])
def test_items_are_computed_alone_and_in_order(threads: int, items: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = in_threads(lambda item: (item, torch.get_num_threads()), range(items))
        assert seen == [(item, 1) for item in range(items)]
        assert torch.get_num_threads() == threads
        with pytest.raises(ZeroDivisionError):
            in_threads(lambda item: 1 // item, [1, 0])
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_items_are_computed_side_by_side() -> None:
    before, both = torch.get_num_threads(), threading.Barrier(2, timeout=60)
    torch.set_num_threads(2)
    try:
        in_threads(lambda _: both.wait(), [0, 1])
    finally:
        torch.set_num_threads(before)
