"""A kind of draft head as training sees it: fresh heads, their loss, and what is said about a published one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from specdec.draft_heads.formats.head_kind import HeadKind
from specdec.draft_heads.heads.draft_head import FeatureHead
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.models.llama import LlamaWeights
from specdec.train_eagle.training.head_trainer import HeadTrainer, LossSettings, UnrolledTrainer

H = TypeVar("H", bound=FeatureHead)
# Settings of heads that are unrolled over their own states.
UNROLLED = frozenset({"unroll", "noise", "token_weight", "anchors"})
# Scale of a fresh head's weights for taps before the last, relative to other matrices.
OTHER_TAPS = 0.2


class TrainingKind(ABC, Generic[H]):
    """A kind of head that can be trained. `training_kinds.TRAINING_KINDS` lists all of them.

    Attributes:
        files: the same kind in serving, which names it and writes its folders.
        settings: the settings of a run that not every kind honours, as far as this one does.
        architecture: name by which vLLM and SGLang choose a class for an exported head.
    """

    files: HeadKind[Any, H]
    settings: frozenset[str] = frozenset()
    architecture: str

    @abstractmethod
    def new(self, model: LlamaWeights, draft_tokens: Tensor | None, settings: Mapping[str, Any]) -> H:
        """Make a fresh head of a target's sizes, with the target's embedding, frozen.

        Args:
            draft_tokens: int64, ascending, the tokens that it shall propose; None for all.
            settings: a run's, by name, which may give its sizes and its window.
        """

    def default_draft_vocab(self, target: LlamaConfig) -> int:  # noqa: ARG002
        """Return how many tokens a head of a target's sizes proposes where no setting says; by default 0, for all."""
        return 0

    def trainer(self, head: H, lm_head: Tensor, settings: LossSettings) -> HeadTrainer:
        """Return the module that turns a `FeatureBatch` into an `UnrolledLoss`.

        Args:
            lm_head: `[vocab_size, hidden_size]`, the target's output matrix.
        """
        return UnrolledTrainer(head, lm_head, settings)

    def facts(self, head: H) -> str:  # noqa: ARG002
        """Return sentences about a head for its model card."""
        return ""

    def drafted(self, head: H) -> int:  # noqa: ARG002
        """Return how many tokens the card has other engines draft."""
        return 3

    def engines(self, head: H) -> tuple[str, ...]:  # noqa: ARG002
        """Return which of "vLLM" and "SGLang" can serve an exported head."""
        return ()


def layer_config(target: LlamaConfig, window: int | None = None) -> LlamaConfig:
    """Return one layer of the target's sizes with default rotary settings, as the official heads have.

    Args:
        window: tokens that it sees; None for all.
    """
    # A Llama's settings, whatever the target's family.
    plain: Any = dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "output_bias", "mlp_bias", "qk_norm", "normalised_head"), False
    )
    rope = RopeConfig(theta=target.rope.theta)
    windows = (window,) if window else ()
    return replace(target, num_layers=1, rope=rope, windows=windows, alibi_slopes=(), **plain)


def initialise(head: FeatureHead, model: LlamaWeights) -> None:
    """Draw a head's matrices, and give it the target's embedding, which is not trained."""
    for parameter in head.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    head.embed_tokens.weight.data.copy_(model.embed_tokens.weight)
    head.embed_tokens.weight.requires_grad_(False)


def input_norm(model: LlamaWeights, taps: Sequence[int]) -> Tensor:
    """Return the weight of the norm with which the target's layer behind the last tap begins."""
    norm = model.decoder_layers[taps[-1]].input_layernorm
    assert norm is not None
    return norm.weight


@torch.no_grad()
def begin_as_target(head: FeatureHead, fc: nn.Linear, layers: Iterable[nn.Module], model: LlamaWeights) -> None:
    """Begin with copies of the target's layers behind the last tap, and with that tap as the feature.

    A matrix that reads an embedding before the state takes the target's for the state. Parts that only one of both has,
    such as norms of keys, stay as they are.

    Args:
        fc: reads the taps.
        layers: the head's.
    """
    hidden = head.llama.hidden_size
    fc.weight.mul_(OTHER_TAPS)
    fc.weight[:, -hidden:] += torch.eye(hidden, device=fc.weight.device)
    for place, layer in enumerate(layers, head.taps[-1]):
        given = dict(model.layers[min(place, len(model.layers) - 1)].named_parameters())
        for name, parameter in layer.named_parameters():
            if name in given:
                own = parameter[..., -given[name].shape[-1] :]
                if own.shape == given[name].shape:
                    own.copy_(given[name])
