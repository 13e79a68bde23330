"""From settings to what drafts: a head or a small model, and how its next tokens are scored."""

from collections.abc import Collection
from pathlib import Path

import torch
from transformers.utils import cached_file

from specdec.config import EngineConfig
from specdec.core.device import DTYPES
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.draft_heads.heads.readout import CandidateReadout, MatrixReadout, trimmed_readout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, error_context, read_config
from specdec.engine.tap_probe import settle_taps
from specdec.kernels.kernel_set import KernelSet
from specdec.models.llama import LlamaModel
from specdec.models.llama_draft import holds_llama, load_llama_draft


def named_target(head: Path) -> Path | None:
    """The folder of the target in a speculators head's config.json; None where it names none.

    Raises:
        CheckpointError: no config.json, or a target that is not on this machine.
    """
    settings = read_config(head)
    with error_context(head):
        name = HeadSettings.from_json(settings).verifier
        if name is None:
            return None
        folder = local_folder(name, head)
        if folder is None:
            raise CheckpointError(f"its target {name!r} is neither a folder nor in the Hugging Face cache; give one")
    return folder


def local_folder(name: str, beside: Path) -> Path | None:
    """A checkpoint by its path, from here or from `beside`, or by its hub's name in the cache; nothing is fetched."""
    for folder in (Path(name), beside / name):
        if folder.is_dir():
            return folder
    try:
        config = cached_file(name, "config.json", local_files_only=True)
    except (OSError, ValueError):
        return None
    return Path(config).parent if config else None


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
    if holds_llama(folder):
        drafts = load_llama_draft(
            folder, config.model, target.config, DTYPES[config.dtype], torch.device(config.device), kernels
        )
    else:
        drafts = settle_taps(load_head(folder, target.parts, kernels), target, config.model, kernels)
    if config.draft_vocab is not None:
        assert isinstance(drafts.readout, MatrixReadout)
        drafts = drafts._replace(readout=trimmed_readout(drafts.readout, config.draft_vocab, kept_tokens))
    if config.draft_rank is not None:
        assert isinstance(drafts.readout, MatrixReadout)
        drafts = drafts._replace(readout=CandidateReadout(drafts.readout, config.draft_rank))
    return drafts
