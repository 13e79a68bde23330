"""Draft models that are split over the ranks of their target."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec.draft_heads.formats.head_kind import HeadDescription, LoadedHead
from specdec.draft_heads.formats.head_kinds import fitting_head
from specdec.draft_heads.formats.head_tensors import EMBEDDING, OUTPUT
from specdec.draft_heads.heads.draft_head import DraftModel, FeatureHead, TargetParts
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.mlp import mlp_kind
from specdec.kernels.kernel_set import KernelSet
from specdec.models.checkpoint import read_weights
from specdec.models.llama_draft import draft_of
from specdec.models.sharded_llama import ShardedLlama, SplitEmbedding, gathered, load_shard, split_rows
from specdec.models.tp_plan import Shard, TPPlan, tp_plan
from specdec.parallel.rank_group import RankGroup, lone_group
from specdec.parallel.rank_layout import RankGroups

WHOLE_VOCABULARY = {"embed_tokens": "replicate", "lm_head": "replicate"}


def load_split_head(folder: Path, target: ShardedLlama, kernels: KernelSet, window: int | None = None) -> LoadedHead:
    """Load this rank's part of a head. Files are mapped into memory, and only the part is kept.

    Embedding and output matrix are split where the target's are, unless the head scores selected rows of a matrix.

    Args:
        window: as for `load_head`.

    Raises:
        CheckpointError: as `load_head`.
        ValueError: the head cannot be split over so many ranks.
    """
    found, group = fitting_head(folder, target.shard.whole, window), target.group
    splits_vocabulary = target.shard.plan.vocabulary and not found.selects_rows
    plan = head_plan(found.config.llama, splits_vocabulary=splits_vocabulary)
    with _split_context(folder):
        shard = Shard.of(found.config.llama, group.rank, group.size, plan)
        shard.check_groups(kernels.limits.rounded_group)
    part = HeadPart(shard, group)
    parts = part_of_target(target) if splits_vocabulary else target.parts
    with error_context(folder):
        # All of them on every rank, so that either all ranks load the head or none.
        found.check_finite(target.dtype)
        loaded = found.kind.build(part.described(found), parts._replace(divide=part.divide), kernels)

    def own(draft: DraftModel) -> DraftModel:
        draft = draft._replace(part=shard)
        return gathering(draft, group) if splits_vocabulary else draft

    return loaded._replace(draft=own(loaded.draft), other=None if loaded.other is None else own(loaded.other))


def load_split_llama(
    folder: Path,
    target: ShardedLlama,
    dtype: torch.dtype,
    device: torch.device,
    kernels: KernelSet,
    window: int | None = None,
) -> DraftModel:
    """Load this rank's part of a model that drafts for a target.

    Args:
        window: as for `load_llama`.

    Raises:
        CheckpointError: as `load_llama` and `draft_of`.
        ValueError: the model cannot be split over so many ranks.
    """
    groups = RankGroups(target.group, lone_group(device))
    with _split_context(folder):
        model = load_shard(folder, dtype, device, kernels, groups, window, target.shard.whole.vocab_size)
    draft = draft_of(model, folder, target.shard.whole.max_position)._replace(part=model.shard)
    return gathering(draft, target.group) if model.shard.plan.vocabulary else draft


def head_plan(sizes: LlamaConfig, *, splits_vocabulary: bool = True) -> TPPlan:
    """Return the plan of a head with layers of these sizes, which it names as targets do.

    Modules that the plan does not name are replicated: `fc`, because every rank needs its whole output, and edge
    scorers, because a path may need any token's row of their matrices.
    """
    kind = mlp_kind(sizes)
    words = {name: word for name, word in tp_plan(kind).items() if not name.endswith("_norm")}
    return TPPlan(words if splits_vocabulary else words | WHOLE_VOCABULARY, kind)


def gathering(draft: DraftModel, group: RankGroup) -> DraftModel:
    """Return a draft model whose ranks gather the logits of their parts of the output matrix."""
    own = draft.readout
    gather = partial(gathered, total=own.size, group=group)
    return draft._replace(readout=MatrixReadout(own.projection, own.vocab_size, own.tokens, gather))


def part_of_target(target: ShardedLlama) -> TargetParts:
    """Return what a head may use of this rank's part of a target. A last stage reads its part of the embedding."""
    shard, weight = target.shard, target.norm.weight
    if shard.holds_embedding:
        embedding = target.embed_tokens.weight
    else:
        whole = read_weights(target.folder, weight.dtype)[EMBEDDING]
        embedding = shard.cut(EMBEDDING, whole).to(weight.device, weight.dtype, copy=True)
    return TargetParts(embedding, target.output, shard.whole)


class HeadPart:
    """One rank's part of a head."""

    def __init__(self, shard: Shard, group: RankGroup) -> None:
        self.shard, self.group = shard, group

    def described(self, found: HeadDescription[Any]) -> HeadDescription[Any]:
        """Return the description of the part: its own sizes, and its parts of the tensors."""
        tensors = copy(found.tensors)
        tensors.by_name = {name: self.cut(name, tensor) for name, tensor in tensors.by_name.items()}
        return replace(found, tensors=tensors, config=replace(found.config, llama=self.shard.config))

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """Return the part of a tensor, without a copy."""
        return (self._output(len(tensor)) if name == OUTPUT else self.shard).cut(name, tensor)

    def divide(self, head: FeatureHead) -> None:
        """Replace the parts of a head on the meta device that exchange something, or have fewer tokens."""
        shard, size = self.shard, self.shard.whole.hidden_size
        if shard.plan.vocabulary:
            head.embed_tokens = SplitEmbedding(shard.vocab, size, self.group)
            matrix = getattr(head, "lm_head", None)
            if matrix is not None:
                head.lm_head = nn.Linear(size, self._output(matrix.out_features).vocab.size, bias=False)
        split_rows(head.decoder_layers, shard.plan, self.group)

    def _output(self, tokens: int) -> Shard:
        """Return the shard of an output matrix that has `tokens` rows, the whole vocabulary's or fewer."""
        return replace(self.shard, whole=replace(self.shard.whole, vocab_size=tokens))


@contextmanager
def _split_context(folder: Path) -> Iterator[None]:
    """Say of an error about sizes which draft model has them, and that it need not be split."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise ValueError(
            f"{folder}: {error}; draft_tensor_parallel_size 1 leaves the draft model whole on each rank"
        ) from None
