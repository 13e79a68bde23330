"""Coupled sampling by a device's kernels: the host waits once, for trees and outcome together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.types import Acceptance, NoiseColumns, NoiseRows
from specdec.kernels.upload import upload
from specdec.verify.grown_trees import levels_of, node_tensors
from specdec.verify.read_walks import read_walks
from specdec.verify.verifier import CoupledVerifier, SampledRow


class KernelCoupledVerifier(CoupledVerifier):
    """`CoupledVerifier`, which walks where the logits are."""

    def accept(self, rows: Sequence[SampledRow], emitted: Tensor) -> list[Acceptance]:
        device, trees = emitted.device, [row.tree for row in rows]
        nodes = node_tensors(trees, device)
        starts = [0]
        for tree in trees:
            starts.append(starts[-1] + 1 + len(tree))
        most, depth = max(map(len, trees)), levels_of(trees)
        walk = self.kernels.tree_walk(emitted, nodes.tokens, nodes.parents, upload(starts, device), most, depth)
        return read_walks([walk], trees)

    def noise_of(self, rows: Sequence[SampledRow], device: torch.device) -> NoiseRows:
        samplings = [row.context.sampling for row in rows]
        own = [
            (0, 0, 0, 0) if s.is_greedy else (s.seed, s.sample_index, row.context.num_output, 1)
            for row, s in zip(rows, samplings, strict=True)
        ]
        sizes = [1 + len(row.tree) for row in rows]
        places = [index for index, size in enumerate(sizes) for _ in range(size)]
        columns = upload(own, device)[upload(places, device)]
        seeds, indices, positions, sampled = columns.T.contiguous().unbind()
        if any(not s.is_greedy for s in samplings):
            node_rows, end = list[int](), 0
            for size in sizes:
                node_rows += range(end + 1, end + size)
                end += size
            depths = node_tensors([row.tree for row in rows], device).depths
            positions.index_add_(0, upload(node_rows, device), depths)
        return NoiseRows((), NoiseColumns(seeds, indices, positions, sampled.bool()))
