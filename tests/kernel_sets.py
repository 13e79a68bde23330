"""The plain-torch kernels of tests, and the references of the Triton kernels in their place."""

from dataclasses import replace

import torch

from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.reference import perturbed_top_k as perturbed_top_k_reference
from specdec.kernels.reference.gumbel_argmax import gumbel_argmax
from specdec.kernels.triton.walks import DeviceWalks
from specdec.kernels.types.draft_trees import Walks
from specdec.kernels.types.types import Candidates, NoiseRows, Stream, TopK
from specdec.verify.packed_walks import coupled_walk, rejection_walk

TORCH = torch_kernels(torch.device("cpu"))


def _perturbed_top_k(candidates: Candidates, noise: NoiseRows, k: int, stream: Stream, lane: int) -> TopK:
    scores, _, tokens = candidates
    columns = noise.columns(scores.device)
    return perturbed_top_k_reference.perturbed_top_k(scores, columns, k, tokens, int(stream), lane)


_WALKS = DeviceWalks(gumbel_argmax, coupled_walk, rejection_walk)
# What a device runs, in plain torch.
REFERENCES = replace(
    TORCH,
    name="references",
    on_device=True,
    search=TORCH.search._replace(perturbed_top_k=_perturbed_top_k),
    walks=Walks(_WALKS.coupled_walk, _WALKS.rejection_walk),
)
