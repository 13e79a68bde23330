"""From settings to the engine of a rank."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdec.building.draft_corpus import draft_store
from specdec.building.draft_loader import load_drafts
from specdec.building.engine_builder import EngineBuilder
from specdec.building.plugins import import_plugins
from specdec.building.ranks import rank_config
from specdec.config import EngineConfig
from specdec.core.device import DTYPES, on_device
from specdec.engine.engine import LLMEngine
from specdec.engine.request_maker import RequestMaker
from specdec.kernels.kernel_set import KernelSet, choose_kernels
from specdec.kernels.types.threads import LimitedThreads, usable_threads
from specdec.models.adapter_layout import attach_adapters
from specdec.models.hub import shown_path
from specdec.models.llama import LlamaModel, load_llama
from specdec.models.sharded_llama import load_shard
from specdec.parallel.rank_layout import RankGroups
from specdec.parallel.ranks import Ranks
from specdec.verify.verifier import RULES

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, ranks: Ranks, requests: RequestMaker) -> LLMEngine:
    """Load this rank's part of the model, and build its engine. All ranks do so at the same time.

    Args:
        config: the settings of all ranks.
        requests: makes the requests of commands.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded.
        ValueError: settings that do not fit the model or the machine.
    """
    began, config = time.perf_counter(), rank_config(config, ranks.rank)
    import_plugins(config.plugins)
    if RULES[config.verify].is_lossy:
        logger.warning("verify %s: outputs may differ from the target's own, whatever seed they have", config.verify)
    device = torch.device(config.device)
    with on_device(device), LimitedThreads(usable_threads()):
        kernels = choose_kernels(config.kernels, device, DTYPES[config.dtype], config.threads, config.quantization)
        _check_kernels(ranks, kernels.name)
        if config.quantization == "q8":
            logger.warning("quantization q8: 8-bit weights: the model's outputs change")
        name, how = shown_path(config.model), f"{config.dtype} on {config.device}, {kernels.name} kernels"
        logger.info("loading target %s: %s", name, how)
        model = load_target(config, kernels, ranks.groups(device))
        size = f"{model.num_parameters:,} parameters"
        if ranks.layout.size > 1:
            size += f" on rank {ranks.rank} of {ranks.layout.size}"
        logger.info("target %s: %s, %s, loaded in %.1f s", name, size, how, time.perf_counter() - began)
        # Some may take longer than an operation between ranks may last.
        ranks.share(None)
        drafts = load_drafts(config, model, kernels) if ranks.layout.in_last_stage(ranks.rank) else None
        ranks.share(None)
        logger.info("drafts: %s", _drafts_in_words(config))
        if config.drafts_from_store:
            requests.store = draft_store(config, ranks, requests.tokenizer)
        requests.seeds.setstate(ranks.decide(requests.seeds.getstate))
        with _told_compilation(kernels.name, device):
            return EngineBuilder(config, model, drafts, kernels, ranks, requests).build()


def load_target(config: EngineConfig, kernels: KernelSet, groups: RankGroups | None) -> LlamaModel:
    """Load the target, or this rank's part of it, with a bank for adapters if it is to have any.

    Raises:
        CheckpointError: see `load_llama`.
        ValueError: the model cannot be split over the ranks.
    """
    where = DTYPES[config.dtype], torch.device(config.device)
    if groups is None:
        model = load_llama(config.model, *where, kernels)
    else:
        model = load_shard(config.model, *where, kernels, groups)
    if config.enable_lora:
        attach_adapters(model, kernels, config.max_loras, config.max_lora_rank)
    return model


@contextmanager
def _told_compilation(kernels: str, device: torch.device) -> Iterator[None]:
    """Log how many kernels are compiled meanwhile for a GPU: a first start takes long, and why should be seen."""
    if (kernels, device.type) != ("triton", "cuda"):
        yield
        return
    # It imports Triton.
    from specdec.kernels.triton.compilation import counted_compilation

    with counted_compilation() as counted:
        yield
    logger.info("Triton: %s", counted)


def _check_kernels(ranks: Ranks, name: str) -> None:
    """Refuse ranks with other kernels, whose results may differ in the last bit."""
    names = ranks.share(name)
    if len(set(names)) > 1:
        raise ValueError(f"kernels is 'auto', and ranks have the kernels {', '.join(names)}; set kernels to one")


def _drafts_in_words(config: EngineConfig) -> str:
    """Return what drafts, and the largest trees, for people."""
    shape = config.shape
    names = [*([shown_path(config.draft)] if config.draft else []), *config.chains]
    size = f"trees of at most {shape.nodes} nodes, depth {shape.depth}, branching {shape.branching}"
    return f"{' and '.join(names)}, {size}" if names else "none"
