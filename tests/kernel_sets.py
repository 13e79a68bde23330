"""The plain-torch kernels of tests, and the references of the Triton kernels in their place."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.kernel_set import torch_kernels
from specdec.kernels.reference import gumbel_argmax as gumbel_argmax_reference
from specdec.kernels.reference import perturbed_top_k as perturbed_top_k_reference
from specdec.kernels.reference import tree_walk as tree_walk_reference
from specdec.kernels.reference.coupled_walk import coupled_walk
from specdec.kernels.reference.rejection_walk import rejection_walk
from specdec.kernels.triton.walks import DeviceWalks
from specdec.kernels.types.types import Candidates, NoiseRows, Stream, TopK
from specdec.verify.noise import GumbelNoise

TORCH = torch_kernels(GumbelNoise(torch.device("cpu")))


def _gumbel_argmax(scores: Tensor, noise: NoiseRows) -> Tensor:
    return gumbel_argmax_reference.gumbel_argmax(scores, noise.columns(scores.device))


def _perturbed_top_k(candidates: Candidates, noise: NoiseRows, k: int, stream: Stream, lane: int) -> TopK:
    scores, _, tokens = candidates
    columns = noise.columns(scores.device)
    return perturbed_top_k_reference.perturbed_top_k(scores, columns, k, tokens, int(stream), lane)


_WALKS = DeviceWalks(tree_walk_reference.tree_walk, rejection_walk)
# What a device runs, in plain torch.
REFERENCES = replace(
    TORCH,
    name="references",
    on_device=True,
    perturbed_top_k=_perturbed_top_k,
    coupled_walk=partial(coupled_walk, _gumbel_argmax, _WALKS.tree_walk),
    rejection_walk=_WALKS.rejection_walk,
)
