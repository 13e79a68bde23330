"""The Triton attention against its twin in plain torch, by their errors against float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.reference import tree_attention as tree_attention_reference
from specdec.kernels.triton import attention_plan
from specdec.kernels.triton.attention_plan import (
    CONFIGS,
    HOPPER_CONFIGS,
    AttentionGeometry,
    Chip,
    Plan,
    PlanCapacity,
    chip_of,
)
from specdec.kernels.triton.tree_attention import HEAD_DIMS, JOINED_PARTS, tree_attention
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree import DraftTree
from tests.kernels import attention_cases
from tests.kernels.attention_cases import Case, Part, biases, blocks, build, star, windows
from tests.kernels.kernel_checks import DEVICE, DTYPES, ROUNDING, huge, on_device, poisoned_outputs
from tests.strategies import draft_trees, seeds

# Of a part of which a row sees nothing, the interpreter says so.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")]
SCALE = 0.3
# Roundings of float32 on the way from scores to weights, at least; a score adds those of its sum.
FEW_ROUNDINGS = 8
EMPTY = DraftTree()
# A path of 128 nodes.
LINE = DraftTree((1,) * 128, tuple(range(-1, 127)))


class Shape(NamedTuple):
    """Sizes that a model adds to a case."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype


@st.composite
def parts(draw: st.DrawFn, first: int, longest: int, most_rows: int) -> Part:
    cached = draw(st.integers(first, longest))
    tree = draw(draft_trees(max_nodes=most_rows, vocab_size=50))
    if tree and cached > first and draw(st.booleans()):
        # A level of a tree that is being drafted: the levels above it are in the cache already.
        return Part(cached, 0, tree, draw(st.integers(1, len(tree))))
    return Part(cached, draw(st.integers(1, most_rows)), tree, len(tree))


@st.composite
def cases(draw: st.DrawFn, most: int = 3, longest: int = 60, most_rows: int = 15) -> Case:
    first = draw(st.integers(0, 1))
    requests = draw(st.lists(parts(first, longest, most_rows), min_size=1, max_size=most))
    return Case(
        requests,
        draw(st.sampled_from([1, 4, 7, 8])),
        draw(st.sampled_from([8, 16, 24])),
        first,
        draw(seeds),
        draw(windows(requests)),
        draw(st.booleans()),
    )


shapes = st.builds(Shape, st.sampled_from([1, 1, 2]), st.sampled_from(HEAD_DIMS), st.sampled_from(DTYPES))


class Built(NamedTuple):
    """A case as tensors, and per row which slots it sees; NaN wherever nothing was written."""

    query: Tensor
    kv: Tensor
    rows: RaggedRows
    slots_seen: list[list[int]]
    window: int
    slopes: Tensor | None


def built_for(case: Case, shape: Shape) -> Built:
    """The query is columns of a wider tensor, as of a fused QKV."""
    return widened(build(case), case, shape)


def widened(made: attention_cases.Built, case: Case, shape: Shape) -> Built:
    heads = shape.kv_heads * case.group
    generator = torch.Generator().manual_seed(case.seed)
    written = ~made.kv[:, 0, 0].isnan()
    kv = torch.full((len(written), 2 * shape.kv_heads, shape.head_dim), float("nan"))
    kv[written] = torch.randn(int(written.sum()), *kv.shape[1:], generator=generator)
    wide = torch.full((len(made.slots_seen), heads + 2 * shape.kv_heads, shape.head_dim), float("nan"))
    wide[:, :heads] = torch.randn(len(wide), heads, shape.head_dim, generator=generator)
    wide, kv = wide.to(DEVICE, shape.dtype), kv.to(DEVICE, shape.dtype)
    slopes = case.slopes(shape.kv_heads, torch.float32)
    slopes = None if slopes is None else slopes.to(DEVICE)
    return Built(wide[:, :heads], kv, on_device(made.rows), made.slots_seen, case.window, slopes)


def exact_attention(built: Built, of: Callable[[Tensor], Tensor] = torch.clone) -> Tensor:
    """One row at a time: softmax over the keys that it sees, in float64; `of` the values."""
    kv = built.kv.double().cpu().unflatten(1, (2, -1))
    group = built.query.shape[1] // kv.shape[2]
    output = []
    for query, slots in zip(built.query.double().cpu(), built.slots_seen, strict=True):
        keys, values = kv[slots].repeat_interleave(group, dim=2).unbind(1)
        slopes = None if built.slopes is None else built.slopes.cpu()
        scores = torch.einsum("hd,khd->kh", query, keys) * SCALE + biases(slopes, len(slots))
        weights = torch.softmax(scores, 0)
        output.append(torch.einsum("kh,khd->hd", weights, of(values)))
    return torch.stack(output).to(built.query.device)


