"""Plain-torch twin of `grouped_lora`."""

from torch import Tensor

from specdec.kernels.types.adapters import AdapterRows, StackedLowRank


def grouped_lora(x: Tensor, out: Tensor, weights: StackedLowRank, rows: AdapterRows) -> None:
    """Add to `out` `[rows, columns]` what each row's adapter makes of `x` `[rows, inputs]`; see the kernel."""
    spans: list[list[int]] = []
    for place, begin, end in rows.tiles.tolist():
        if spans and spans[-1][0] == place:
            spans[-1][2] = end
        elif place:
            spans.append([place, begin, end])
    ranks = weights.ranks.tolist()
    for place, begin, end in spans:
        order = rows.order[begin:end]
        own = x.index_select(0, order)
        for part, rank in enumerate(ranks[place]):
            columns = slice(weights.starts[part], weights.starts[part + 1])
            low = own @ weights.down[place, part, :rank].T
            out[:, columns].index_add_(0, order, low @ weights.up[place, columns, :rank].T)
