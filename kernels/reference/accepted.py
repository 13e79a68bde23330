"""Moves of accepted cache entries and the new tokens of a step, in plain torch; reference of the Triton kernels."""

import torch
from torch import Tensor

from specdec.kernels.reference.kv_copy import move_kv
from specdec.kernels.types.types import TokenTargets, Walk


def move_accepted(kv: Tensor, features: Tensor | None, walk: Walk, slots: Tensor) -> None:
    """See `specdec.kernels.triton.accepted`; all entries are read first."""
    depth = walk.paths.shape[1]
    places = torch.arange(depth, device=slots.device)
    own = torch.where(places < walk.lengths[:, None], walk.paths, places)
    source, target = slots.gather(1, own).flatten(), slots[:, :depth].flatten()
    move_kv(kv, source, target)
    if features is not None:
        move_kv(features[None], source, target)


def place_tokens(walk: Walk, nodes: Tensor, places: TokenTargets) -> None:
    """See `specdec.kernels.triton.accepted`."""
    paths, lengths, next_tokens = (part.index_select(0, places.rows) for part in walk)
    place = torch.arange(places.tokens.shape[1], device=nodes.device)
    for row, (path, length, token) in enumerate(zip(paths, lengths.tolist(), next_tokens.tolist(), strict=True)):
        places.tokens[row] = 0
        places.tokens[row, :length] = nodes[path[:length] + places.firsts[row]]
        places.tokens[row, length] = max(token, 0)
        if places.sources is not None:
            places.sources[row, place > length] = places.sources[row, 0]
    places.accepted.copy_(lengths)
    places.positions.add_(lengths[:, None])
    places.noise.add_(lengths)
