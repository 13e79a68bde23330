"""Adapters beside a product: the kernel and its twin against float64, rows alone and among others."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import grouped_lora as grouped_lora_reference
from specdec.kernels.reference.projection import Projection
from specdec.kernels.triton.grouped_lora import grouped_lora
from specdec.kernels.types.adapters import (
    AdaptedProduct,
    AdapterBuffer,
    AdapterRows,
    LowRank,
    StackedAdapters,
    fill_adapted,
)
from specdec.kernels.types.ragged_rows import RaggedRows
from tests.kernels.kernel_checks import DEVICE, DTYPES, assert_as_exact, poisoned_outputs
from tests.strategies import seeds

PLACES = 3
# Largest ranks of banks: of two blocks of numbers and of three, the last one cut.
RANKS = (18, 40)


@pytest.fixture(autouse=True, scope="module")
def nan_outputs() -> Iterator[None]:
    with poisoned_outputs("grouped_lora"):
        yield


def rows_of(adapters: Sequence[int], counts: Sequence[int]) -> RaggedRows:
    """Rows of requests as far as adapters need them."""
    total = sum(counts)
    empty = torch.zeros(total, dtype=torch.int64, device=DEVICE)
    return RaggedRows(counts, counts, counts, empty[None], empty, empty[:, None], 8, adapters=adapters)


def bank_with(
    ranks: Sequence[Sequence[int]], inputs: int, columns: Sequence[int], dtype: torch.dtype, seed: int
) -> tuple[AdaptedProduct, list[list[LowRank]]]:
    """A product with an adapter of `ranks[place - 1][part]` in each place, and the adapters; in the smallest bank."""
    generator = torch.Generator().manual_seed(seed)
    most = next(size for size in RANKS if size >= max(map(max, ranks)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    given = [
        [LowRank(normal(rank, inputs), normal(size, rank)) for rank, size in zip(own, columns, strict=True)]
        for own in ranks
    ]
    weight = torch.zeros(sum(columns), inputs, dtype=dtype, device=DEVICE)
    bank = StackedAdapters(grouped_lora, PLACES, most)
    product = bank.adapt({"qkv": (Projection(weight), (inputs, *columns))}, weight)["qkv"]
    for place, parts in enumerate(given, 1):
        # What lay there before leaves no trace.
        product.put(place, [LowRank(normal(most, inputs), normal(size, most)) for size in columns])
        product.put(place, parts)
    return product, given


# 17 rows of an adapter are one more than a tile has; so may be those of two requests.
requests = st.lists(st.tuples(st.integers(0, PLACES), st.sampled_from([1, 3, 9, 16, 17])), min_size=1, max_size=4)
part_ranks = st.lists(st.sampled_from([0, 1, 7, 16, 17, RANKS[1]]), min_size=2, max_size=2)


@pytest.mark.long
@given(
    seeds,
    requests,
    st.lists(part_ranks, min_size=PLACES, max_size=PLACES),
    st.sampled_from([5, 64, 129, 200]),
    st.sampled_from([(3, 130), (64, 16), (200, 7)]),
    st.sampled_from(DTYPES),
)
@example(0, [(1, 20), (0, 3), (2, 1), (1, 5)], [[16, 40], [1, 0], [0, 0]], 129, (200, 7), torch.bfloat16)
def test_it_adds_what_each_rows_adapter_makes(
    seed: int,
    batch: list[tuple[int, int]],
    ranks: list[list[int]],
    inputs: int,
    columns: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    product, given = bank_with(ranks, inputs, columns, dtype, seed)
    adapters, counts = zip(*batch, strict=True)
    total = sum(counts)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(total, inputs, generator=generator).to(DEVICE, dtype)
    before = torch.randn(total, sum(columns), generator=generator).to(DEVICE, dtype)
    rows = AdapterRows.of(rows_of(adapters, counts))
    if rows is None:
        assert not any(adapters)
        return
    actual, plain, exact = before.clone(), before.clone(), before.double()
    grouped_lora(x, actual, product.stacked, rows)
    grouped_lora_reference.grouped_lora(x, plain, product.stacked, rows)
    starts = list(itertools.accumulate(columns, initial=0))
    ends = list(itertools.accumulate(counts))
    for place, count, end in zip(adapters, counts, ends, strict=True):
        own = slice(end - count, end)
        if not place:
            # Not even written.
            assert actual[own].equal(before[own])
            assert plain[own].equal(before[own])
            continue
        for part, (down, up) in enumerate(given[place - 1]):
            added = x[own].double() @ down.to(DEVICE).double().T @ up.to(DEVICE).double().T
            exact[own, starts[part] : starts[part + 1]] += added
    # Two products in a row, each in an order of its own.
    assert_as_exact(actual, plain, exact, slack=4, roundings=inputs**0.5)
    alone = before[ends[0] - counts[0] : ends[0]].clone()
    if first := AdapterRows.of(rows_of(adapters[:1], counts[:1])):
        grouped_lora(x[: counts[0]], alone, product.stacked, first)
        assert alone.equal(actual[: counts[0]])


def test_a_graphs_buffer_holds_the_rows_of_any_step() -> None:
    """Unused tiles and rows do nothing, whatever they held before."""
    product, _ = bank_with([[4, 18], [1, 1], [3, 3]], 24, (16, 8), torch.float32, 0)
    x = torch.randn(22, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    steps = [AdapterRows.of(rows_of(*each)) for each in (([1, 2, 0], [17, 3, 2]), ([0, 3, 1], [3, 2, 17]))]
    rows = AdapterBuffer(30, 3, DEVICE).rows(22)
    alone = [torch.zeros(22, 24, device=DEVICE) for _ in steps]
    for step, out in zip(steps, alone, strict=True):
        assert step is not None
        grouped_lora(x, out, product.stacked, step)
    for number in (0, 1, 0):
        step, expected = steps[number], alone[number]
        assert step is not None
        fill_adapted(rows, step)
        found = torch.zeros(22, 24, device=DEVICE)
        grouped_lora(x, found, product.stacked, rows)
        assert found.equal(expected)
        grouped_lora_reference.grouped_lora(x, found.zero_(), product.stacked, rows)
        torch.testing.assert_close(found, expected)


def test_a_product_adds_adapters_only_where_rows_have_them() -> None:
    product, given = bank_with([[4, 2], [1, 1], [3, 3]], 24, (16, 8), torch.float32, 0)
    x = torch.randn(5, 24, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    product.bank.use(rows_of((), [5]))
    assert not product(x).any()
    product.bank.use(rows_of([0, 2], [3, 2]))
    found = product(x)
    assert not found[:3].any()
    expected = torch.cat([x[3:] @ down.to(DEVICE).T @ up.to(DEVICE).T for down, up in given[1]], 1)
    torch.testing.assert_close(found[3:], expected)


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.zeros(3, 8), torch.zeros(3, 24)),
        (torch.zeros(3, 24), torch.zeros(2, 24)),
        (torch.zeros(3, 24, dtype=torch.float16), torch.zeros(3, 24)),
        (torch.zeros(3, 48)[:, ::2], torch.zeros(3, 24)),
    ],
)
def test_other_shapes_dtypes_and_strides_are_refused(x: Tensor, out: Tensor) -> None:
    product, _ = bank_with([[4, 2]] * PLACES, 24, (16, 8), torch.float32, 0)
    rows = AdapterRows.of(rows_of([1], [3]))
    assert rows is not None
    # A copy to a GPU would have strides of its own.
    there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    with pytest.raises(ValueError, match=r"rows of|must be one of|must end in 1"):
        grouped_lora(there, out.to(DEVICE), product.stacked, rows)
