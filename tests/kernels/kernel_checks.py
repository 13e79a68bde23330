"""Common parts of the Triton kernels' tests: the device, poisoned outputs, error bounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.types.ragged_rows import RaggedRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Rounding error of a number of size 1.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
DTYPES = list(ROUNDING)
# Whole numbers of as many bytes: what is moved is compared by its bits.
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.uint8: torch.uint8}
# What an int64 output holds before it is written.
UNWRITTEN = -(2**62)


class _PoisonedTorch:
    """Torch, but `empty` is full of NaN, or of `UNWRITTEN`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = torch.empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else UNWRITTEN)


@contextmanager
def poisoned_outputs(*modules: str) -> Iterator[None]:
    """Poison everything that these modules of `specdec.kernels.triton` allocate, so that unwritten elements show."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(f"specdec.kernels.triton.{module}.torch", _PoisonedTorch())
        yield


def on_device(rows: RaggedRows) -> RaggedRows:
    """Return a step's rows where the kernels run."""
    names = ("block_tables", "visible", "ancestors")
    return replace(rows, **{name: getattr(rows, name).to(DEVICE) for name in names})


def assert_as_exact(actual: Tensor, plain: Tensor, exact: Tensor, slack: float = 2, roundings: float = 3) -> None:
    """Assert that the largest error is at most `slack` times that of plain torch in the same dtype.

    Among few numbers torch may by chance have next to none; the kernels' own bound, some roundings in float32 and
    one to the result's dtype, is enough there.

    Args:
        exact: the float64 result.
        roundings: in float32, of the largest number; n additions one after another make about the square root of n.
    """
    assert actual.dtype == plain.dtype
    assert actual.shape == exact.shape
    if not exact.numel():
        return
    ours, theirs = ((part.double() - exact).abs().max().item() for part in (actual, plain))
    least = (roundings * ROUNDING[torch.float32] + ROUNDING[actual.dtype]) * exact.abs().max().item()
    # NaN fails.
    assert ours <= max(slack * theirs, least), (ours, theirs)


def huge(numbers: int) -> Tensor:
    """bfloat16 `[numbers]` of memory of which the machine spends only the pages that are touched, on a CPU."""
    return torch.empty(numbers, dtype=torch.bfloat16, device=DEVICE)
