"""Forms of weights for serving against weights as trained."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.norm import RMSNorm
from specdec.kernels.reference.projection import SMALL_BYTES, Projection, onednn_multiplies, padded_rows
from tests.kernel_sets import TORCH

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 13, 65])
def test_projection_equals_linear(dtype: torch.dtype, bias: bool, rows: int) -> None:
    """Error against float64 at most twice that of torch's own product in the same dtype, or a few float32 roundings."""
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 37, dtype=dtype), torch.randn(51, 37, dtype=dtype)
    b = torch.randn(51, dtype=dtype) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    own = (F.linear(x, weight, b).double() - exact).abs().max()
    with torch.inference_mode():
        ours = Projection(weight, b)(x)
    assert ours.dtype == dtype
    least = 4 * 2.0**-24 * exact.abs().max() if dtype != torch.float64 else 0
    assert (ours.double() - exact).abs().max() <= max(2 * own, least)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_readied_module_computes_the_same(dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = RMSNorm(24, 1e-5)
            self.proj = Linear(24, 24, bias=True)
            self.inner = Linear(24, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(self.proj(self.norm(x)))
            return out

    block = Block().to(dtype).requires_grad_(False)
    nn.init.normal_(block.norm.weight)
    x = torch.randn(5, 24, dtype=dtype)
    with torch.inference_mode():
        before = block(x)
        norm, proj, inner = (part.form(TORCH) for part in (block.norm, block.proj, block.inner))
        after = inner(proj(norm(x)))
    torch.testing.assert_close(after, before)
    assert isinstance(proj, Projection)


def test_rows_that_fill_up_are_not_seen() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 16, dtype=torch.bfloat16)
    projection = Projection(weight)
    assert (projection._packed is not None) == onednn_multiplies(torch.bfloat16, weight.device)
    with torch.inference_mode():
        for rows in (9, 33, 100, 300):
            x = torch.randn(rows, 16, dtype=torch.bfloat16)
            y = projection(x)
            assert y.shape == (rows, 24)
            exact = x.double() @ weight.double().T
            assert (y - exact).abs().max() <= (F.linear(x, weight) - exact).abs().max()


def test_products_meet_few_row_counts() -> None:
    """Each costs oneDNN a kernel."""
    counts = [padded_rows(rows) for rows in range(1, 2049)]
    assert len(set(counts)) < 50
    for rows, count in zip(range(1, 2049), counts, strict=True):
        assert rows <= count < rows + 32 + rows / 8
        assert rows > 8 or count == rows
        assert padded_rows(count) == count


@pytest.mark.parametrize("rows", [64, SMALL_BYTES // 128 + 1])
def test_large_weights_laid_out_anew_are_kept_once(rows: int) -> None:
    layer = Linear(64, rows, bias=False).to(torch.bfloat16).requires_grad_(False)
    projection = layer.form(TORCH)
    kept = projection.weight.numel()
    assert kept == (0 if projection._packed is not None and rows > 64 else 64 * rows)
    assert projection(torch.ones(1, 64, dtype=torch.bfloat16)).shape == (1, rows)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_product_leaves_onednn_as_it_was(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    projection = Projection(torch.randn(8, 8, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
    with torch.inference_mode():
        projection(torch.ones(1, 8, dtype=torch.bfloat16))
    assert torch.backends.mkldnn.enabled == enabled
