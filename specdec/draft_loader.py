"""From settings to what drafts: a head or a small model, and how its next tokens are scored."""

from collections.abc import Collection
from pathlib import Path

from specdec.config import EngineConfig
from specdec.draft_heads.candidate_readout import CandidateReadout
from specdec.draft_heads.draft_model import DraftModel
from specdec.draft_heads.load_draft import load_head
from specdec.draft_heads.readout import MatrixReadout
from specdec.draft_heads.trimmed_readout import trimmed_readout
from specdec.kernels.kernel_set import KernelSet
from specdec.models.llama import LlamaModel
from specdec.models.llama_draft import holds_llama, load_llama_draft
from specdec.tap_probe import settle_taps


def load_drafts(
    config: EngineConfig, target: LlamaModel, kernels: KernelSet, kept_tokens: Collection[int]
) -> DraftModel | None:
    """What a draft folder holds, None where the settings name none.

    Args:
        kept_tokens: stay in the draft vocabulary however few tokens are asked for.

    Raises:
        CheckpointError: nothing that can draft for this target, with the reason.
        ValueError: a draft vocabulary or rank that it cannot have.
    """
    folder = config.draft
    if not isinstance(folder, Path):
        return None
    where = (config.dtype, config.device, kernels)
    if holds_llama(folder):
        drafts = load_llama_draft(folder, config.model, target.config.vocab_size, *where)
    else:
        drafts = settle_taps(load_head(folder, target.parts, *where), target, config.model, kernels)
    if config.draft_vocab is not None:
        assert isinstance(drafts.readout, MatrixReadout)
        drafts = drafts._replace(readout=trimmed_readout(drafts.readout, config.draft_vocab, kept_tokens))
    if config.draft_rank is not None:
        assert isinstance(drafts.readout, MatrixReadout)
        drafts = drafts._replace(readout=CandidateReadout(drafts.readout, config.draft_rank))
    return drafts
