"""A folder, whatever kind of head it holds, to what drafts."""

from pathlib import Path
from typing import NamedTuple

import torch

from specdec.draft_heads.formats.eagle3_checkpoint import build_eagle3_head
from specdec.draft_heads.formats.eagle_checkpoint import build_eagle_head
from specdec.draft_heads.formats.foreign_heads import refuse_foreign
from specdec.draft_heads.formats.head_description import HeadDescription, Source
from specdec.draft_heads.formats.recogniser import recognise
from specdec.draft_heads.heads.draft_head import DraftModel, TargetParts
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import error_context, read_config, read_tensors
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.linear import Projection


class LoadedHead(NamedTuple):
    """A head, and what its folder left open.

    Attributes:
        draft: what drafts.
        description: what it was recognised as.
        other: the same weights reading the layers that the folder's ids mean if they count the other way; None where
            it is certain which way they count. `specdec.engine.tap_probe` finds out.
    """

    draft: DraftModel
    description: HeadDescription
    other: DraftModel | None = None


def load_head(
    folder: Path, target: TargetParts, dtype: torch.dtype, device: torch.device, kernels: KernelSet
) -> LoadedHead:
    """Load a head, told by its config.json and its tensors and not by its name.

    Raises:
        CheckpointError: no head, or none that is supported and fits the target, with the reason.
    """
    settings = read_config(folder)
    with error_context(folder):
        refuse_foreign(settings)
    tensors = read_tensors(folder)
    vocab_size = len(target.embedding)
    with error_context(folder):
        found = recognise(settings, tensors)
        found.check(target.sizes)
        if found.taps is None:
            head = build_eagle_head(found, target.embedding, dtype, device, kernels)
            return LoadedHead(DraftModel(head, _readout(found, target, vocab_size, dtype, device)), found)
        taps = found.taps.of(target.num_layers)
        head3 = build_eagle3_head(found, taps.layers, target, dtype, device, kernels)
        tokens = None if found.tokens is None else head3.draft_tokens
        output = target.output if found.output == Source.TARGET else Projection(head3.lm_head.weight)
        draft = DraftModel(head3, MatrixReadout(output, vocab_size, tokens))
        return LoadedHead(draft, found, draft._replace(head=head3.reading(taps.others)) if taps.others else None)


def load_draft_model(
    folder: Path, target: TargetParts, dtype: torch.dtype, device: torch.device, kernels: KernelSet
) -> DraftModel:
    """`load_head`, by the likelier reading of what its folder leaves open.

    Raises:
        CheckpointError: no head, or none that is supported and fits the target, with the reason.
    """
    return load_head(folder, target, dtype, device, kernels).draft


def _readout(
    found: HeadDescription, target: TargetParts, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> MatrixReadout:
    """Of an EAGLE-1/2 head: the target's output matrix or the file's, and all its rows or those of some tokens."""
    if found.output == Source.TARGET and found.tokens is None:
        return MatrixReadout(target.output, vocab_size)
    matrix = target.output.weight
    if found.output == Source.FILE:
        matrix = found.tensors.by_name["lm_head.weight"].to(device, dtype)
    if found.tokens is None:
        return MatrixReadout(Projection(matrix), vocab_size)
    tokens, order = found.tokens.to(device).sort()
    return MatrixReadout(Projection(matrix[tokens if len(matrix) == vocab_size else order]), vocab_size, tokens)
