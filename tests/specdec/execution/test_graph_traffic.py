"""Drawn traffic through the planning of real sizes: every step finds its graph, and no graph's memory is too small."""

import random
import secrets
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_heads.drafting.draft_graphs import LoopGraphs, Unread
from specdec.draft_heads.drafting.draft_levels import DraftLevels, own_bits
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow
from specdec.draft_heads.drafting.tree_draw import DrawSizes
from specdec.execution.dummy_rows import dummy_batch, dummy_draft_rows
from specdec.execution.graph_capture import MAX_DRAFT_PROBS_BYTES, draft_probs_buffer, step_tables
from specdec.kernels.triton.attention_plan import (
    CONFIGS,
    HOPPER_CONFIGS,
    AttentionGeometry,
    Plan,
    PlanCapacity,
    best_height,
    most_tiles,
    reachable_heights,
)
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.integers import ceil_div, next_power_of_2
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree import ROOT, DraftTree, TreeRow
from specdec.kernels.types.upload import Packet
from specdec.verify.pass_graphs import TOKEN_BUCKETS, GraphLimits, PassGraphs
from specdec.verify.sampling import Context, Sampling

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
BLOCK = 16
# As `LLM` chooses them for Llama-3.1-8B on a GPU.
SHAPE = DraftShape(6, 10, 60)
ADAPTERS = 4
STEPS = 6000


class Model(NamedTuple):
    """Sizes that a plan depends on, and the limits of an engine."""

    kv_heads: int
    group: int
    windows: tuple[int, ...]
    seats: int
    longest: int
    budget: int


MODELS = {
    "Llama-3.1-8B": Model(8, 4, (0,), 64, 8192, 2048),
    "its part of eight": Model(1, 4, (0,), 64, 8192, 2048),
    "with windows, few seats": Model(4, 2, (0, 128), 5, 600, 256),
    "as many KV heads": Model(32, 1, (0,), 16, 4096, 1024),
    "texts shorter than padding": Model(2, 4, (0,), 64, 24, 1024),
}


class Cache:
    """As much of a cache as dummy rows need."""

    block_size = BLOCK
    target = torch.empty(0)

    @staticmethod
    def null_block_table(num_tokens: int) -> list[int]:
        return [0] * ceil_div(num_tokens, BLOCK)


def geometries(model: Model) -> list[AttentionGeometry]:
    return [AttentionGeometry(2, 128, model.group, model.kv_heads, window) for window in model.windows]


