"""A folder, whatever kind of head it holds, to what drafts."""

from pathlib import Path

import torch

from specdec.draft_heads.checkpoint import load_eagle_head
from specdec.draft_heads.checkpoint_files import CheckpointError, read_config, read_tensors
from specdec.draft_heads.draft_model import DraftModel, TargetParts
from specdec.draft_heads.eagle3_checkpoint import load_eagle3_head
from specdec.draft_heads.readout import MatrixReadout
from specdec.kernels.kernel_set import TORCH, KernelSet
from specdec.kernels.linear import Projection


def load_draft_model(
    folder: Path, target: TargetParts, dtype: torch.dtype, device: torch.device, kernels: KernelSet = TORCH
) -> DraftModel:
    """Load a head, told by its tensors and not by its name.

    Raises:
        CheckpointError: no head, or none that fits the target, with the reason.
    """
    settings, tensors = read_config(folder), read_tensors(folder)
    vocab_size = len(target.embedding)
    if any(name.startswith("midlayer.") for name in tensors):
        head = load_eagle3_head(folder, settings, tensors, target.embedding, target.num_layers, dtype, device, kernels)
        tokens = None if len(head.draft_tokens) == vocab_size else head.draft_tokens
        return DraftModel(head, MatrixReadout(Projection(head.lm_head.weight), vocab_size, tokens))
    if "fc.weight" not in tensors:
        raise CheckpointError(f"{folder}: not an EAGLE head: it has no tensor 'fc.weight'")
    eagle = load_eagle_head(folder, target.embedding, dtype, device, kernels)
    return DraftModel(eagle, MatrixReadout(target.output, vocab_size))
