"""A small Llama as a draft head, which reads the text alone and nothing of the target."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from specdec.draft_heads.formats.head_kinds import kind_of
from specdec.draft_heads.formats.head_settings import HeadSettings
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.heads.draft_head import CachedHead, DraftModel, TargetOutput
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, check_finite, error_context, read_config
from specdec.draft_heads.llama.llama_layer import Attention
from specdec.draft_heads.llama.rope import Rotary
from specdec.draft_heads.llama.weight_files import read_tensors
from specdec.gguf.file import is_gguf
from specdec.kernels.types.fused import HeadWeights
from specdec.models.llama import LlamaModel


class LlamaDraftHead(CachedHead):
    """A Llama whose row of token i takes x_i, is stored at entry i, and predicts x_(i+1).

    Args:
        model: the Llama.
        max_position: positions of the target, beyond which nothing is drafted.
    """

    def __init__(self, model: LlamaModel, max_position: int) -> None:
        llama = replace(model.config, max_position=min(model.config.max_position, max_position))
        super().__init__(llama, llama.layer_windows, model.mixers)
        self.model, self.lm_head = model, model.weights.lm_head

    def __call__(self, tokens: Tensor, features: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:  # noqa: ARG002
        """Return the states after the last norm, `[rows, hidden_size]`; for the arguments see `CachedHead`."""
        output: TargetOutput = self.model(tokens, rotary, attentions)
        return output.features

    def drafting_weights(self) -> HeadWeights | None:
        """Return the Llama's parts; None where it has no pass in one call."""
        own = self.model.fused_weights(None)
        if own is None:
            return None
        return HeadWeights(own.embedding, own.eps, own.layers, norm=own.norm, states_are_normed=True)


def holds_llama(folder: Path) -> bool:
    """Return whether a folder holds a whole model and no head, by its tensors; False if it cannot be read."""
    if is_gguf(folder):
        return True
    try:
        tensors = HeadTensors(read_tensors(folder))
        is_head = kind_of(HeadSettings.from_json(read_config(folder)), tensors) is not None
    except CheckpointError:
        return False
    return "embed_tokens.weight" in tensors and "norm.weight" in tensors and not is_head


def draft_of(model: LlamaModel, folder: Path, max_position: int) -> DraftModel:
    """Return the draft model that a loaded Llama is for a target, which `check_draft` has compared with it.

    Args:
        folder: the Llama's.
        max_position: the target's.

    Raises:
        CheckpointError: the Llama's weights are not finite.
    """
    if not is_gguf(folder):
        with error_context(folder):
            # A target with such weights fails its first request; drafts would only be missing.
            check_finite(read_tensors(folder), model.norm.weight.dtype)
    return DraftModel(LlamaDraftHead(model, max_position), MatrixReadout(model.output, model.config.vocab_size))