def largest_sum(built: Built) -> float:
    """Return the largest sum of magnitudes that a score is the sum of: a share of it is lost by each rounding."""
    keys = (
        built.kv[:, : built.kv.shape[1] // 2]
        .double()
        .cpu()
        .abs()
        .repeat_interleave(2 * built.query.shape[1] // built.kv.shape[1], dim=1)
    )
    queries = zip(built.query.double().cpu().abs(), built.slots_seen, strict=True)
    return SCALE * max(torch.einsum("hd,khd->kh", query, keys[slots]).max().item() for query, slots in queries)


def attended(built: Built) -> tuple[Tensor, Plan]:
    """By the kernel, whose output and parts are NaN before, and how; planned anew."""
    rows = replace(built.rows)
    with poisoned_outputs("tree_attention"):
        output = tree_attention(built.query, built.kv, rows, SCALE, built.window, built.slopes)
    (plan,) = rows.plans.values()
    return output, plan


def assert_attends(actual: Tensor, built: Built) -> None:
    """The largest error is at most twice the twin's, or those of rounded weights and results, and a trifle."""
    plain, exact = (
        tree_attention_reference.tree_attention(built.query, built.kv, built.rows, SCALE, built.window, built.slopes),
        exact_attention(built),
    )
    assert actual.dtype == plain.dtype
    assert actual.shape == plain.shape
    ours, theirs = ((part.double() - exact).abs().max().item() for part in (actual, plain))
    largest = exact.abs().max().item()
    trifle = ROUNDING[torch.float32] * max(FEW_ROUNDINGS, largest_sum(built))
    roundings = ROUNDING[actual.dtype] * (largest + exact_attention(built, torch.abs).max().item())
    # NaN fails.
    assert ours <= max(2 * theirs, roundings) + trifle * largest, (ours, theirs)


@contextmanager
def planning(processors: int, min_part: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "specdec.kernels.triton.tree_attention.chip_of", lambda device: Chip(processors, chip_of(device)[1])
        )
        patch.setattr(attention_plan, "MIN_PART", min_part)
        yield


@pytest.mark.long
@given(cases(), shapes)
@example(Case([Part(0, 1, EMPTY, 0)], 1, 8, 0, 0), Shape(1, 16, torch.float32))
@example(Case([Part(7, 1, star(8), 8)], 7, 8, 0, 0), Shape(2, 80, torch.bfloat16))
@example(Case([Part(63, 1, star(128), 128)], 1, 16, 0, 0), Shape(1, 32, torch.bfloat16))
@example(
    Case([Part(9, 0, DraftTree((1, 2) * 64, tuple(range(-1, 127))), 20)], 4, 24, 1, 0), Shape(1, 64, torch.float32)
)
@example(Case([Part(0, 130, EMPTY, 0), Part(300, 1, EMPTY, 0)], 4, 16, 0, 0), Shape(1, 128, torch.float16))
@example(Case([Part(63, 1, LINE, 128)], 1, 16, 0, 0, alibi=True), Shape(2, 32, torch.float32))
@example(Case([Part(95, 1, LINE, 70)], 4, 16, 0, 0, 140, alibi=True), Shape(1, 16, torch.bfloat16))
def test_errors_are_no_larger_than_the_twins(case: Case, shape: Shape) -> None:
    built = built_for(case, shape)
    output, _ = attended(built)
    assert_attends(output, built)


def test_rows_of_a_block_see_each_other_across_tiles() -> None:
    """Eight heads of a group fill a tile of 16 with two rows; the block has seven."""
    shape = Shape(1, 16, torch.float32)
    built = widened(blocks([9, 30], 7, 8), Case([], 8, 8, 1, 3), shape)
    output, plan = attended(built)
    assert plan.height // 8 < 7
    assert_attends(output, built)


@pytest.mark.long
@given(cases(most=1, longest=100, most_rows=5), shapes)
@example(Case([Part(33 * JOINED_PARTS, 1, star(3), 3)], 4, 16, 0, 0), Shape(2, 16, torch.float32))
@example(Case([Part(1, 100, EMPTY, 0)], 1, 16, 1, 0), Shape(1, 64, torch.bfloat16))
@example(
    Case([Part(2, 0, DraftTree((48, 2, 32, 25, 30), (-1, 0, 1, 2, 3)), 2)], 7, 8, 0, 1), Shape(1, 256, torch.float32)
)
def test_contexts_in_parts_give_the_same(case: Case, shape: Shape) -> None:
    built = built_for(case, shape)
    with planning(processors=1, min_part=10**6):
        whole, plan = attended(built)
    assert not plan.num_parts
    with planning(processors=10**6, min_part=1):
        cut, plan = attended(built)
    tiles = built.rows.tiles(plan.height // case.group, case.window)
    assert bool(plan.num_parts) == (max(tile.end - tile.begin for tile in tiles) > plan.config.keys)
    assert_attends(whole, built)
    assert_attends(cut, built)


def plan_of(rows: RaggedRows, group: int, kv_heads: int, processors: int, window: int = 0) -> Plan:
    return Plan.make(rows, AttentionGeometry(2, 128, group, kv_heads, window), HOPPER_CONFIGS[2, 128], processors)


@pytest.mark.long
@given(cases(most=4, longest=3000), st.integers(1, 8), st.sampled_from([1, 16, 132]))
def test_every_row_meets_every_entry_once(case: Case, kv_heads: int, processors: int) -> None:
    rows = build(case).rows
    plan = plan_of(rows, case.group, kv_heads, processors, case.window)
    met: dict[int, list[tuple[int, int]]] = {}
    of_part: dict[int, int] = {}
    for request, start, count, begin, end, tree_start, part, _ in plan.items.tolist():
        assert tree_start == rows.tree_starts[request]
        assert count * case.group <= plan.height
        for row in range(start, start + count):
            met.setdefault(row, []).append((begin, end))
        if part >= 0:
            assert of_part.setdefault(part, start) == start
    assert sorted(of_part) == list(range(plan.num_parts))
    assert sorted(part for _, _, at, n in plan.joins.tolist() for part in range(at, at + n)) == sorted(of_part)
    row = 0
    firsts = rows.begins(case.window).tolist()
    for place, (count, length) in enumerate(zip(rows.query_lens, rows.lengths, strict=True)):
        begin = case.begin(place)
        for entry in range(length - count, length):
            ranges = sorted(met.pop(row))
            # From the first, without gaps, to its own entry at least and to the tile's last row's at most.
            if case.window:
                assert begin <= ranges[0][0] <= max(begin, firsts[row])
                assert begin == ranges[0][0] or ranges[0][0] > entry - case.window - plan.height - 40
            else:
                assert ranges[0][0] == begin
            assert all(before[1] == after[0] for before, after in pairwise(ranges))
            assert entry < ranges[-1][1] <= min(length, entry + plan.height // case.group)
            row += 1
    assert not met


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(0, 5),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([0, 0, 70]),
    st.sampled_from([1, 16, 132]),
)
def test_plans_of_levels_cover_what_each_level_sees(
    known: list[int], width: int, levels: int, group: int, window: int, processors: int
) -> None:
    """A level has `width` more entries a request; a tile meets each entry that one of its rows may see once."""
    heads, nothing = AttentionGeometry(2, 128, group, 8, window), torch.zeros(1, 1)
    rows = RaggedRows([width] * len(known), [n + width for n in known], known, nothing, nothing, nothing, 16)
    configs = HOPPER_CONFIGS[2, 128]
    height = attention_plan.best_height(rows, group, configs)
    tiles = len(known) * -(-width // (height // group))
    capacity = PlanCapacity.of(tiles, heads.kv_heads, processors)
    plan = Plan.make(rows, heads, configs, processors, height)
    plans = plan.of_levels(attention_plan.seen_more(levels, width, torch.device("cpu")))
    assert len(plans) == levels
    for level, plan in enumerate(plans):
        grown = replace(rows, lengths=[n + (level + 1) * width for n in known])
        met: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for request, start, number, begin, end, tree_start, *_ in plan.items.tolist():
            assert tree_start == known[request]
            met.setdefault((request, start, number), []).append((begin, end))
        tiles_of = grown.tiles(height // group, window)
        assert set(met) == {(tile.request, tile.start, tile.rows) for tile in tiles_of}
        for tile in tiles_of:
            ranges = sorted(met[tile.request, tile.start, tile.rows])
            assert (ranges[0][0], ranges[-1][1]) == (tile.begin, tile.end)
            assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert len(plan.items) <= capacity.items
        assert plan.items.data_ptr() % 16 == 0
        assert plan.joins.equal(plans[0].joins)


def rows_of(requests: list[tuple[int, int]]) -> RaggedRows:
    """Chains: cached entries, query rows."""
    return build(Case([Part(cached, count, EMPTY, 0) for cached, count in requests], 1, 16, 0, 0)).rows


@pytest.mark.parametrize(
    ("requests", "height", "cut"),
    [
        ([(4000, 1)], 16, True),
        ([(60, 1)], 16, False),
        ([(300, 1)], 16, True),
        ([(2000, 1)] * 40, 16, False),
        ([(300, 1)] * 40 + [(30000, 1)], 16, True),
        ([(0, 2048)], 64, False),
        ([(60, 16)], 64, False),
        ([(300, 16)], 64, True),
    ],
)
def test_plans_follow_the_work(requests: list[tuple[int, int]], height: int, cut: bool) -> None:
    """Plans of Llama-3.1-8B on an H100 have tall tiles for many rows, and parts where processors would idle."""
    plan = plan_of(rows_of(requests), 4, 8, 132)
    assert plan.height == height
    assert bool(plan.num_parts) == cut
    spans = [end - begin for _, _, _, begin, end, *_ in plan.items.tolist()]
    assert spans == sorted(spans, reverse=True)
    # Partial results stay small: each processor's share is cut by half at most.
    assert plan.num_parts <= 2 * 132 / 8


def test_items_without_rows_do_nothing() -> None:
    """Therefore a captured graph with more programs than a step needs can serve the step."""
    built = built_for(Case([Part(20, 1, star(3), 3)], 4, 16, 0, 0), Shape(2, 16, torch.float32))
    expected, _ = attended(built)
    rows = replace(built.rows)
    for _ in range(2):
        tree_attention(built.query, built.kv, rows, SCALE)
    ((key, plan),) = rows.plans.items()
    nothing = plan.items.new_tensor([[0, 0, 0, 0, 0, 0, -1, 0]] * 2)
    rows.plans[key] = plan._replace(items=torch.cat([nothing, plan.items]))
    assert torch.equal(tree_attention(built.query, built.kv, rows, SCALE), expected)


def test_slots_and_rows_beyond_int32() -> None:
    """Element 2**31 of the cache is the first of block 2**22; the block before it is the control."""
    head_dim, size = 16, 16
    small = built_for(Case([Part(3 * size - 3, 1, star(2), 2)], 2, size, 0, 0), Shape(1, head_dim, torch.bfloat16))
    blocks = [2**22 - 1, 2**22, 2**22 + 5]
    kv = huge((2**22 + 6) * size * 2 * head_dim).view(-1, 2, head_dim)
    kv[2**22 * size - size :].fill_(float("nan"))
    for block, old in zip(blocks, small.rows.block_tables[0].tolist(), strict=True):
        kv[block * size : (block + 1) * size] = small.kv[old * size : (old + 1) * size]
    query = huge(2 * 2**30 + 2 * head_dim).as_strided(small.query.shape, (2**30, head_dim, 1))
    query.copy_(small.query)
    rows = replace(small.rows, block_tables=torch.tensor([blocks], device=DEVICE))
    assert kv[blocks[1] * size :].storage_offset() == 2**31
    assert query[2].storage_offset() == 2**31
    expected, _ = attended(small)
    assert torch.equal(tree_attention(query, kv, rows, SCALE), expected)


def refused(message: str, shape: Shape, group: int = 4, nodes: int = 3, **changes: Any) -> None:
    case = Case([Part(4, 1, star(nodes), nodes)], group, 8, 0, 0)
    built = built_for(case, shape)._replace(**changes)
    with pytest.raises(ValueError, match=message) as caught:
        attended(built)
    assert "\n" not in str(caught.value)


def test_unsupported_shapes_are_refused() -> None:
    shape = Shape(2, 16, torch.float32)
    refused(r"query is torch.float64.* must be one of .*bfloat16", shape._replace(dtype=torch.float64))
    refused(r"cache torch.float16", shape, kv=torch.zeros(8, 4, 16, dtype=torch.float16))
    refused(r"head_dim is 100, .* must be one of \(16, .*256\)", shape._replace(head_dim=100))
    refused(r"in the cache 32", shape, kv=torch.zeros(8, 4, 32))
    refused(r"8 query heads are no multiple of 3 KV heads", shape, kv=torch.zeros(8, 6, 16))
    refused(r"strides .* must end in 1", shape, kv=torch.zeros(8, 16, 4).transpose(1, 2))
    refused(r"ancestors of 3 words; at most 2, 128 nodes", shape, nodes=129)
    refused(r"33 query heads per KV head: at most 32", shape, group=33)


def test_every_supported_shape_has_a_config() -> None:
    for dim in HEAD_DIMS:
        for dtype in DTYPES:
            padded = 1 << (dim - 1).bit_length()
            for configs in (CONFIGS, HOPPER_CONFIGS):
                assert configs[dtype.itemsize, padded]
