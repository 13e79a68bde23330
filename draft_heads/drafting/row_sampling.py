"""Temperatures and filters of a batch of rows, where no row needs logit edits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.upload import Packet
from specdec.verify.sampling import Sampling


class RowSampling(NamedTuple):
    """The work of `processed_logits` for such rows, as operations on the whole batch.

    Attributes:
        temperatures: `[rows, 1]` to divide logits by, in the dtype of processed logits; None where all are 1.
        limits: `[rows, 3]` of the same dtype, min_p, top_k and top_p; None where no row filters.
    """

    temperatures: Tensor | None
    limits: Tensor | None

    @staticmethod
    def of(
        samplings: Sequence[Sampling], dtype: torch.dtype, packet: Packet, *, for_graph: bool
    ) -> "RowSampling | None":
        """Return the parameters of rows, once the packet is sent; None where a row needs logit edits.

        Args:
            for_graph: whether both are wanted, also where they change nothing.
        """
        if any(s.edits for s in samplings):
            return None
        temperatures = limits = None
        if for_graph or any(not s.is_greedy and s.temperature != 1 for s in samplings):
            temperatures = packet.add([[1.0 if s.is_greedy else s.temperature] for s in samplings], dtype)
        if for_graph or any(s.filters for s in samplings):
            limits = packet.add([s.limits for s in samplings], dtype)
        return RowSampling(temperatures, limits)

    def repeated(self, times: int) -> "RowSampling":
        """Return each row's parameters `times` times in turn."""
        return RowSampling(*(part if part is None else part.repeat_interleave(times, 0) for part in self))

    def process(self, logits: Tensor, kernels: KernelSet) -> Tensor:
        """Return processed logits `[rows, vocab]` in float32, float64 for float64; the input may be changed."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperatures is not None:
            scores = scores / self.temperatures
        return scores if self.limits is None else kernels.filter_logits(scores, self.limits)
