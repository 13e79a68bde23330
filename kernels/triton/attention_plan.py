"""The attention kernel's work plan for a step: tiles of query rows, cut along the context where they take long.

Replayed CUDA graphs find plans in memory at a fixed address (`PlanRoom`).
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.upload import Packet, PacketLayout

# Captures some work, and returns its replay, which reads and writes the same memory each time.
Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
# Least context of a part, in entries. One request of 1,024 entries takes 14 us a layer on an H100 with 64, 19 with 256.
MIN_PART = 64
# Height of a tile at which arithmetic takes about as long as reading its keys does, on an A100 or H100.
BALANCED_HEIGHT = 128


class Config(NamedTuple):
    """Loop settings of a program: keys at a time (BLOCK_N), and warps."""

    keys: int
    warps: int


# By bytes of a number and padded head_dim: the heights that a tile may have (BLOCK_M, rows times query heads of a
# group; 16 is the least that `tl.dot` takes), and how each goes through its keys.
#
# Registers bound these, shared memory hardly. Compiled for sm_80 and sm_90 by Triton 3.6 and 3.9, none spills for the
# models in `tests/kernels/model_launches.py`; `tests/kernels/test_aot.py` prints what each takes. None takes more than
# 99 KB of shared memory, all that a block gets on sm_86 and sm_89; of low bfloat16 tiles, which wait for memory, two
# run at least on a multiprocessor of an A100 or H100. float32 products run without tensor cores, and a thread holds
# whole rows of both factors: low tiles, many warps.
CONFIGS = {
    (2, 16): {16: Config(64, 4), 64: Config(64, 4), 128: Config(64, 8)},
    (2, 32): {16: Config(64, 4), 64: Config(64, 4), 128: Config(64, 8)},
    (2, 64): {16: Config(64, 4), 64: Config(64, 8), 128: Config(64, 8)},
    (2, 128): {16: Config(64, 4), 64: Config(32, 4), 128: Config(32, 8)},
    (2, 256): {16: Config(32, 4), 64: Config(16, 8)},
    (4, 16): {16: Config(32, 4), 32: Config(32, 8)},
    (4, 32): {16: Config(32, 4), 32: Config(32, 8)},
    (4, 64): {16: Config(32, 4), 32: Config(32, 8)},
    (4, 128): {16: Config(32, 8)},
    (4, 256): {16: Config(16, 8)},
}
# Hopper's matrix instructions read keys and values from shared memory, where others take them from registers: tall
# tiles take more of them at a time, and 113 KB of the 227 that a block can have. On an H100 a tile of 128 takes more
# than twice as long as one of 64 (trees of 60 nodes over 1,024 entries, 1 and 8 of them), so there is none.
HOPPER_CONFIGS = CONFIGS | {
    (2, 128): {16: Config(64, 4), 64: Config(64, 4)},
    **{(4, dim): {16: Config(32, 8), 32: Config(32, 8)} for dim in (16, 32, 64)},
}
# With a window, slopes, or entries in 8 bits, a program has more numbers at hand: more warps, or fewer keys at a time.
CROWDED_CONFIGS = {
    (2, 128): {16: Config(64, 8), 64: Config(32, 8), 128: Config(16, 8)},
    (4, 16): {16: Config(16, 8), 32: Config(32, 8)},
}
CROWDED_HOPPER_CONFIGS = {
    (2, 128): {16: Config(64, 8), 64: Config(64, 8)},
    (4, 16): {16: Config(32, 4), 32: Config(16, 8)},
    (4, 32): {16: Config(32, 4), 32: Config(16, 8)},
}
# Keys and values are found through the block table, a load behind a load. Triton gives each of the two half of the
# stages but one: with 5, a tile of both is being loaded while the last is in use; with 3 or 4, none is.
STAGES = 5
# Numbers of an item and of a join, and places of an item's; see `Plan`.
ITEM, JOIN, END, LAST = 8, 4, 4, 7


class AttentionGeometry(NamedTuple):
    """Sizes of a model that a plan depends on.

    Attributes:
        number_bytes: bytes of an element of queries, keys and values.
        padded_dim: head_dim, up to the next power of two.
        group: query heads per KV head.
        window: tokens that a row sees, itself included; 0 for all.
    """

    number_bytes: int
    padded_dim: int
    group: int
    kv_heads: int
    window: int = 0


class Chip(NamedTuple):
    """Properties of a GPU that a plan depends on."""

    processors: int
    is_hopper: bool


H100 = Chip(132, True)


@lru_cache
def chip_of(device: torch.device) -> Chip:
    """Return the properties of a GPU; those of an H100 for other devices."""
    if device.type != "cuda":
        return H100
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.major == 9)


class PlanCapacity(NamedTuple):
    """Upper bounds of a plan's sizes, by its number of tiles: the grids and allocations of a captured pass.

    Attributes:
        items: programs per KV head.
        joins: cut tiles.
        parts: parts of the cut tiles.
    """

    items: int
    joins: int
    parts: int

    @staticmethod
    def of(tiles: int, kv_heads: int, processors: int) -> "PlanCapacity":
        """Return the bounds of a plan of `tiles` tiles.

        A plan measures the context of a tile in shares. All tiles together have at most processors / kv_heads
        shares. A tile of x shares is cut into max(1, floor(x + 0.5)) parts. So it is cut from 1.5 shares on, and then
        has at most 4 x / 3 parts, at most x more than the one item of an uncut tile.
        """
        # Rounding of x.
        shares = processors / kv_heads + 1e-6
        return PlanCapacity(tiles + math.ceil(shares), math.floor(shares / 1.5), math.floor(shares * 4 / 3))


class Plan(NamedTuple):
    """The work of all programs of a call, the same in all layers of a step.

    Attributes:
        height: height of the tiles (BLOCK_M).
        config: loop settings of the programs.
        items: int32 `[items, 8]`: row of the request's block table, first packed row, number of rows, first entry, end
            of the entries, entry of the request's tree node 0, number of the part, or -1 where the item is its whole
            tile, 1 where the entries end with the tile's. The longest come first, so that none is begun when the others
            are done. An item of no rows and no entries does nothing.
        joins: int32 `[tiles cut, 4]`: first packed row, number of rows, first part, number of parts.
        num_parts: parts of all cut tiles together.
    """

    height: int
    config: Config
    items: Tensor
    joins: Tensor
    num_parts: int

    @staticmethod
    def make(
        rows: RaggedRows,
        heads: AttentionGeometry,
        configs: dict[int, Config],
        processors: int,
        height: int | None = None,
    ) -> "Plan":
        """Return the plan, from what the host knows and without waiting for the device.

        Args:
            height: height of the tiles; None for the cheapest.
        """
        height = height or best_height(rows, heads.group, configs)
        work, packet = _Work.of(rows, heads, configs[height], processors, height), Packet(rows.visible.device)
        items, joins = (packet.add(numbers, torch.int32) for numbers in (work.items, work.joins))
        packet.send()
        return Plan(height, configs[height], items, joins.view(-1, JOIN), work.num_parts)

    def of_levels(self, more: Tensor) -> "list[Plan]":
        """Return the plans of levels, made on the device, of which this is the first one's.

        All are cut as the first one is: what their rows see more goes to the last part of each tile. What a tile sees
        begins at the same entry in all levels, since a window counts from the tree's start.

        Args:
            more: of `seen_more`.
        """
        return [self._replace(items=items) for items in torch.addcmul(self.items, self.items[:, LAST:], more).unbind(0)]


class _Work(NamedTuple):
    """The numbers of a plan on the host; see `Plan`."""

    items: list[tuple[int, ...]]
    joins: list[tuple[int, ...]]
    num_parts: int

    @staticmethod
    def of(rows: RaggedRows, heads: AttentionGeometry, config: Config, processors: int, height: int) -> "_Work":
        """Return the numbers of the plan of rows."""
        tiles = rows.tiles(height // heads.group, heads.window)
        # What each processor would do if all work could be dealt out evenly, in entries.
        share = max(sum([tile.end - tile.begin for tile in tiles]) * heads.kv_heads / processors, MIN_PART)
        items, joins, parts = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
        for request, start, count, begin, end in tiles:
            table, tree = rows.table_row(request), rows.tree_starts[request]
            wanted = max(1, math.floor((end - begin) / share + 0.5))
            size = ceil_div(end - begin, wanted * config.keys) * config.keys
            if size >= end - begin:
                items.append((table, start, count, begin, end, tree, -1, 1))
                continue
            first = parts
            for at in range(begin, end, size):
                last = at + size >= end
                items.append((table, start, count, at, end if last else at + size, tree, parts, int(last)))
                parts += 1
            joins.append((start, count, first, parts - first))
        items.sort(key=lambda item: item[3] - item[4])
        return _Work(items, joins, parts)


def seen_more(levels: int, width: int, device: torch.device) -> Tensor:
    """Return what the rows of levels see more than those of the first, for `Plan.of_levels`.

    Args:
        width: entries that a level's rows see more than those of the level before; each has as many rows.

    Returns:
        int32 `[levels, 1, 8]`, which stands where items have the end of their entries.
    """
    more = torch.zeros(levels, 1, ITEM, dtype=torch.int32)
    more[:, 0, END] = width * torch.arange(levels)
    return more.to(device)


def configs_of(heads: AttentionGeometry, chip: Chip, *, crowded: bool = False) -> dict[int, Config]:
    """Return the heights that tiles of a geometry may have, and how each goes through its keys.

    Args:
        crowded: whether there is a window, slopes, or entries in 8 bits.

    Raises:
        ValueError: more query heads per KV head than the kernel was made for.
    """
    size = heads.number_bytes, heads.padded_dim
    plain, more = (HOPPER_CONFIGS, CROWDED_HOPPER_CONFIGS) if chip.is_hopper else (CONFIGS, CROWDED_CONFIGS)
    configs = more.get(size, plain[size]) if crowded else plain[size]
    if heads.group > max(configs):
        raise ValueError(f"{heads.group} query heads per KV head: at most {max(configs)} are supported")
    return configs


def reachable_heights(rows: int, group: int, configs: dict[int, Config]) -> list[int]:
    """Return the heights that `best_height` may choose for a step of at most `rows` rows, and perhaps others.

    A higher tile costs more where both hold all rows of a request. So it is chosen only if some request has more rows
    than the lower one holds.
    """
    fitting = sorted(height for height in configs if height >= group)
    return fitting[:1] + [higher for lower, higher in pairwise(fitting) if lower // group < rows]


def best_height(rows: RaggedRows, group: int, configs: dict[int, Config]) -> int:
    """Return the cheapest height of tiles: a tile reads its context once and computes with all its height."""
    return cheapest_height(rows.query_lens, rows.lengths, group, configs)


def cheapest_height(query_lens: Sequence[int], lengths: Sequence[int], group: int, configs: dict[int, Config]) -> int:
    """Return `best_height` of rows by their numbers; see `RaggedRows`."""

    def cost(height: int) -> int:
        per_tile = height // group
        read = sum([ceil_div(n, per_tile) * length for n, length in zip(query_lens, lengths, strict=True)])
        return (BALANCED_HEIGHT + height) * read

    lowest, *higher = reachable_heights(max(query_lens), group, configs)
    return min((lowest, *higher), key=cost) if higher else lowest


def most_tiles(rows: int, requests: int, per_tile: int) -> int:
    """Return the largest number of tiles of `per_tile` rows for `rows` rows of at most `requests` requests."""
    requests = min(rows, requests)
    return requests + (rows - requests) // per_tile


class PlanRoom:
    """The plans of captured attention, one for each geometry: their sizes, and their place among a graph's inputs.

    Unused items and joins, which are zeros, have no rows and do nothing.

    Args:
        geometries: geometries of the layers' attention, one per window.
        height: height of the tiles.
        rows: most query rows.
        requests: most requests that they belong to.

    Attributes:
        layout: how the plans lie in memory.
    """

    def __init__(
        self, geometries: Sequence[AttentionGeometry], height: int, rows: int, requests: int, chip: Chip
    ) -> None:
        self.geometries, self.height, self.chip = geometries, height, chip
        self.layout = PacketLayout()
        self._capacities = list[PlanCapacity]()
        for one in geometries:
            tiles = most_tiles(rows, requests, max(height // one.group, 1))
            capacity = PlanCapacity.of(tiles, one.kv_heads, chip.processors)
            self._capacities.append(capacity)
            self.layout.add(capacity.items, ITEM, dtype=torch.int32)
            self.layout.add(capacity.joins, JOIN, dtype=torch.int32)

    def plans(self, memory: Tensor) -> dict[AttentionGeometry, Plan]:
        """Return the plans to capture with, in memory of the layout's size."""
        views = self.layout.views(memory)
        return {
            one: Plan(self.height, configs_of(one, self.chip)[self.height], items, joins, capacity.parts)
            for one, capacity, items, joins in zip(
                self.geometries, self._capacities, views[::2], views[1::2], strict=True
            )
        }

    def add(self, rows: RaggedRows, packet: Packet) -> Tensor:
        """Add the plans of rows to a packet; return them as bytes, which lie as in the layout."""
        memory = packet.begin(self.layout)
        for one, capacity in zip(self.geometries, self._capacities, strict=True):
            config = configs_of(one, self.chip)[self.height]
            work = _Work.of(rows, one, config, self.chip.processors, self.height)
            assert len(work.items) <= capacity.items
            assert len(work.joins) <= capacity.joins
            assert work.num_parts <= capacity.parts
            numbers = [*chain.from_iterable(work.items)]
            numbers += [0] * (capacity.items * ITEM - len(numbers))
            numbers += chain.from_iterable(work.joins)
            packet.add(numbers, torch.int32, capacity.items * ITEM + capacity.joins * JOIN)
        return memory
