"""Memory for weights: no overlaps, aligned, and returned with its last tensor."""

import gc
import mmap
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.native import huge_pages
from specdec.kernels.native.huge_pages import ALIGNMENT, PAGE, HugePages

SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3)


@given(st.lists(st.tuples(SHAPES, st.sampled_from([torch.uint8, torch.bfloat16, torch.float32])), max_size=12))
def test_tensors_do_not_overlap(wanted: list[tuple[list[int], torch.dtype]]) -> None:
    # Pieces so small that some tensors begin a new one, and some have their own.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huge_pages, "PIECE", 256 << 10)
        memory = HugePages()
        tensors = [memory.empty(shape, dtype).fill_(i) for i, (shape, dtype) in enumerate(wanted)]
    for i, (tensor, (shape, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
        assert tensor.shape == torch.Size(shape)
        assert tensor.dtype == dtype
        assert (tensor == i).all()
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0


def test_small_tensors_share_a_page() -> None:
    memory = HugePages()
    first, second = (memory.empty((100,), torch.float32) for _ in range(2))
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() == first.data_ptr() + ALIGNMENT


def test_memory_is_returned_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mapping(mmap.mmap):
        """One that can be referred to weakly."""

    monkeypatch.setattr(mmap, "mmap", Mapping)
    found: list[weakref.ref[Mapping]] = []
    advise = Mapping.madvise
    monkeypatch.setattr(
        Mapping, "madvise", lambda self, *given: (found.append(weakref.ref(self)), advise(self, *given))
    )
    memory = HugePages()
    tensors = [memory.empty((10,), torch.uint8), memory.empty((10,), torch.uint8)]
    del memory
    tensors.pop()
    gc.collect()
    assert [mapping() is None for mapping in found] == [False]
    tensors.clear()
    gc.collect()
    assert [mapping() is None for mapping in found] == [True]


def test_a_system_that_refuses_such_pages_gets_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError("not supported")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert HugePages().empty((3, 4), torch.float32).fill_(1).sum() == 12
