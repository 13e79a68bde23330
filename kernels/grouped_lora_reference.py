"""Plain-torch twin of `grouped_lora`."""

from torch import Tensor

from specdec.kernels.adapters import AdapterRows, StackedLowRank


def grouped_lora(x: Tensor, out: Tensor, weights: StackedLowRank, rows: AdapterRows) -> None:
    """Add to `out` `[rows, columns]` what each row's adapter makes of `x` `[rows, inputs]`; see the kernel."""
    for place, begin, end in rows.spans:
        order = rows.order[begin:end]
        own = x.index_select(0, order)
        for part, start in enumerate(weights.starts[:-1]):
            columns = slice(start, weights.starts[part + 1])
            low = own @ weights.down[place, part].T
            out[:, columns].index_add_(0, order, low @ weights.up[place, columns].T)
