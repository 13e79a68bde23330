"""A third kind of head, invented for tests: one module that says all about it, in serving and in training."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.draft_heads.formats.head_kind import HeadDescription, HeadKind, LoadedHead, Source, expected_shapes, filled
from specdec.draft_heads.formats.head_settings import HeadSettings, layer_settings
from specdec.draft_heads.formats.head_tensors import HeadTensors
from specdec.draft_heads.heads.draft_head import DraftModel, FeatureHead, HeadConfig, HeadForm, TargetParts
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.checkpoint_files import CheckpointError
from specdec.draft_heads.llama.linear import Linear
from specdec.draft_heads.llama.llama_layer import Attention, LlamaLayer
from specdec.draft_heads.llama.rope import Rotary
from specdec.kernels.kernel_set import KernelSet
from specdec.models.llama import LlamaWeights
from specdec.train_eagle.training.training_kind import UNROLLED, TrainingKind, initialise, layer_config


class GatedHead(FeatureHead):
    """f_i = layer(f_{i-1} + sigmoid(gate(f_{i-1})) embedding(x_i))."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        size = config.llama.hidden_size
        self.gate = Linear(size, size, bias=False)
        self.layers = nn.ModuleList([LlamaLayer(config.llama)])

    def form(self, kernels: KernelSet | None) -> HeadForm:
        return GatedForm(self, kernels)


class GatedForm(HeadForm):
    def __init__(self, head: GatedHead, kernels: KernelSet | None) -> None:
        super().__init__(head, kernels)
        self.gate, (self.layer,) = head.gate.form(kernels), self.layers

    def __call__(self, tokens: Tensor, features: Tensor, rotary: Rotary, attentions: Sequence[Attention]) -> Tensor:
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
            expected=expected_shapes(lambda: GatedHead(config).split_parameters()),
            embedding=Source.FILE,
            output=Source.TARGET,
            reads=llama.hidden_size,
            assumptions=tuple(assumptions),
        )

    def build(self, description: HeadDescription[HeadConfig], target: TargetParts, kernels: KernelSet) -> LoadedHead:
        head = filled(partial(GatedHead, description.config), description.tensors.by_name, {}, target)
        return LoadedHead(
            DraftModel(head.form(kernels), MatrixReadout(target.output, target.config.vocab_size)), description
        )

    def check_official(self, description: HeadDescription[HeadConfig]) -> None:
        if description.tokens is not None:
            raise CheckpointError("it proposes some tokens only")

    def official(self, head: GatedHead) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return layer_settings(head.llama), head.split_parameters()


class GatedTraining(TrainingKind[GatedHead]):
    files = GatedKind()
    settings = UNROLLED | {"feature_weight"}
    architecture = "GatedHeadModel"

    def new(self, model: LlamaWeights, draft_tokens: Tensor | None, settings: Mapping[str, Any]) -> GatedHead:
        assert draft_tokens is None
        head = GatedHead(HeadConfig(layer_config(model.config, settings.get("window"))))
        initialise(head, model)
        return head
