"""The walk down each tree in plain torch: the reference of the Triton kernel."""

from itertools import pairwise

import torch
from torch import Tensor

from specdec.kernels.types import Walk


def tree_walk(emitted: Tensor, tokens: Tensor, parents: Tensor, starts: Tensor, max_nodes: int, max_depth: int) -> Walk:
    """See `specdec.kernels.tree_walk`; `max_nodes` only says how large the kernel's registers must be."""
    assert max_nodes >= 0
    said, draft, above, bounds = emitted.tolist(), tokens.tolist(), parents.tolist(), starts.tolist()
    paths, lengths, next_tokens = [], [], []
    for row, (start, end) in enumerate(pairwise(bounds)):
        # Every row before this one has a root, which is no node.
        nodes = slice(start - row, end - row - 1)
        path: list[int] = []
        node = -1
        # Parents come before children, so one pass meets every node after its parent.
        for child, (parent, token) in enumerate(zip(above[nodes], draft[nodes], strict=True)):
            if parent == node and said[start + 1 + node] == token >= 0 and len(path) < max_depth:
                path.append(child)
                node = child
        paths.append(path + [-1] * (max_depth - len(path)))
        lengths.append(len(path))
        next_tokens.append(said[start + 1 + node])
    device = emitted.device
    return Walk(
        torch.tensor(paths, dtype=torch.int64, device=device).view(len(paths), max_depth),
        torch.tensor(lengths, dtype=torch.int64, device=device),
        torch.tensor(next_tokens, dtype=torch.int64, device=device),
    )
