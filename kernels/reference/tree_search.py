"""A search of draft trees in plain torch; see the Triton kernels of the same name."""

import torch
from torch import Tensor

from specdec.kernels.types.device_trees import NodeTable, node_table
from specdec.kernels.types.tree_search import Frontier, SearchedLevel, SearchedLevels
from specdec.kernels.types.types import ROOT, TopK


def next_frontier(
    children: TopK, above: Frontier | None, own_bits: Tensor | None, num_rows: int, width: int
) -> SearchedLevel:
    """See `specdec.kernels.triton.tree_search`."""
    each = children.tokens.shape[1]
    # A node after which no token is possible yields NaN; its children must not sort before all others.
    values = children.scores - children.log_sum_exp[:, None]
    values = values.float().nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    values, tokens = values.view(num_rows, -1, each), children.tokens.view(num_rows, -1)
    if above is not None:
        values = values + above.values[:, :, None]
    values = values.flatten(1)
    # Stable, so of equal values the first comes first.
    own, best = (part[:, :width] for part in values.sort(dim=1, descending=True, stable=True))
    parents, bits = best // each, None
    if own_bits is not None:
        bits = own_bits.expand(num_rows, -1, -1)
        if above is not None and above.ancestors is not None:
            bits = above.ancestors.gather(1, parents[:, :, None].expand(-1, -1, own_bits.shape[1])) | bits
    return SearchedLevel(values, tokens, best, Frontier(tokens.gather(1, best), parents, own, bits))


def best_nodes(levels: SearchedLevels, most: int, width: int) -> NodeTable:
    """See `specdec.kernels.triton.tree_search`."""
    values, tokens, best, counts, reach = levels
    device, (rows, count), num_levels = values.device, values.shape, best.shape[1] + 1
    place = torch.arange(count, device=device)
    level = torch.where(place < width, 0, 1 + (place - width).clamp_min(0) // width**2)
    # Stable, so of equal values the shallower comes first, and what is out of reach comes last.
    within = values.masked_fill(place >= reach[:, None], float("-inf"))
    order = within.sort(dim=1, descending=True, stable=True).indices
    slots = torch.arange(most, device=device)
    beyond = slots >= counts[:, None]
    kept, ranks = order[:, :most].masked_fill(beyond, count).sort(dim=1)
    # An extra candidate `count` stands for missing nodes, and is the root's place besides.
    places = torch.full((rows, count + 1), ROOT, dtype=torch.int64, device=device)
    places.scatter_(1, kept, slots.expand(rows, -1))
    places[:, count].fill_(ROOT)
    starts = torch.where(level > 1, width + (level - 2) * width**2, 0)
    parents = best.flatten(1).repeat_interleave(width, 1) + starts[width:]
    parents = torch.cat([parents.new_full((rows, width), count), parents], 1)
    safe = kept.clamp_max(count - 1)
    found = places.gather(1, parents.gather(1, safe)).masked_fill(beyond, ROOT)
    columns = (
        tokens.gather(1, safe).masked_fill(beyond, 0),
        found,
        (level[safe] + 1).masked_fill(beyond, 1),
        ranks.masked_fill(beyond, 0),
    )
    return node_table(columns, num_levels)
