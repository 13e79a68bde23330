"""Rejection sampling by a device's kernel: all walks of a step at once, and one way back to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.upload import upload
from specdec.verify.sampler import NoiseKey, NoiseRows
from specdec.verify.transforms import processed_logits
from specdec.verify.verifier import Acceptance, SampledRow


class KernelWalkVerifier:
    """`WalkVerifier` of `walk_rejection`, with the same coins and draws."""

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        scores = processed_logits(logits, [row.nodes for row in rows])
        parts = torch.split(scores, [1 + len(row.tree) for row in rows])
        found: dict[int, Acceptance] = {}
        # A launch weighs all its children against q, or none.
        for weighed in (False, True):
            chosen = [i for i, row in enumerate(rows) if (row.tree.draft_probs is not None) == weighed]
            if chosen:
                own = scores if len(chosen) == len(rows) else torch.cat([parts[i] for i in chosen])
                found |= dict(zip(chosen, self._walk([rows[i] for i in chosen], own), strict=True))
        return [found[i] for i in range(len(rows))]

    def _walk(self, rows: Sequence[SampledRow], scores: Tensor) -> list[Acceptance]:
        device = scores.device
        trees = [row.tree for row in rows]
        probs = [tree.draft_probs for tree in trees if tree.draft_probs is not None]
        starts = [0]
        for tree in trees:
            starts.append(starts[-1] + 1 + len(tree))
        keys: list[NoiseKey | None] = []
        for _, context in rows:
            sampling = context.sampling
            key = NoiseKey(sampling.seed, sampling.sample_index, context.num_output)
            keys.append(None if sampling.is_greedy else key)
        depth = max((max(tree.depths, default=0) for tree in trees), default=0)
        walk = self.kernels.rejection_walk(
            scores,
            torch.cat(probs).to(device, torch.float32) if probs else None,
            upload([token for tree in trees for token in tree.tokens], device),
            upload([parent for tree in trees for parent in tree.parents], device),
            upload(starts, device),
            *NoiseRows(keys).columns(device),
            max(map(len, trees)),
            depth,
        )
        table = torch.cat([walk.paths, walk.lengths[:, None], walk.next_tokens[:, None]], 1).tolist()
        return [Acceptance(tuple(path[:length]), token) for *path, length, token in table]
