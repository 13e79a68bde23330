"""The acceptance rules: which draft tokens are kept, and the target's own token after them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.reference.sampling import HostSampling
from specdec.kernels.types.draft_trees import DraftTrees, PreparedWalk, WalkOutcome
from specdec.kernels.types.registry import Registry
from specdec.kernels.types.types import NoiseKey, NoiseRows
from specdec.kernels.types.upload import Packet
from specdec.verify.host_walks import Rule, host_coupled_walk, host_walk
from specdec.verify.rejection import walk_rejection
from specdec.verify.sampling import Context
from specdec.verify.transforms import NodeRows, processed_logits


class CoupledVerifier:
    """Gumbel-max coupling: each output position has its own noise, shared by everything that samples there.

    The token emitted after a node is `argmax_v log p(v) + G_t(v)`, an exact sample from p; at temperature 0,
    `argmax_v` of the processed logits, lowest id on ties. The walk follows the child with that token, and ends
    where there is none. The result is a function of p and the seed, whatever the tree (Daliri et al. 2024).
    """

    def __init__(self, kernels: KernelSet) -> None:
        self.kernels = kernels
        self.walk = kernels.walks.coupled or host_coupled_walk(HostSampling(_noise_of(kernels)).gumbel_argmax)

    def prepare(self, trees: DraftTrees, contexts: Sequence[Context], packet: Packet) -> PreparedWalk:
        """Return what returns the outcome of each row, of logits and once the packet is sent.

        The logits are `[sum of (1 + nodes), vocab]`, per row its root, then its nodes.

        Args:
            trees: trees of the sampled rows.
            contexts: the same rows' requests, up to the trees' roots.
            packet: takes the numbers that the rule needs on the device.
        """
        keys = noise_keys(contexts)
        walk = self.walk(trees, NoiseRows(keys), packet)
        if not any(key is not None or context.sampling.edits for key, context in zip(keys, contexts, strict=True)):
            return walk

        def verify(logits: Tensor) -> WalkOutcome:
            scores = processed_logits(logits, node_rows(trees, contexts, logits.device), self.kernels)
            # Scores are not to be used after the walk, and the logits are.
            return walk(scores.clone() if scores.data_ptr() == logits.data_ptr() else scores)

        return verify


class RejectionVerifier:
    """Recursive rejection sampling, which compares p with q; see `walk_rejection`.

    The output follows the target's distribution exactly, but unlike with `CoupledVerifier` the tree influences which
    of the possible outputs it is.

    Args:
        kernels: operations of the device.
        rule: another rule over p and the tree, which runs on the host; None for this one.
    """

    def __init__(self, kernels: KernelSet, rule: Rule | None = None) -> None:
        self.kernels = kernels
        own = kernels.walks.rejection if rule is None else None
        self.walk = own or host_walk(rule or walk_rejection)

    def prepare(self, trees: DraftTrees, contexts: Sequence[Context], packet: Packet) -> PreparedWalk:
        """See `CoupledVerifier.prepare`."""
        walk = self.walk(trees, NoiseRows(noise_keys(contexts)), packet)
        if not any(context.sampling.changes for context in contexts):
            return walk
        return lambda logits: walk(processed_logits(logits, node_rows(trees, contexts, logits.device), self.kernels))


class Verifier(Protocol):
    """An acceptance rule."""

    def prepare(self, trees: DraftTrees, contexts: Sequence[Context], packet: Packet) -> PreparedWalk:
        """Return what returns the outcome of each row; see `CoupledVerifier.prepare`."""
        ...


class AcceptanceRule(NamedTuple):
    """An acceptance rule.

    Attributes:
        make: returns its verifier.
        draws: whether drafts must be drawn from q, which the trees then hold; else they are chosen with the noise of
            the coupled rule.
        is_lossy: whether outputs may follow another distribution than the target's. The names of such rules begin with
            `LOSSY`, so that settings, logs and results say it.
    """

    make: Callable[[KernelSet], Verifier]
    draws: bool = False
    is_lossy: bool = False


LOSSY = "lossy-"


def _check_rule(name: str, rule: AcceptanceRule) -> None:
    if rule.is_lossy != name.startswith(LOSSY):
        must = "begins" if rule.is_lossy else "does not begin"
        raise ValueError(
            f"acceptance rule {name!r}: the name of a rule with is_lossy={rule.is_lossy} {must} with lossy-"
        )


RULES: Registry[AcceptanceRule] = Registry(
    "acceptance rule",
    {"coupled": AcceptanceRule(CoupledVerifier), "rejection": AcceptanceRule(RejectionVerifier, draws=True)},
    _check_rule,
)


def _noise_of(kernels: KernelSet) -> GumbelNoise:
    assert kernels.noise is not None, f"the {kernels.name} kernels have neither walks nor noise for the host's"
    return kernels.noise


def noise_key(context: Context) -> NoiseKey:
    """Return the noise key of a request's next output position."""
    return NoiseKey(context.sampling.seed, context.sampling.sample_index, context.num_output)


def noise_keys(contexts: Sequence[Context]) -> list[NoiseKey | None]:
    """Return the noise key of each request, None where it decodes greedily."""
    return [None if context.sampling.is_greedy else noise_key(context) for context in contexts]


def node_rows(trees: DraftTrees, contexts: Sequence[Context], device: torch.device) -> list[NodeRows]:
    """Return the rows of logits of each request: its root and its tree's nodes."""
    return [
        NodeRows(context, 1 + size, partial(trees.paths, row, device))
        for row, (size, context) in enumerate(zip(trees.sizes, contexts, strict=True))
    ]
