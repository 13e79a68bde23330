"""The target's pass over packed rows in CUDA graphs: the host launches one graph instead of hundreds of kernels."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.triton.attention_plan import (
    AttentionGeometry,
    Capture,
    PlanRoom,
    best_height,
    chip_of,
    configs_of,
    reachable_heights,
)
from specdec.kernels.types.adapters import ADAPTED, AdapterBuffer, AdapterRows, fill_adapted
from specdec.kernels.types.device_tables import DeviceTables
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.upload import Packet, PacketLayout, copy_parts
from specdec.verify.tree_batch import PackedBatch, TreeBatch, captured_batch, row_layout

# Token counts up to the first number are padded to multiples of the second. Longer steps are not captured: their
# arithmetic takes longer than the host needs for their launches.
TOKEN_BUCKETS = ((4, 1), (16, 4), (64, 16), (256, 64), (1024, 128))

Pass = Callable[[TreeBatch], Tensor]


class PassKey(NamedTuple):
    """Sizes by which a step finds its captured pass.

    Attributes:
        tokens: tokens of the step, padding included.
        height: height of attention's tiles.
        adapted: whether some row has an adapter.
    """

    tokens: int
    height: int
    adapted: bool


class GraphLimits(NamedTuple):
    """The largest step of an engine, which captured graphs have room for.

    Attributes:
        requests: most requests of a step.
        tokens: most tokens of a step, drafts included.
        blocks: most blocks of a request, those of its drafts included.
        words: 64-bit words of ancestor bits.
        adapters: number of adapters, 0 for none.
    """

    requests: int
    tokens: int
    blocks: int
    words: int
    adapters: int

    @property
    def rows(self) -> int:
        """Most rows of a captured step: one per request, and one of padding."""
        return self.requests + 1

    @property
    def padded_tokens(self) -> int:
        """Most tokens of a captured step, padding included."""
        tokens = min(self.tokens, TOKEN_BUCKETS[-1][0])
        return tokens + PassGraphs.padding(tokens)


class PassGraphs:
    """The target's pass, replayed from a CUDA graph; kernel by kernel where no graph fits a step.

    All graphs are captured before the first request, so that no step waits for a capture. They are few, since each has
    room for the largest attention plan of its tokens (`PlanCapacity`). All share the memory of their inputs and of
    their output. A step's rows and plans lie in its packet as they do there, so a copy each sets them.

    Args:
        run: the pass. It returns states `[tokens, size]`, and writes to the cache.
        output: `[limits.padded_tokens, size]`, memory for these states.
        geometries: geometries of its attention, one per window of its layers.
        tables: where all graphs find block tables.
        received: memory for what the pipeline stage before sends, `[limits.padded_tokens, size]`; None without one.
    """

    def __init__(
        self,
        run: Pass,
        output: Tensor,
        geometries: Sequence[AttentionGeometry],
        limits: GraphLimits,
        block_size: int,
        tables: DeviceTables,
        received: Tensor | None = None,
    ) -> None:
        self.run, self.output, self.geometries, self.limits = run, output, geometries, limits
        self.received = received
        self.block_size, self.tables = block_size, tables
        self.chip, device = chip_of(output.device), output.device
        self.configs = {geometry: configs_of(geometry, self.chip) for geometry in geometries}
        tokens = limits.padded_tokens
        self.adapters = AdapterBuffer(tokens, limits.adapters, device) if limits.adapters else None
        self.captured: dict[PassKey, _PassGraph] = {}
        # Of a pass, its rows and behind them its plans.
        most = max(self.plan_room(key).layout.size for key in self.pass_keys())
        self.inputs = torch.zeros(self.layout(tokens).size + most, dtype=torch.uint8, device=device)

    def layout(self, tokens: int) -> PacketLayout:
        """Return how the rows of a step of `tokens` tokens lie in memory."""
        return row_layout(tokens, self.limits.words)

    def plan_room(self, key: PassKey) -> PlanRoom:
        """Return the room for every attention plan of a pass."""
        return PlanRoom(self.geometries, key.height, key.tokens, self.limits.rows, self.chip)

    @staticmethod
    def padding(tokens: int) -> int:
        """Return how many tokens of padding a step of `tokens` tokens needs."""
        for most, multiple in TOKEN_BUCKETS:
            if tokens <= most:
                return -tokens % multiple
        return 0

    @staticmethod
    def most_padding() -> int:
        """Return how many tokens of padding a step needs at most."""
        return max(multiple for _, multiple in TOKEN_BUCKETS)

    def pass_keys(self) -> list[PassKey]:
        """Return the keys of all passes that a step can need, the largest first: later ones reuse its memory."""
        counts = [tokens for tokens in range(self.limits.padded_tokens, 0, -1) if not self.padding(tokens)]
        adapted = (False, True) if self.adapters is not None else (False,)
        # Geometries differ in their window alone, so their heights are the same.
        one = self.geometries[0]
        return [
            PassKey(tokens, height, some)
            for tokens in counts
            for height in reachable_heights(tokens, one.group, self.configs[one])
            for some in adapted
        ]

    def pack(self, packet: Packet, parts: Sequence[TreeRow], trees: DraftTrees) -> PackedBatch:
        """Pack a step's rows as a graph takes them, with a row of padding where it takes more tokens."""
        tokens = sum(len(part.tokens) for part in parts) + sum(trees.sizes)
        if padding := self.padding(tokens):
            parts = [*parts, TreeRow([0] * padding, 0, self.tables.null_table, 0)]
        return TreeBatch.pack_into(
            packet,
            parts,
            trees,
            self.block_size,
            self.layout(tokens + padding),
            least_words=self.limits.words,
            # The trees of choices may be larger than drafts.
            device_tables=self.tables if self.tables.fit([part.block_table for part in parts]) else None,
        )

    def capture(self, key: PassKey, packed: PackedBatch, packet: Packet, capture: Capture) -> None:
        """Capture the pass of a key.

        Args:
            packed: a step of its tokens, which belong to no request.
            packet: takes the other inputs; it is sent.
            capture: `CudaGraphs.capture` on a GPU.
        """
        graph = self.captured[key] = _PassGraph(self, key)
        fill = graph.filling(packed, packet)
        packet.send()
        packed.complete()
        fill()
        graph.capture(capture)

    def pass_of(self, packed: PackedBatch, packet: Packet) -> Pass:
        """Return the pass for a batch: captured, or launched kernel by kernel. Its states are valid until the next.

        Args:
            packed: of `pack`.
            packet: takes what the pass needs, which may run once it is sent.
        """
        batch = packed.batch
        if not batch.rows.table_rows or batch.rows.ancestors.shape[1] > self.limits.words:
            return self.run
        one = self.geometries[0]
        height = best_height(batch.rows, one.group, self.configs[one])
        graph = self.captured.get(PassKey(len(batch.tokens), height, AdapterRows.of(batch.rows) is not None))
        return self.run if graph is None else graph.pass_of(packed, packet)


