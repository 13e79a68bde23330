"""The walks of the weighing rules by the compiled library, all rows in one call."""

from itertools import accumulate

import torch
from torch import Tensor

from specdec.kernels.block_walk_reference import check_chain
from specdec.kernels.draft_trees import DraftTrees
from specdec.kernels.native_library import KINDS, Library, WalkFields, address_of, numbers, room
from specdec.kernels.types import Acceptance, NoiseRows

TREES, CHAINS = range(2)


class NativeWalks:
    """The walks as operations of `KernelSet`: those of the references but for rounding.

    Weights are float32, their sums, quotients and differences float64, as in the Triton kernels.
    """

    def __init__(self, library: Library) -> None:
        self.library = library

    def rejection_walk(self, scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        """See `KernelSet.rejection_walk`; takes float32, bfloat16 and float16."""
        return self._walk(TREES, scores, trees, noise)

    def block_walk(self, scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        """See `KernelSet.block_walk`; takes float32, bfloat16 and float16."""
        for tree, key in zip(trees.read(), noise.keys, strict=True):
            if key is not None:
                check_chain(tree)
        return self._walk(CHAINS, scores, trees, noise)

    def _walk(self, rule: int, scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        own, rows, scores = trees.read(), len(noise.keys), scores.contiguous()
        sizes, sampled = numbers(map(len, own)), numbers(key is not None for key in noise.keys)
        tokens = numbers(token for tree in own for token in tree.tokens)
        parents = numbers(parent for tree in own for parent in tree.parents)
        keys = numbers(number for key in noise.keys for number in key or (0, 0, 0))
        tables = [None if tree.draft_probs is None else tree.draft_probs.to(torch.float32).contiguous() for tree in own]
        draft_probs = numbers(0 if table is None else table.data_ptr() for table in tables)
        lengths, next_tokens, paths = room(rows), room(rows), room(len(tokens))
        self.library.walk(
            WalkFields(
                rule,
                rows,
                scores.shape[1],
                KINDS[scores.dtype],
                scores.data_ptr(),
                *map(address_of, (sizes, sampled, tokens, parents, keys, draft_probs, lengths, next_tokens, paths)),
            )
        )
        starts = accumulate(sizes, initial=0)
        return [
            Acceptance(tuple(paths[start : start + length]), token)
            for start, length, token in zip(starts, lengths, next_tokens, strict=False)
        ]
