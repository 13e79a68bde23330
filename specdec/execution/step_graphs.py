"""The target's pass in CUDA graphs: the host launches one graph instead of hundreds of kernels."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.kernels.adapters import ADAPTED, AdapterBuffer, AdapterRows
from specdec.kernels.attention_plan import AttentionGeometry, Plan
from specdec.kernels.plan_buffer import Capture, PlanBuffer, PlanSize
from specdec.kernels.ragged_rows import RaggedRows
from specdec.kernels.tree_attention import plan_of
from specdec.verify.tree_batch import TreeBatch

# Token counts up to the first number are padded to multiples of the second. Longer steps are not captured.
TOKEN_BUCKETS = ((4, 1), (16, 4), (64, 8), (256, 32), (1024, 128))

Pass = Callable[[TreeBatch], Tensor]


class StepGraphs:
    """Replays the target's pass, or launches it kernel by kernel if a step is too long.

    The inputs of a step are copied into memory at fixed addresses. A graph is captured when a step first needs it. The
    number of tokens must be padded to one of few counts (`padding`).

    Args:
        run: the pass. It returns features `[tokens, hidden_size]` and stores keys, values and features in the cache.
        capture: `CudaGraphs.capture` on a GPU.
        geometries: geometries of the target's attention, one per window of its layers.
        max_rows: limit of a step's requests, without padding.
        max_blocks: limit of a request's blocks.
        words: number of 64-bit words of ancestor bits.
    """

    def __init__(
        self,
        run: Pass,
        capture: Capture,
        geometries: Sequence[AttentionGeometry],
        max_rows: int,
        max_blocks: int,
        words: int,
    ) -> None:
        self.run, self.capture, self.geometries = run, capture, geometries
        self.max_rows, self.max_blocks, self.words = max_rows + 1, max_blocks, words
        # By what is fixed in a graph: the step's tokens, padding included, the sizes of its attention plans, and the
        # tiles of rows with adapters.
        self.captured: dict[tuple[int, tuple[PlanSize, ...], int], _Graph] = {}

    @staticmethod
    def padding(tokens: int) -> int:
        """Return how many tokens of padding a step of `tokens` tokens needs."""
        for most, multiple in TOKEN_BUCKETS:
            if tokens <= most:
                return -tokens % multiple
        return 0

    def __call__(self, batch: TreeBatch) -> Tensor:
        """Return features `[tokens, hidden_size]`, which are valid until the next call."""
        tokens, (rows, blocks) = len(batch.tokens), batch.rows.block_tables.shape
        # The trees of choices may be larger than drafts.
        is_wide = blocks > self.max_blocks or batch.rows.ancestors.shape[1] > self.words
        if tokens > TOKEN_BUCKETS[-1][0] or rows > self.max_rows or is_wide:
            return self.run(batch)
        plans = [plan_of(batch.rows, geometry) for geometry in self.geometries]
        key = (tokens, tuple(PlanSize.of(plan) for plan in plans), AdapterBuffer.size(AdapterRows.of(batch.rows)))
        graph = self.captured.get(key)
        if graph is None:
            graph = self.captured[key] = _Graph(self, batch, plans)
        return graph(batch, plans)


class _Graph:
    """A captured pass and its inputs."""

    def __init__(self, owner: StepGraphs, batch: TreeBatch, plans: Sequence[Plan]) -> None:
        device, tokens = batch.tokens.device, len(batch.tokens)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.plans = [PlanBuffer(plan) for plan in plans]
        # The kernel reads the plan alone, so the rows' lengths are not needed.
        rows = RaggedRows(
            query_lens=(),
            lengths=(),
            tree_starts=(),
            block_tables=zeros(owner.max_rows, owner.max_blocks),
            visible=zeros(tokens),
            ancestors=zeros(tokens, owner.words),
            block_size=batch.rows.block_size,
        )
        rows.plans.update((geometry, own.plan) for geometry, own in zip(owner.geometries, self.plans, strict=True))
        tiles = AdapterBuffer.size(AdapterRows.of(batch.rows))
        self.adapters = AdapterBuffer(tokens, tiles, device) if tiles else None
        rows.plans[ADAPTED] = None if self.adapters is None else self.adapters.rows
        slots = zeros(tokens)
        self.batch = TreeBatch(zeros(tokens), zeros(tokens), slots, rows, zeros(0), ())
        self._fill(batch, plans)
        self._replay: Callable[[], Tensor] = owner.capture(lambda: owner.run(self.batch))

    def __call__(self, batch: TreeBatch, plans: Sequence[Plan]) -> Tensor:
        self._fill(batch, plans)
        return self._replay()

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
            kept.fill(plan)
        adapted = AdapterRows.of(batch.rows)
        if self.adapters is not None and adapted is not None:
            self.adapters.fill(adapted)
