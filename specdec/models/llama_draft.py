"""A small Llama as a draft head: it reads the text alone, and nothing of the target."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specdec.draft_heads.heads.draft_head import DraftModel, TargetOutput
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError, peek_tensors
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import Attention
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.models.llama import LlamaModel, load_llama
from specdec.models.tokenizer import check_same_vocabulary


class LlamaDraftHead:
    """Its row of token i takes x_i, is stored at entry i, and predicts x_(i+1)."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model

    @property
    def llama(self) -> LlamaConfig:
        return self.model.config

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def feature_size(self) -> int:
        return 0

    @property
    def first_entry(self) -> int:
        return 0

    def feature_of(self, output: TargetOutput) -> Tensor:
        """`[rows, 0]`."""
        return output.features[:, :0]

    def __call__(
        self,
        tokens: Tensor,
        features: Tensor,  # noqa: ARG002
        rotary: Rotary,
        attentions: Sequence[Attention],
    ) -> Tensor:
        """`[rows, hidden_size]` behind the last norm.

        Args:
            tokens: int64 `[rows]`, x_i.
            features: not read.
            rotary: of position i.
            attentions: one per layer.
        """
        output: TargetOutput = self.model(tokens, rotary, attentions)
        return output.features

    def read(self, hidden: Tensor) -> Tensor:
        """What its output matrix takes."""
        return hidden


def holds_llama(folder: Path) -> bool:
    """Whether a folder holds a whole model and no head, told by its tensors; False where it cannot be read."""
    try:
        names = {name.removeprefix("model.") for name in peek_tensors(folder, ())}
    except CheckpointError:
        return False
    is_head = any("fc." in name or "hidden_norm" in name for name in names)
    return {"embed_tokens.weight", "norm.weight"} <= names and not is_head


def load_llama_draft(
    folder: Path, target: Path, vocab_size: int, dtype: torch.dtype, device: torch.device, kernels: KernelSet
) -> DraftModel:
    """Load a model that drafts for another one.

    Args:
        target: the other one's folder, for its tokenizer.
        vocab_size: the other one's.

    Raises:
        CheckpointError: it cannot be loaded, or it has another vocabulary.
    """
    model = load_llama(folder, dtype, device, kernels)
    if model.config.vocab_size != vocab_size:
        raise CheckpointError(
            f"{folder}: the draft model's vocab_size {model.config.vocab_size} does not fit the target's {vocab_size}"
        )
    check_same_vocabulary(folder, target)
    return DraftModel(LlamaDraftHead(model), MatrixReadout(model.output, vocab_size))