class Counter:
    """Counts captures and replays; nothing runs."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:  # noqa: ARG002
        self.captures += 1

        def replay() -> Any:
            self.replays += 1

        return replay


def eagerly(*_: object) -> Any:
    raise AssertionError("a step that no graph was captured for")


def drawn_step(chance: random.Random, model: Model) -> list[tuple[TreeRow, DraftTree, int]]:
    """Return rows as a scheduler may plan them: chunks of prompts, plain rows and trees of drawn sizes."""
    left, rows = min(model.budget, TOKEN_BUCKETS[-1][0]), list[tuple[TreeRow, DraftTree, int]]()
    chunks, most = chance.random() < 0.3, chance.choice((0, 0, 4, 8, 16, SHAPE.nodes))
    adapted = chance.random() < 0.3
    for _ in range(chance.randint(1, chance.choice((1, 4, model.seats)))):
        known = chance.randint(1, chance.choice((8, 128, 512))) if chunks and chance.random() < 0.3 else 1
        nodes = chance.choice((0, chance.randint(0, most), most)) if known == 1 else 0
        cached = chance.randint(0, chance.choice((64, 1024, model.longest)))
        known = min(known, left, model.longest)
        cached = max(0, min(cached, model.longest - known - nodes))
        if known + nodes > left or not known:
            break
        left -= known + nodes
        adapter = chance.randint(0, ADAPTERS) if adapted else 0
        table = range(ceil_div(cached + known + nodes, BLOCK))
        tree = DraftTree(tuple(range(nodes)), (ROOT,) * nodes)
        rows.append((TreeRow([0] * known, cached, table, 1, adapter), tree, cached))
    return rows


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_pass_of_drawn_traffic_was_captured_at_the_start(name: str) -> None:
    model, counter, seed = MODELS[name], Counter(), secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    words = ceil_div(SHAPE.nodes, 64)
    blocks = ceil_div(model.longest + SHAPE.slots, BLOCK)
    limits = GraphLimits(model.seats, min(model.budget, model.seats * model.longest), blocks, words, ADAPTERS)
    output = torch.empty(limits.padded_tokens, 1)
    tables = step_tables(limits, BLOCK, 0, CPU)
    graphs = PassGraphs(eagerly, output, geometries(model), limits, BLOCK, tables)
    for key in graphs.pass_keys():
        packet = Packet(CPU)
        packed = graphs.pack(packet, *dummy_batch(Cache(), limits.rows, key.tokens, key.adapted))  # type: ignore[arg-type]
        graphs.capture(key, packed, packet, counter.capture)
    # Twice as many with adapters.
    assert counter.captures <= 2 * 48
    captured = counter.captures
    steps = STEPS // len(MODELS)
    for _ in range(steps):
        rows = drawn_step(chance, model)
        parts = [part for part, _, _ in rows]
        tokens = sum(len(part.tokens) + len(tree) for part, tree, _ in rows)
        packet = Packet(CPU)
        packed = graphs.pack(packet, parts, HostTrees([tree for _, tree, _ in rows]))
        assert graphs.pass_of(packed, packet)(packed.complete()).shape == (tokens + graphs.padding(tokens), 1)
    assert (counter.captures, counter.replays) == (captured, steps)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_every_drafting_of_drawn_traffic_was_captured_at_the_start(name: str) -> None:
    model, counter, seed = MODELS[name], Counter(), secrets.randbelow(1 << 32)
    print(f"seed {seed}")
    chance, width = random.Random(seed), SHAPE.branching
    bits = own_bits(SHAPE.depth - 1, width, CPU)
    blocks = ceil_div(model.longest + SHAPE.slots, BLOCK)
    tables = step_tables(GraphLimits(model.seats, 0, blocks, 1, ADAPTERS), BLOCK, 0, CPU)
    loops = LoopGraphs[Any](eagerly, geometries(model), tables, ADAPTERS, SHAPE, BLOCK, 1)

    def levels_of(rows: Sequence[DraftRow], packet: Packet) -> DraftLevels:
        keys = [None] * len(rows)
        given = rows, SHAPE.depth, width, BLOCK, bits, keys, 1, torch.float32, packet
        return DraftLevels.start(*given, graph_tables=tables)

    def unread_of(rows: Sequence[DraftRow], packet: Packet, counts: Sequence[int]) -> Unread:
        parts = [
            TreeRow([0] * count, len(row.token_ids) - count, row.block_table, 1, row.adapter)
            for row, count in zip(rows, counts, strict=True)
        ]
        return loops.pack(parts, [1] * len(parts), packet)

    counts = [1 << power for power in reversed(range(next_power_of_2(model.seats).bit_length()))]
    for rows in counts:
        for adapter in (0, 1):
            dummy = dummy_draft_rows(Cache(), rows, 1, SHAPE, adapter=adapter)  # type: ignore[arg-type]
            packet = Packet(CPU)
            unread = unread_of(dummy, packet, [1] * rows)
            loops.capture(counter.capture, unread, levels_of(dummy, packet), packet)
    captured, steps = counter.captures, STEPS // len(MODELS) // 4
    assert captured == 2 * len(counts)
    for _ in range(steps):
        rows, adapted = [], chance.random() < 0.3
        for _ in range(chance.randint(1, model.seats)):
            known = chance.randint(2, chance.choice((24, min(512, model.longest), model.longest)))
            table = range(ceil_div(known + SHAPE.slots, BLOCK))
            context = Context(Sampling(chance.choice((0.0, 0.7))), range(known), known)
            adapter = chance.randint(0, ADAPTERS) if adapted else 0
            rows.append(DraftRow(table, known - 1, known, 60, 6, context, False, adapter))
        assert loops.has(len(rows), adapted=any(row.adapter for row in rows))
        padding = [DraftRow(tables.null_table, 1, 2, 0, 0, Context(Sampling(), [0, 0], 1))] * loops.padding(len(rows))
        packet = Packet(CPU)
        # What a step may bring, or less of it.
        unread = unread_of(rows, packet, [chance.randint(1, min(SHAPE.tokens, len(row.token_ids) - 1)) for row in rows])
        loops.run_of(unread, levels_of([*rows, *padding], packet), packet)()
    assert (counter.captures, counter.replays) == (captured, steps)


one_request = st.tuples(st.integers(1, 200), st.integers(0, 40000), st.integers(0, 64))


@given(
    st.lists(one_request, min_size=1, max_size=40),
    st.sampled_from([(2, 64), (2, 128), (2, 256), (4, 64), (4, 128)]),
    st.sampled_from([1, 2, 4, 7, 8, 16]),
    st.sampled_from([1, 2, 8, 40, 128]),
    st.sampled_from([1, 4, 108, 132]),
    st.sampled_from([0, 64, 4096]),
)
def test_plans_fit_their_capacity_and_have_a_height_that_was_foreseen(
    requests: list[tuple[int, int, int]],
    kind: tuple[int, int],
    group: int,
    kv_heads: int,
    processors: int,
    window: int,
) -> None:
    query_lens = [rows for rows, _, _ in requests]
    lengths = [rows + cached for rows, cached, _ in requests]
    starts = [length - min(tree, rows - 1) for length, (rows, _, tree) in zip(lengths, requests, strict=True)]
    count = sum(query_lens)
    nothing = torch.zeros(count, 1)
    rows = RaggedRows(query_lens, lengths, starts, torch.zeros(len(requests), 1), nothing[:, 0], nothing, BLOCK)
    geometry = AttentionGeometry(kind[0], kind[1], group, kv_heads, window)
    for configs in (CONFIGS[kind], HOPPER_CONFIGS[kind]):
        heights = reachable_heights(count, group, configs)
        assert best_height(rows, group, configs) in heights
        for height in heights:
            plan = Plan.make(rows, geometry, configs, processors, height)
            tiles = most_tiles(count, len(requests), height // group)
            assert len(rows.tiles(height // group)) <= tiles
            capacity = PlanCapacity.of(tiles, kv_heads, processors)
            assert len(plan.items) <= capacity.items
            assert len(plan.joins) <= capacity.joins
            assert plan.num_parts <= capacity.parts


@pytest.mark.parametrize("vocab", [4096, 32000, 128256, 10**9])
@pytest.mark.parametrize("rows", [1, 8, 256])
def test_draft_probabilities_take_a_bounded_memory(vocab: int, rows: int) -> None:
    """Whatever the vocabulary and the seats; rows beyond are drafted without a graph."""
    drafter: Any = SimpleNamespace(
        dtype=torch.bfloat16,
        shape=SHAPE,
        draw_sizes=DrawSizes.of(SHAPE.branching, SHAPE),
        llama=SimpleNamespace(vocab_size=vocab),
        kv=torch.empty(0, device="meta"),
    )
    found = draft_probs_buffer(drafter, rows)
    each = found.shape[1] * found.shape[2] * found.itemsize
    assert len(found) * each <= MAX_DRAFT_PROBS_BYTES
    # Half as many as wanted, again and again.
    assert len(found) in {rows >> times for times in range(10)}
    assert len(found) == rows or max(1, 2 * len(found)) * each > MAX_DRAFT_PROBS_BYTES
