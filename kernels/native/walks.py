"""The walks of the acceptance rules by the compiled library, all rows in one call."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from specdec.kernels.native.library import KINDS, Library, WalkFields, joined
from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.types.draft_trees import DraftTrees
from specdec.kernels.types.types import Acceptance, NoiseKey, NoiseRows, Stream

REJECTION, COUPLED = range(2)


class NativeWalks:
    """The walks as operations of `KernelSet`: those of the rules in `verify/` but for rounding.

    Under the rejection rule weights are float32, their sums, quotients and differences float64, as in the Triton
    kernels.

    Args:
        noise: of sampled rows under the coupled rule.
    """

    def __init__(self, library: Library, noise: GumbelNoise) -> None:
        self.library, self.noise = library, noise
        self._fields = WalkFields()

    def coupled_walk(self, scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        """See `Walks.coupled`; takes float32, bfloat16 and float16, and changes no scores."""
        keys, size = noise.keys, scores.shape[1]
        if all(key is None for key in keys):
            return self._walk(COUPLED, scores, trees, noise)
        levels, most = 1 + trees.depth, self.noise.num_kept(size)
        if len(keys) * levels <= most:
            needed = [key and key._replace(position=key.position + level) for key in keys for level in range(levels)]
            return self._walk(COUPLED, scores, trees, noise, self.noise.addresses(needed, size), levels)
        if len(keys) == 1 and keys[0] is not None:
            # So deep a tree needs more noise than is kept.
            vectors = self._copied(keys[0], levels, size)
            return self._walk(COUPLED, scores, trees, noise, [vector.data_ptr() for vector in vectors], levels)
        found = []
        for rows in (range(len(keys) // 2), range(len(keys) // 2, len(keys))):
            start = sum(1 + own for own in trees.sizes[: rows.start])
            part = trees.select(rows)
            end = start + len(rows) + sum(part.sizes)
            found += self.coupled_walk(scores[start:end], part, NoiseRows(keys[rows.start : rows.stop]))
        return found

    def _copied(self, key: NoiseKey, levels: int, size: int) -> Tensor:
        """Return the noise of this output position and those after it, `[levels, size]`."""
        vectors = torch.empty(levels, size)
        for level, vector in enumerate(vectors):
            vector.copy_(self.noise.at(key._replace(position=key.position + level), size, Stream.TARGET, 0))
        return vectors

    def rejection_walk(self, scores: Tensor, trees: DraftTrees, noise: NoiseRows) -> list[Acceptance]:
        """See `Walks.rejection`; takes float32, bfloat16 and float16."""
        return self._walk(REJECTION, scores, trees, noise)

    def _walk(
        self,
        rule: int,
        scores: Tensor,
        trees: DraftTrees,
        noise: NoiseRows,
        places: Sequence[int] = (),
        levels: int = 0,
    ) -> list[Acceptance]:
        """Make the call.

        Args:
            places: where the noise of each row and of each of `levels` levels lies, 0 for none; empty if none has any.
        """
        own, rows, scores = trees.read(), len(noise.keys), scores.contiguous()
        tokens, parents, keys = list[int](), list[int](), list[int]()
        for tree in own:
            tokens += tree.tokens
            parents += tree.parents
        tables = list[Tensor | None]()
        if rule != COUPLED:
            keys += [number for key in noise.keys for number in key or (0, 0, 0)]
            tables += [None if one.draft_probs is None else one.draft_probs.float().contiguous() for one in own]
        written, lists = joined(
            [0] * rows,
            [0] * rows,
            [0] * len(tokens),
            trees.sizes,
            [key is not None for key in noise.keys],
            tokens,
            parents,
            keys,
            places,
            [0 if one is None else one.data_ptr() for one in tables],
        )
        given = self._fields
        given.rule, given.rows, given.levels = rule, rows, levels
        given.size, given.kind, given.scores = scores.shape[1], KINDS[scores.dtype], scores.data_ptr()
        given.lengths, given.next_tokens, given.paths = lists[:3]
        given.nodes, given.sampled, given.tokens, given.parents = lists[3:7]
        given.keys, given.noise, given.draft_probs = (
            address if part else None for part, address in zip((keys, places, tables), lists[7:], strict=True)
        )
        self.library.call("walk", given)
        lengths, next_tokens = written[:rows], written[rows : 2 * rows]
        if not tokens:
            return [Acceptance((), token) for token in next_tokens]
        starts = accumulate(trees.sizes, initial=2 * rows)
        return [
            Acceptance(tuple(written[start : start + length]), token)
            for start, length, token in zip(starts, lengths, next_tokens, strict=False)
        ]
