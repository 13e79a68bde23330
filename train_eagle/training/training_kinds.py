"""The kinds of draft heads that can be trained."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.draft_heads.formats.head_kinds import KINDS
from specdec.draft_heads.heads.block_head import BlockConfig, BlockHead
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from specdec.draft_heads.heads.edge_scorers import MarkovConfig
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.models.llama import LlamaWeights
from specdec.train_eagle.training.block_trainer import BlockTrainer
from specdec.train_eagle.training.head_trainer import HeadTrainer, LossSettings, UnrolledTrainer
from specdec.train_eagle.training.train_config import RECIPES
from specdec.train_eagle.training.training_kind import (
    UNROLLED,
    TrainingKind,
    begin_as_target,
    initialise,
    input_norm,
    layer_config,
)

# The default draft vocabulary has a size between the first two, and is a multiple of the third.
LEAST_TOKENS, MOST_TOKENS, ROUNDED_TO = 8192, 32_000, 256
# Layers of the target that published block heads read.
MOST_TAPS = 5
# Settings of all block heads.
BLOCK = frozenset({
    "layers", "intermediate_size", "block_size", "causal", "mask_token", "anchors", "draft_vocab_size", "slot_weights",
    "dpace_alpha",
})  # fmt: skip


class EagleTraining(TrainingKind[EagleHead]):
    """EAGLE-1/2: the head predicts the target's features, and its states are scored by the target's output matrix."""

    files = KINDS["eagle"]
    settings = UNROLLED | {"feature_weight"}
    # vLLM knows the official name alone. SGLang has a name of its own, and a class with an fc.bias that no file fills.
    architecture = "LlamaForCausalLM"

    def new(self, model: LlamaWeights, draft_tokens: Tensor | None, settings: Mapping[str, Any]) -> EagleHead:
        assert draft_tokens is None
        # vLLM cannot load a head that has an fc.bias.
        head = EagleHead(EagleConfig(layer_config(model.config, settings.get("window")), fc_bias=False))
        initialise(head, model)
        return head

    def engines(self, head: EagleHead) -> tuple[str, ...]:
        return () if head.config.fc_bias else ("vLLM",)


class Eagle3Training(TrainingKind[Eagle3Head]):
    """EAGLE-3: the head has an output matrix of its own, which may score some tokens only."""

    files = KINDS["eagle3"]
    settings = UNROLLED | {"draft_vocab_size"}
    # Both vLLM and SGLang know it.
    architecture = "LlamaForCausalLMEagle3"

    def new(self, model: LlamaWeights, draft_tokens: Tensor | None, settings: Mapping[str, Any]) -> Eagle3Head:
        target, output = model.config, model.lm_head_weight
        tokens = torch.arange(target.vocab_size, device=output.device) if draft_tokens is None else draft_tokens
        taps = default_taps(target.num_layers)
        layer = layer_config(target, settings.get("window"))
        head = Eagle3Head(Eagle3Config(layer, taps, target.hidden_size, len(tokens)))
        initialise(head, model)
        begin_as_target(head, head.fc, head.layers, model)
        first = head.first_layer
        first.hidden_norm.weight.data.copy_(input_norm(model, taps))
        first.input_layernorm.weight.data.fill_(1)
        head.draft_tokens.copy_(tokens)
        head.lm_head.weight.data.copy_(output[tokens.to(output.device)])
        head.norm.weight.data.copy_(model.norm.weight)
        return head

    def default_draft_vocab(self, target: LlamaConfig) -> int:
        """Return the tokens whose rows make the output matrix as large as the head's other trained weights.

        That gives 32,000 for targets of 1B parameters and more, as in EAGLE-3, SpecForge and speculators, and fewer for
        smaller ones, whose matrix of 32,000 rows would be most of the head.
        """
        with torch.device("meta"):
            sizes = Eagle3Config(layer_config(target), default_taps(target.num_layers), target.hidden_size, 1)
            head = Eagle3Head(sizes)
        tables = head.embed_tokens.weight.numel() + head.lm_head.weight.numel()
        rows = (sum(each.numel() for each in head.parameters()) - tables) // target.hidden_size
        tokens = max(LEAST_TOKENS, min(MOST_TOKENS, rows // ROUNDED_TO * ROUNDED_TO))
        return tokens if tokens < target.vocab_size else 0

    def trainer(self, head: Eagle3Head, lm_head: Tensor, settings: LossSettings) -> HeadTrainer:
        return UnrolledTrainer(head, lm_head, settings, head.lm_head, head.draft_tokens)

    def facts(self, head: Eagle3Head) -> str:
        taps = ", ".join(map(str, head.taps))
        proposes = f"{head.config.draft_vocab_size:,} of {head.llama.vocab_size:,} tokens"
        return f"It reads the inputs of the target's layers {taps} and proposes {proposes}."

    def engines(self, head: Eagle3Head) -> tuple[str, ...]:  # noqa: ARG002
        return "vLLM", "SGLang"


def block_taps(num_layers: int) -> tuple[int, ...]:
    """Return the layers that a block head reads, spread as in the official code: outputs of layers 1 to L - 3.

    A target with few layers gives as many as it has there; one with fewer than four, its middle one.
    """
    count = min(MOST_TAPS, num_layers - 3)
    if count <= 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))


class DFlashTraining(TrainingKind[BlockHead]):
    """DFlash: the slots of a block are independent, and scored by the target's output matrix."""

    files = KINDS["dflash"]
    settings = BLOCK
    architecture = "DFlashDraftModel"

    def new(self, model: LlamaWeights, draft_tokens: Tensor | None, settings: Mapping[str, Any]) -> BlockHead:
        given = {name: value for name, value in settings.items() if value is not None}
        head = BlockHead(self.config(model.config, draft_tokens, {**RECIPES[self.files.name], **given}))
        initialise(head, model)
        # The context rows of the first layer then are the target's own keys and values there, but for the norm of keys.
        begin_as_target(head, head.fc, head.decoder_layers, model)
        head.hidden_norm.weight.data.copy_(input_norm(model, head.taps))
        # The target's output matrix reads states that its own norm has scaled.
        head.norm.weight.data.copy_(model.norm.weight)
        if head.lm_head is not None and draft_tokens is not None:
            head.draft_tokens.copy_(draft_tokens)
            output = model.lm_head_weight
            head.lm_head.weight.data.copy_(output[draft_tokens.to(output.device)])
        return head

    def config(self, target: LlamaConfig, draft_tokens: Tensor | None, settings: Mapping[str, Any]) -> BlockConfig:
        """Return the shape of a fresh head, by settings of which none is None.

        Raises:
            ValueError: the mask token is none of the target's.
        """
        mask_token = settings.get("mask_token", target.vocab_size - 1)
        if mask_token >= target.vocab_size:
            raise ValueError(f"mask_token is {mask_token}; it must be below the target's {target.vocab_size} tokens")
        llama = layer_config(target)
        layers = settings["layers"]
        windows = (settings["window"],) * layers if "window" in settings else ()
        inner = settings.get("intermediate_size", llama.intermediate_size)
        return BlockConfig(
            replace(llama, num_layers=layers, windows=windows, intermediate_size=inner, qk_norm=True),
            block_taps(target.num_layers),
            settings["block_size"],
            mask_token,
            anchor_first=False,
            causal=(settings["causal"],) * layers,
            draft_vocab_size=None if draft_tokens is None else len(draft_tokens),
        )

    def trainer(self, head: BlockHead, lm_head: Tensor, settings: LossSettings) -> HeadTrainer:
        tokens = None if head.lm_head is None else head.draft_tokens
        return BlockTrainer(head, lm_head, settings, head.lm_head, tokens)

    def facts(self, head: BlockHead) -> str:
        own = head.config
        taps = ", ".join(map(str, own.taps))
        drafts = f"One pass drafts {own.num_slots} tokens" + (" and which follows which" if own.markov else "")
        return f"{drafts}. It reads the inputs of the target's layers {taps}; token {own.mask_token} is its mask."

    def drafted(self, head: BlockHead) -> int:
        return head.config.num_slots

    def engines(self, head: BlockHead) -> tuple[str, ...]:  # noqa: ARG002
        return ("vLLM",)


class DSparkTraining(DFlashTraining):
    """DSpark: a bias of low rank from the token before, and an estimate of each token's acceptance."""

    files = KINDS["dspark"]
    settings = BLOCK | {"markov_rank", "markov_kind", "confidence_weight"}
    architecture = "Qwen3DSparkModel"

    def config(self, target: LlamaConfig, draft_tokens: Tensor | None, settings: Mapping[str, Any]) -> BlockConfig:
        plain = super().config(target, draft_tokens, settings)
        markov = MarkovConfig(settings["markov_rank"], settings["markov_kind"])
        return replace(plain, anchor_first=True, markov=markov, confidence=True)


TRAINING_KINDS: dict[str, TrainingKind[Any]] = {
    kind.files.name: kind for kind in (EagleTraining(), Eagle3Training(), DFlashTraining(), DSparkTraining())
}
