"""The compiled argmax and moves of cache entries against those of plain torch, which they must equal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels import kv_copy_reference
from specdec.kernels.host_sampling import HostSampling
from specdec.kernels.native_library import Library, library_file
from specdec.kernels.native_operations import NativeOperations
from specdec.kernels.types import NoiseKey, NoiseRows
from specdec.verify.noise import GumbelNoise
from tests.kernels.native_forms import NOISE, libraries, library, normal

pytestmark = pytest.mark.skipif(library_file() is None, reason="the native kernels are not built here")
ODD_SCORES = [float("nan"), float("inf"), float("-inf"), 0.0, 3.0]


@given(libraries, st.integers(1, 70), st.integers(1, 5), st.data())
def test_argmax(own: Library, size: int, rows: int, data: st.DataObject) -> None:
    """The lowest of the largest, no token where something is not a number or the largest is not finite."""
    scores = normal(1, rows, size).mul(2).round().to(data.draw(st.sampled_from([own.dtype, torch.float32])))
    for row, at, score in data.draw(
        st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, size - 1), st.sampled_from(ODD_SCORES)), max_size=4)
    ):
        scores[row, at] = score
    if data.draw(st.booleans()):
        scores[0] = float("-inf")
    keys: list[NoiseKey | None] = [None] * rows
    if scores.dtype == torch.float32:
        keys = data.draw(st.lists(st.sampled_from([None, NoiseKey(1, 0, 4)]), min_size=rows, max_size=rows))
    expected = HostSampling(NOISE).gumbel_argmax(scores.clone(), NoiseRows(keys))
    assert NativeOperations(own, NOISE).gumbel_argmax(scores, NoiseRows(keys)).equal(expected)


def test_argmax_of_more_rows_than_noise_is_kept_for() -> None:
    scores = normal(1, 150, 40)
    noise = NoiseRows([NoiseKey(3, 0, position) for position in range(150)])
    expected = HostSampling(NOISE).gumbel_argmax(scores.clone(), noise)
    own = library("portable", 1, torch.float32)
    # Few vectors, so that early ones are gone when the last are made.
    small = GumbelNoise(torch.device("cpu"), cache_bytes=1)
    assert NativeOperations(own, small).gumbel_argmax(scores, noise).equal(expected)


@given(
    libraries,
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6, unique_by=lambda m: m[1]),
)
def test_moves(own: Library, moves: list[tuple[int, int]]) -> None:
    kv = normal(1, 3, 10, 2, 8).to(own.dtype)
    source, target = (torch.tensor(slots) for slots in zip(*moves, strict=True))
    expected = kv.clone()
    kv_copy_reference.move_kv(expected, source, target)
    NativeOperations(own, NOISE).move_kv(kv, source, target)
    assert kv.equal(expected)