class _PassGraph:
    """A captured pass over the first tokens of its owner's inputs."""

    def __init__(self, owner: PassGraphs, key: PassKey) -> None:
        self.owner = owner
        layout = owner.layout(key.tokens)
        batch = captured_batch(layout, owner.inputs[: layout.size], owner.tables.memory, owner.block_size)
        self.batch = batch if owner.received is None else batch._replace(received=owner.received[: key.tokens])
        rows = self.batch.rows
        self._room = owner.plan_room(key)
        self._inputs = owner.inputs[: layout.size + self._room.layout.size]
        rows.plans.update(self._room.plans(self._inputs[layout.size :]).items())
        self.adapted = owner.adapters.rows(key.tokens) if owner.adapters is not None and key.adapted else None
        rows.plans[ADAPTED] = self.adapted
        self.output = owner.output[: key.tokens]
        self._replay: Callable[[], None]

    def capture(self, capture: Capture) -> None:
        """Capture the pass over the inputs as they are."""
        self._replay = capture(lambda: self.output.copy_(self.owner.run(self.batch)))

    def pass_of(self, packed: PackedBatch, packet: Packet) -> Pass:
        """See `PassGraphs.pass_of`."""
        fill = self.filling(packed, packet)

        def run(batch: TreeBatch) -> Tensor:
            fill()
            if self.batch.received is not None:
                assert batch.received is not None
                self.batch.received.copy_(batch.received)
            self._replay()
            return self.output

        return run

    def filling(self, packed: PackedBatch, packet: Packet) -> Callable[[], None]:
        """Return what sets the inputs to those of a batch, once it is complete."""
        given, rows = packed.batch.rows, packed.image
        assert rows is not None
        plans, adapted = self._room.add(given, packet), AdapterRows.of(given)

        def fill() -> None:
            copy_parts([rows, plans], self._inputs)
            fill_adapted(self.adapted, adapted)

        return fill
