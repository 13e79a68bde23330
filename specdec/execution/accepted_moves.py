"""Cache entries of accepted nodes, which a device moves behind their chains before the host knows which they are."""

from collections.abc import Sequence

from specdec.cache.kv_cache import KVCache
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.tree import TreeRow
from specdec.kernels.types.types import TokenTargets, Walk
from specdec.kernels.types.upload import Packet
from specdec.verify.tree_batch import slots_of


class AcceptedMoves:
    """Moves of a step's accepted entries, where a device walks the trees.

    Args:
        parts: rows of the step that have the trees.
        packet: takes the slots of the nodes, which are there once it is sent.
    """

    def __init__(self, cache: KVCache, parts: Sequence[TreeRow], trees: DraftTrees, packet: Packet) -> None:
        self._cache = cache
        width, unused = max(*trees.sizes, trees.depth), cache.null_block * cache.block_size
        slots = []
        for part, size in zip(parts, trees.sizes, strict=True):
            end = part.num_cached + len(part.tokens)
            slots.append([*slots_of(part.block_table, end, end + size, cache.block_size), *[unused] * (width - size)])
        # [rows, width]
        self._slots = packet.add(slots)

    def make(self, walk: Walk, targets: Sequence[TokenTargets] = ()) -> None:
        """Move the entries, and write the new tokens of some rows to where they are read next."""
        self._cache.commit(walk, self._slots, targets)
