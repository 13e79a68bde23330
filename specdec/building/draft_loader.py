"""Loads the draft model that the settings name: a head or a small model, and its readout."""

import logging
from pathlib import Path
from typing import cast

import torch
from torch import nn

from specdec.building.tap_probe import settle_taps
from specdec.config import EngineConfig
from specdec.core.device import DTYPES
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.heads.draft_head import DraftModel, HeadForm, first_difference
from specdec.draft_heads.llama.linear import give_up
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.product import Product
from specdec.models.adapter_layout import attach_draft_adapters
from specdec.models.hub import shown_path
from specdec.models.llama import LlamaModel, load_llama
from specdec.models.llama_draft import draft_of, holds_llama
from specdec.models.sharded_llama import sharded
from specdec.models.split_head import load_split_head, load_split_llama

logger = logging.getLogger(__name__)


def load_drafts(config: EngineConfig, target: LlamaModel, kernels: KernelSet) -> DraftModel | None:
    """Load the draft model; None if the settings name no folder.

    With rounded weights, output matrices are then held in packed form alone, the target's too.

    Raises:
        CheckpointError: the folder holds nothing that can draft for this target, with the reason.
    """
    drafts = None if config.draft is None else _load(config, config.draft, target, kernels)
    if config.quantization != "none":
        _release_output_weights(target, drafts)
    return drafts


def _load(config: EngineConfig, folder: Path, target: LlamaModel, kernels: KernelSet) -> DraftModel:
    given, is_split = (kernels, config.draft_window_size), config.draft_tensor_parallel_size > 1
    if holds_llama(folder):
        where = DTYPES[config.dtype], torch.device(config.device)
        if is_split:
            draft_model = load_split_llama(folder, sharded(target), *where, *given)
        else:
            own = load_llama(folder, *where, *given, target.config.vocab_size)
            draft_model = draft_of(own, folder, target.config.max_position)
    else:
        loaded = (
            load_split_head(folder, sharded(target), *given) if is_split else load_head(folder, target.parts, *given)
        )
        name, described = shown_path(folder), loaded.description
        logger.info("%s: %s in the layout of %s", name, described.label, described.settings.layout)
        for assumption in described.assumptions:
            logger.info("%s: assumed: %s", name, assumption)
        draft_model = settle_taps(loaded, target, config.model, kernels)
    positions, context = draft_model.head.llama.max_position, config.context(target.config.max_position)
    if positions < context:
        logger.warning(
            f"{folder} has {positions} positions, fewer than the {context} tokens of a request: beyond them nothing "
            "is drafted; limit requests by max_model_len, or take another draft model"
        )
    if not config.enable_lora:
        return draft_model
    adapters = attach_draft_adapters(draft_model.head, kernels, config.max_loras, config.max_lora_rank)
    return draft_model._replace(adapters=adapters)


def load_replacement(
    config: EngineConfig,
    target: LlamaModel,
    kernels: KernelSet,
    present: DraftModel | None,
) -> DraftModel:
    """Load the head that the settings name, to take the place of `present` in a running engine.

    The cache is laid out for the present head's shape, so the new one must have the same.

    Raises:
        ValueError: the folder holds no head of that shape, or the engine cannot replace its draft model.
    """
    folder = config.draft
    assert folder is not None
    if present is None or present.head.module is None:
        raise ValueError("the engine drafts without a head, so that none can be replaced; start it with a head")
    if holds_llama(folder):
        raise ValueError(f"{folder}: a small model, which cannot replace a head; start the engine anew with it")
    found = load_drafts(config, target, kernels)
    assert found is not None
    new, old = (cast("HeadForm", draft.head).config for draft in (found, present))
    if difference := first_difference(new, old):
        raise ValueError(f"{folder}: its {difference} as in the present head; start the engine anew with it")
    return found


def _release_output_weights(target: LlamaModel, drafts: DraftModel | None) -> None:
    """Give up output matrices as they were loaded; their products read them in packed form.

    Draft models are made from them, so this comes after the last.
    """
    products: list[Product] = [target.output]
    matrices: list[nn.Linear | None] = [target.weights.lm_head]
    if drafts is not None:
        products.append(drafts.readout.projection)
        matrices.append(drafts.head.lm_head)
    assert not any(product.keeps_weight for product in products)
    for product in products:
        product.weight = product.weight.new_empty(0)
    give_up(*matrices)
