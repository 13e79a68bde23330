"""The target's pass in CUDA graphs: the host launches one graph instead of hundreds of kernels."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.triton.attention_plan import AttentionGeometry, Plan, chip_of, configs_of, reachable_heights
from specdec.kernels.triton.plan_buffer import Capture, PlanBuffer, PlanCapacity, fill_plan, most_tiles
from specdec.kernels.triton.tree_attention import plan_of
from specdec.kernels.types.adapters import ADAPTED, AdapterBuffer, AdapterRows, fill_adapted
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.verify.tree_batch import TreeBatch

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
        return tokens + StepGraphs.padding(tokens)


class StepGraphs:
    """The target's pass, replayed from a CUDA graph, or launched kernel by kernel where no graph fits the step.

    All graphs are captured before the first request, so that no step waits for a capture. They are few, since each has
    room for the largest attention plan of its tokens (`PlanCapacity`). All share the memory of their inputs and of
    their output.

    Args:
        run: the pass. It returns features `[tokens, hidden_size]` and stores keys, values and features in the cache.
        output: `[limits.padded_tokens, hidden_size]`, memory for these features.
        geometries: geometries of the target's attention, one per window of its layers.
    """

    def __init__(
        self, run: Pass, output: Tensor, geometries: Sequence[AttentionGeometry], limits: GraphLimits, block_size: int
    ) -> None:
        self.run, self.output, self.geometries, self.limits = run, output, geometries, limits
        tokens, self.chip, device = limits.padded_tokens, chip_of(output.device), output.device
        self.configs = {geometry: configs_of(geometry, self.chip) for geometry in geometries}
        self.plans = {one: PlanBuffer(self.capacity(one, tokens, 0), device) for one in geometries}
        self.adapters = AdapterBuffer(tokens, limits.adapters, device) if limits.adapters else None
        self.captured: dict[PassKey, _PassGraph] = {}

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        # The kernel reads the plan alone, so the rows' lengths are not needed.
        rows = RaggedRows(
            query_lens=(),
            lengths=(),
            tree_starts=(),
            block_tables=zeros(limits.rows, limits.blocks),
            visible=zeros(tokens),
            ancestors=zeros(tokens, limits.words),
            block_size=block_size,
        )
        self.inputs = TreeBatch(zeros(tokens), zeros(tokens), zeros(tokens), rows, zeros(0), ())

    @staticmethod
    def padding(tokens: int) -> int:
        """Return how many tokens of padding a step of `tokens` tokens needs."""
        for most, multiple in TOKEN_BUCKETS:
            if tokens <= most:
                return -tokens % multiple
        return 0

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

    def capture(self, key: PassKey, batch: TreeBatch, capture: Capture) -> None:
        """Capture the pass of a key.

        Args:
            batch: of its tokens, which belong to no request.
            capture: `CudaGraphs.capture` on a GPU.
        """
        self.captured[key] = _PassGraph(self, key, batch, capture)

    def __call__(self, batch: TreeBatch) -> Tensor:
        """Return features `[tokens, hidden_size]`, which are valid until the next call."""
        (rows, blocks), words = batch.rows.block_tables.shape, batch.rows.ancestors.shape[1]
        # The trees of choices may be larger than drafts.
        if rows > self.limits.rows or blocks > self.limits.blocks or words > self.limits.words:
            return self.run(batch)
        plans = [plan_of(batch.rows, geometry) for geometry in self.geometries]
        key = PassKey(len(batch.tokens), plans[0].height, AdapterRows.of(batch.rows) is not None)
        graph = self.captured.get(key)
        return self.run(batch) if graph is None else graph(batch, plans)

    def capacity(self, geometry: AttentionGeometry, tokens: int, height: int) -> PlanCapacity:
        """Return the capacity for every attention plan of `tokens` tokens; with height 0, of tiles of any height."""
        per_tile = (height or min(self.configs[geometry])) // geometry.group
        tiles = most_tiles(tokens, self.limits.rows, max(per_tile, 1))
        return PlanCapacity.of(tiles, geometry.kv_heads, self.chip.processors)


class _PassGraph:
    """A captured pass over the first tokens of its owner's inputs."""

    def __init__(self, owner: StepGraphs, key: PassKey, batch: TreeBatch, capture: Capture) -> None:
        tokens, shared = key.tokens, owner.inputs
        rows = RaggedRows(
            query_lens=(),
            lengths=(),
            tree_starts=(),
            block_tables=shared.rows.block_tables,
            visible=shared.rows.visible[:tokens],
            ancestors=shared.rows.ancestors[:tokens],
            block_size=shared.rows.block_size,
        )
        self.plans = [
            owner.plans[one].plan(key.height, owner.configs[one][key.height], owner.capacity(one, tokens, key.height))
            for one in owner.geometries
        ]
        rows.plans.update(zip(owner.geometries, self.plans, strict=True))
        self.adapted = owner.adapters.rows(tokens) if owner.adapters is not None and key.adapted else None
        rows.plans[ADAPTED] = self.adapted
        self.batch = TreeBatch(
            shared.tokens[:tokens], shared.positions[:tokens], shared.slots[:tokens], rows, shared.logit_rows, ()
        )
        self.output = owner.output[:tokens]
        given = [
            Plan.make(batch.rows, one, owner.configs[one], owner.chip.processors, key.height)
            for one in owner.geometries
        ]
        self._fill(batch, given)
        self._replay: Callable[[], None] = capture(lambda: self._run(owner.run))

    def __call__(self, batch: TreeBatch, plans: Sequence[Plan]) -> Tensor:
        self._fill(batch, plans)
        self._replay()
        return self.output

    def _run(self, run: Pass) -> None:
        self.output.copy_(run(self.batch))

    def _fill(self, batch: TreeBatch, plans: Sequence[Plan]) -> None:
        own, rows = self.batch, self.batch.rows
        for mine, given in (
            (own.tokens, batch.tokens),
            (own.positions, batch.positions),
            (own.slots, batch.slots),
            (rows.visible, batch.rows.visible),
        ):
            mine.copy_(given)
        for mine, given in ((rows.block_tables, batch.rows.block_tables), (rows.ancestors, batch.rows.ancestors)):
            mine[: given.shape[0], : given.shape[1]].copy_(given)
        rows.ancestors[:, batch.rows.ancestors.shape[1] :].zero_()
        for kept, plan in zip(self.plans, plans, strict=True):
            fill_plan(kept, plan)
        adapted = AdapterRows.of(batch.rows)
        if self.adapted is not None and adapted is not None:
            fill_adapted(self.adapted, adapted)
