"""Places of ranks: which layers of the model, and which part of their weights, each one holds."""

from typing import NamedTuple

import torch

from specdec.parallel.rank_group import LOOPBACK, RankGroup, Store, part_of

# Ranks of a stage come to an operation at about the same time. A stage waits for all the work of those before it.
STAGE_PATIENCE = 40


class RankLayout(NamedTuple):
    """Pipeline stages, of which each is split over tensor-parallel ranks.

    The first ranks hold the last stage, whose logits rank 0 samples from and drafts for; the ranks of the first stage
    follow them, then those of the second, and so on.

    Attributes:
        tensor: ranks that split each weight.
        stages: parts of the model's layers.
    """

    tensor: int
    stages: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.stages

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank, counted from the model's first layers."""
        return (rank // self.tensor - 1) % self.stages

    def in_last_stage(self, rank: int) -> bool:
        """Return whether a rank drafts and verifies."""
        return rank < self.tensor


class RankGroups(NamedTuple):
    """One rank's groups.

    Attributes:
        tensor: the ranks of its stage.
        stages: one rank of each stage, numbered as the stages are.
    """

    tensor: RankGroup
    stages: RankGroup


def join_groups(
    rank: int, layout: RankLayout, store: Store, device: torch.device, timeout: float, host: str = LOOPBACK
) -> RankGroups:
    """Return the groups of a rank, once all their ranks are there; see `RankGroup` for the arguments.

    Args:
        timeout: seconds of an operation between the ranks of a stage; `STAGE_PATIENCE` times as many between stages.

    Raises:
        RuntimeError: some rank did not come in time.
    """
    stage, place = layout.stage_of(rank), rank % layout.tensor
    of_tensors = part_of(store, f"tensor-{stage}")
    tensor = RankGroup(place, layout.tensor, of_tensors, device, timeout, host, connects=True)
    of_stages = part_of(store, f"stages-{place}")
    stages = RankGroup(stage, layout.stages, of_stages, device, STAGE_PATIENCE * timeout, host)
    return RankGroups(tensor, stages)
