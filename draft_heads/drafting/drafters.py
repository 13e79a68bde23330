"""The drafter that fits a draft model, and its bounds of trees."""

from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor

from specdec.draft_heads.drafting.block_drafter import BlockDrafter
from specdec.draft_heads.drafting.draft_shape import BlockShape, DraftShape
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.kernels.kernel_set import KernelSet


def shape_for(draft: DraftModel | None, shape: DraftShape) -> DraftShape:
    """Return the bounds of trees for a draft model: a block head's are no deeper than its block."""
    block = None if draft is None else draft.head.block
    if block is None:
        return shape
    given = {one.name: getattr(shape, one.name) for one in fields(DraftShape)}
    return BlockShape(**{**given, "depth": min(shape.depth, block.slots)}, rows=block.rows)


def drafter_of(
    draft: DraftModel,
    kv: Tensor,
    features: Tensor | None,
    block_size: int,
    dtype: torch.dtype,
    shape: DraftShape,
    proposal: Proposal,
    kernels: KernelSet,
) -> TreeDrafter[Any]:
    """Return the drafter of a draft model; for the other arguments see `TreeDrafter`.

    Args:
        shape: as `shape_for` returns it.
    """
    rest = (draft.readout, kv, features, block_size, dtype, shape, proposal, kernels, draft.adapters)
    if draft.head.block is not None:
        return BlockDrafter(cast("BlockForm", draft.head), *rest)
    return ModelDrafter(draft.head, *rest)
