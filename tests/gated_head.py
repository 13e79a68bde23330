"""A third kind of head, invented for tests: one module that says all about it, in serving and in training."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.draft_heads.formats.head_kind import HeadDescription, HeadKind, LoadedHead, Source, expected_shapes, filled
from specdec.draft_heads.formats.head_settings import HeadSettings, layer_settings
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.heads.draft_head import DraftModel, FeatureHead, HeadConfig, TargetParts
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.llama_layer import Attention, LlamaLayer, fuse_layer, split_layer
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.models.llama import LlamaModel
from specdec.train_eagle.training.training_kind import UNROLLED, TrainingKind, initialise, layer_config

LAYER = "layers.0."


class GatedHead(FeatureHead):
    """f_i = layer(f_{i-1} + sigmoid(gate(f_{i-1})) embedding(x_i))."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        size = config.llama.hidden_size
        self.gate = Linear(size, size, bias=False)
        self.layer = LlamaLayer(config.llama)

    def forward(self, tokens: Tensor, features: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:
        embedded = F.embedding(tokens, self.embed_tokens.weight)
        state: Tensor = self.layer(features + torch.sigmoid(self.gate(features)) * embedded, rotary, attentions[0])
        return state


class GatedKind(HeadKind[HeadConfig, GatedHead]):
    name = "gated"
    label = "Gated"
    sign = "gate.weight"

    def describe(self, settings: HeadSettings, tensors: HeadTensors) -> HeadDescription[HeadConfig]:
        llama, assumptions = settings.llama(tensors)
        config = HeadConfig(llama)
        return HeadDescription(
            kind=self,
            label=self.label,
            settings=settings,
            config=config,
            tensors=tensors,
            expected=expected_shapes(lambda: _file_names(GatedHead(config))),
            embedding=Source.FILE,
            output=Source.TARGET,
            reads=llama.hidden_size,
            assumptions=tuple(assumptions),
        )

    def build(self, description: HeadDescription[HeadConfig], target: TargetParts, kernels: KernelSet) -> LoadedHead:
        named = dict(description.tensors.by_name)
        fuse_layer(named, LAYER, description.config.llama)
        named = {name.replace(LAYER, "layer."): tensor for name, tensor in named.items()}
        head = filled(partial(GatedHead, description.config), named, {}, target, kernels)
        return LoadedHead(DraftModel(head, MatrixReadout(target.output, target.config.vocab_size)), description)

    def check_official(self, description: HeadDescription[HeadConfig]) -> None:
        if description.tokens is not None:
            raise CheckpointError("it proposes some tokens only")

    def official(self, head: GatedHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return layer_settings(head.llama), _file_names(head)


def _file_names(head: GatedHead) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {name.replace("layer.", LAYER): tensor for name, tensor in head.named_parameters()}
    split_layer(named, LAYER, head.llama)
    return named


class GatedTraining(TrainingKind[GatedHead]):
    files = GatedKind()
    settings = UNROLLED | {"feature_weight"}
    architecture = "GatedHeadModel"

    def new(self, model: LlamaModel, draft_tokens: Tensor | None) -> GatedHead:
        assert draft_tokens is None
        head = GatedHead(HeadConfig(layer_config(model.config)))
        initialise(head, model)
        return head
