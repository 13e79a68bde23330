"""Temperatures and filters of a batch of rows, where no row needs logit edits."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.upload import upload
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
    def of(samplings: Sequence[Sampling], device: torch.device, dtype: torch.dtype) -> "RowSampling | None":
        """Return the parameters of rows, None where a row needs logit edits."""
        if any(s.edits for s in samplings):
            return None
        temperatures = limits = None
        if any(not s.is_greedy and s.temperature != 1 for s in samplings):
            temperatures = upload([[1.0 if s.is_greedy else s.temperature] for s in samplings], device, dtype)
        if any(s.filters for s in samplings):
            limits = upload([s.limits for s in samplings], device, dtype)
        return RowSampling(temperatures, limits)

    @staticmethod
    def buffer(rows: int, device: torch.device, dtype: torch.dtype) -> "RowSampling":
        """Return memory for the parameters of any `rows` rows, to be filled."""
        return RowSampling(*(torch.zeros(rows, width, dtype=dtype, device=device) for width in (1, 3)))

    def fill(self, given: "RowSampling") -> None:
        """Copy the parameters of other rows into this buffer."""
        assert self.temperatures is not None
        assert self.limits is not None
        if given.temperatures is None:
            self.temperatures.fill_(1)
        else:
            self.temperatures.copy_(given.temperatures)
        if given.limits is None:
            self.limits.fill_(0)[:, 2].fill_(1)
        else:
            self.limits.copy_(given.limits)

    def repeated(self, times: int) -> "RowSampling":
        """Return each row's parameters `times` times in turn."""
        return RowSampling(*(part if part is None else part.repeat_interleave(times, 0) for part in self))

    def process(self, logits: Tensor, kernels: KernelSet) -> Tensor:
        """Return processed logits `[rows, vocab]` in float32, float64 for float64; the input may be changed."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperatures is not None:
            scores = scores / self.temperatures
        return scores if self.limits is None else kernels.filter_logits(scores, self.limits)
