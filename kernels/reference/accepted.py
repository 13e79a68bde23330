"""Moves accepted cache entries and writes new tokens, in plain torch: the reference of the Triton kernel."""

from collections.abc import Sequence

import torch

from specdec.kernels.reference.kv_copy import move_kv
from specdec.kernels.types.types import DraftedEntries, TokenTargets, Walk


def commit(walk: Walk, entries: DraftedEntries, targets: Sequence[TokenTargets] = ()) -> None:
    """See `specdec.kernels.triton.accepted`; all entries are read first."""
    kv, features, slots = entries
    depth = walk.paths.shape[1]
    places = torch.arange(depth, device=slots.device)
    own = torch.where(places < walk.lengths[:, None], walk.paths, places)
    source, target = slots.gather(1, own).flatten(), slots[:, :depth].flatten()
    move_kv(kv, source, target)
    if features is not None:
        move_kv(features[None], source, target)
    for each in targets:
        _place(walk, each)


def _place(walk: Walk, own: TokenTargets) -> None:
    paths, lengths, next_tokens = (part.index_select(0, own.rows) for part in walk)
    place = torch.arange(own.tokens.shape[1], device=own.nodes.device)
    for row, (path, length, token) in enumerate(zip(paths, lengths.tolist(), next_tokens.tolist(), strict=True)):
        own.tokens[row] = 0
        own.tokens[row, :length] = own.nodes[path[:length] + own.firsts[row]]
        own.tokens[row, length] = max(token, 0)
        if own.sources is not None:
            own.sources[row, place > length] = own.sources[row, 0]
    own.accepted.copy_(lengths)
    own.positions.add_(lengths[:, None])
    own.noise.add_(lengths)
