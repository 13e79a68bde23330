"""Rules that weigh p against q by a device's kernels: the host waits once, for trees and outcome together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types import Acceptance, NoiseKey, NoiseRows, Walk
from specdec.kernels.upload import upload
from specdec.verify.grown_trees import draft_laws, levels_of, node_tensors
from specdec.verify.read_walks import read_walks
from specdec.verify.transforms import processed_logits
from specdec.verify.verifier import SampledRow


class KernelWalkVerifier:
    """`WalkVerifier` of `walk_rejection` or `walk_block`, with the same coins and draws.

    Args:
        kernels: of the device.
        in_blocks: whether what was drawn is a chain, to be judged as a whole.
    """

    def __init__(self, kernels: KernelSet, *, in_blocks: bool = False) -> None:
        self.kernels, self.in_blocks = kernels, in_blocks

    def verify(self, rows: Sequence[SampledRow], logits: Tensor) -> list[Acceptance]:
        """As `Verifier.verify`.

        Raises:
            ValueError: a chain to be judged as a whole that nothing says the law of.
        """
        scores = processed_logits(logits, [row.nodes(logits.device) for row in rows], self.kernels)
        parts = torch.split(scores, [1 + len(row.tree) for row in rows])
        order, walks = list[int](), list[Walk]()
        # A launch weighs all its children against q, or none.
        for weighed in (False, True):
            chosen = [i for i, row in enumerate(rows) if _is_weighed(row) == weighed]
            if chosen:
                own = scores if len(chosen) == len(rows) else torch.cat([parts[i] for i in chosen])
                walks.append(self._walk([rows[i] for i in chosen], own, weighed=weighed))
                order += chosen
        found = dict(zip(order, read_walks(walks, [row.tree for row in rows]), strict=True))
        return [found[i] for i in range(len(rows))]

    def _walk(self, rows: Sequence[SampledRow], scores: Tensor, *, weighed: bool) -> Walk:
        device = scores.device
        trees = [row.tree for row in rows]
        starts, keys = [0], list[NoiseKey | None]()
        for tree, context in rows:
            starts.append(starts[-1] + 1 + len(tree))
            sampling = context.sampling
            key = NoiseKey(sampling.seed, sampling.sample_index, context.num_output)
            keys.append(None if sampling.is_greedy else key)
            if self.in_blocks and not weighed and not sampling.is_greedy and len(tree):
                raise ValueError(f"a chain of {len(tree)} tokens without draft_probs; block verification needs them")
        nodes, bounds, columns = node_tensors(trees, device), upload(starts, device), NoiseRows(keys).columns(device)
        laws = draft_laws(trees, device) if weighed else None
        depth = levels_of(trees)
        if laws is not None and self.in_blocks:
            return self.kernels.block_walk(scores, laws, nodes.tokens, bounds, *columns[:3], depth)
        most = max(map(len, trees))
        return self.kernels.rejection_walk(scores, laws, nodes.tokens, nodes.parents, bounds, *columns, most, depth)


def _is_weighed(row: SampledRow) -> bool:
    """A greedy row follows the argmax, whatever its children were drawn from."""
    return row.tree.is_drawn and not row.context.sampling.is_greedy
