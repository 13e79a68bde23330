"""The states that neighbouring pipeline stages exchange in a pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.models.sharded_llama import ShardedLlama
from specdec.verify.tree_batch import TreeBatch


class StageExchange:
    """A pipeline stage between its neighbours.

    The exchange is outside of CUDA graphs, which hold a stage's own layers. Rows of padding are not sent.

    Attributes:
        received: numbers of each row that the stage before sends; 0 in the first stage.
        sent: those that this stage sends on; 0 in the last stage.
    """

    def __init__(self, model: ShardedLlama, tap_layers: Sequence[int], device: torch.device) -> None:
        self._group, self._dtype, self._device = model.stages, model.dtype, device
        first, end = model.first_layer, model.first_layer + len(model.layers)
        before, behind = (
            model.config.hidden_size * (1 + sum(layer < bound for layer in tap_layers)) for bound in (first, end)
        )
        self.received, self.sent = before if first else 0, 0 if model.is_last else behind

    def run(self, run: Callable[[TreeBatch], Tensor], batch: TreeBatch, rows: int) -> Tensor:
        """Receive the states of the stage before, run the pass on them, and send its own states to the stage behind.

        Args:
            run: see `ModelRunner.features`.
            rows: those of the batch that are no padding.

        Returns:
            The pass's states in the last stage; none, `[0, size]`, in those before.
        """
        if self.received:
            states = torch.empty(rows, self.received, dtype=self._dtype, device=self._device)
            states = self._group.receive(states, self._group.rank - 1)
            batch = batch._replace(received=F.pad(states, (0, 0, 0, len(batch.tokens) - rows)))
        # The next group of rows overwrites the states of a graph.
        states = run(batch).clone()
        if not self.sent:
            return states
        self._group.send(states[:rows], self._group.rank + 1)
        return states[:0]

    def flush(self) -> None:
        """Wait until the next stage has taken what was sent to it."""
        self._group.flush()
