"""Loading of the draft model: a head or a small Llama, with its readout as the settings ask."""

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
    """Return the folder of the target that a speculators head's config.json names, or None if it names none.

    Raises:
        CheckpointError: a folder without config.json, or a target that is not on this machine.
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
    """Find a checkpoint by its path, relative to here or to `beside`, or by its name in the Hugging Face cache.

    Nothing is downloaded.
    """
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
    """Load the draft model that the settings name, or None if they name no folder.

    Args:
        kept_tokens: tokens that stay in the draft vocabulary however small it is.

    Raises:
        CheckpointError: a folder that cannot draft for this target, with the reason.
        ValueError: a draft vocabulary or rank that the draft model cannot have.
    """
    folder = config.draft
    if not isinstance(folder, Path):
        return None
    if holds_llama(folder):
        where = (DTYPES[config.dtype], torch.device(config.device), kernels)
        draft_model = load_llama_draft(folder, config.model, target.config, *where)
    else:
        draft_model = settle_taps(load_head(folder, target.parts, kernels), target, config.model, kernels)
    if config.draft_vocab is not None:
        assert isinstance(draft_model.readout, MatrixReadout)
        draft_model = draft_model._replace(
            readout=trimmed_readout(draft_model.readout, config.draft_vocab, kept_tokens)
        )
    if config.draft_rank is not None:
        assert isinstance(draft_model.readout, MatrixReadout)
        draft_model = draft_model._replace(readout=CandidateReadout(draft_model.readout, config.draft_rank))
    return draft_model
