"""From settings, a loaded target and what drafts for it to an engine."""

import logging
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from specdec.cache.kv_cache import KVCache, entry_bytes
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.config import EngineConfig
from specdec.core.device import DTYPES
from specdec.draft_heads.drafting.drafter import Drafter, NoDrafter, Proposal
from specdec.draft_heads.drafting.drafters import drafter_of, shape_for
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.engine.block_identity import block_keys
from specdec.engine.engine import LLMEngine
from specdec.engine.memory_profile import Rehearsal, cache_bytes
from specdec.execution.cost_measurement import measure_preemption_cost, measure_step_cost
from specdec.execution.model_runner import ModelRunner
from specdec.kernels.integers import ceil_div
from specdec.kernels.kernel_set import KernelSet
from specdec.kv_transfer.connector_factory import ConnectorContext, make_connector
from specdec.kv_transfer.kv_connector import KVCaches, KVConnector
from specdec.models.llama import LlamaModel
from specdec.scheduling.rank_values import read_values
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_cost import PreemptionCost
from specdec.verify.verifier import verifier_of

logger = logging.getLogger(__name__)


class EngineBuilder:
    """Builds an engine around a loaded target.

    Args:
        draft: the draft head or small model; None for plain decoding, or chains alone.

    Attributes:
        proposal: how drafts are chosen for the acceptance rule.
        head: the draft head, if any.
        shape: bounds of draft trees, as far as the draft model can fill them.
        slots: cache entries of a request's drafts.
        longest: limit of a request's tokens.
        draft_context: number of tokens from which on the draft model drafts nothing for a request; 0 without a model.
        block_bytes: memory of one cache block.
    """

    def __init__(self, config: EngineConfig, model: LlamaModel, draft: DraftModel | None, kernels: KernelSet) -> None:
        self.config, self.model, self.draft, self.kernels = config, model, draft, kernels
        self.proposal = Proposal.COUPLED if config.verify == "coupled" else Proposal.DRAWN
        self.device, self.dtype = torch.device(config.device), DTYPES[config.dtype]
        self.head = draft.head if draft else None
        self.shape = shape_for(draft, config.shape)
        self.slots = self.shape.slots if draft else self.shape.nodes if config.ngrams else 0
        self.longest = config.context(model.config.max_position)
        # Beyond its positions a head would guess.
        self.draft_context = self.head.llama.max_position - self.shape.positions if self.head else 0
        self.block_bytes = config.block_size * entry_bytes(model.config, self.head, self.dtype)

    def build(self) -> LLMEngine:
        """Check, profile, and assemble the engine with its cache at full size.

        Raises:
            ValueError: cache memory that is too small, or kernels that do not support the model or its trees.
        """
        self._check_kernels()
        num_blocks, num_host_blocks = self._num_blocks(), int(self.config.swap_space * (1 << 30)) // self.block_bytes
        tokens, mebibytes = num_blocks * self.config.block_size, num_blocks * self.block_bytes / (1 << 20)
        sizes = (tokens, num_blocks, self.config.block_size, mebibytes, num_host_blocks)
        logger.info("cache: %d tokens in %d blocks of %d, %.1f MiB; %d blocks in host memory", *sizes)
        with self.kernels.limited_threads():
            measures = self.config.scheduler.is_fitted
            return self._assemble(num_blocks, num_host_blocks, measures=measures, connects=True)

    def _check_kernels(self) -> None:
        for sizes in [self.model.config, *([self.head.llama] if self.head else [])]:
            self.kernels.check_model(sizes.head_dim, sizes.num_heads // sizes.num_kv_heads)
        # A request may bring a predicted text, whatever else drafts.
        self.kernels.check_tree(max(self.slots, self.shape.nodes))

    def _num_blocks(self) -> int:
        """Return how many blocks the memory holds, or the seats can use if that is less."""
        memory = cache_bytes(self.config, self._rehearse)
        if memory < self.block_bytes:
            raise ValueError(f"kv_cache_memory {memory} is less than one block of {self.block_bytes} bytes; raise it")
        most = self.config.scheduler.max_num_seqs * ceil_div(self.longest + self.slots, self.config.block_size)
        return min(memory // self.block_bytes, most)

    def _rehearse(self) -> int:
        """Run the largest steps on an engine that is thrown away; return the bytes of its cache."""
        rehearsal = Rehearsal(self.config, self.longest, max(self.slots, self.shape.nodes))
        rehearsal.run(self._assemble(rehearsal.num_blocks))
        return rehearsal.num_blocks * self.block_bytes

    def _assemble(
        self, num_blocks: int, num_host_blocks: int = 0, *, measures: bool = False, connects: bool = False
    ) -> LLMEngine:
        config = self.config
        cache = KVCache(
            num_blocks,
            config.block_size,
            self.model.config,
            self.head,
            self.dtype,
            self.device,
            num_host_blocks,
            kernels=self.kernels,
        )
        # Captures and measurements read it.
        cache.clear_null_block()
        runner = ModelRunner(self.model, cache, self.dtype, self.head, self.longest)
        drafter = self._drafter(cache)
        self._capture_graphs(runner, drafter)
        connector = self._connector(cache) if connects else None
        scheduler = self._scheduler(runner, drafter, connector, measures=measures)
        verifier = verifier_of(config.verify, self.kernels)
        return LLMEngine(scheduler, runner, cache, drafter, verifier, config.logprobs_mode)

    def _drafter(self, cache: KVCache) -> Drafter:
        config = self.config
        if self.draft is None:
            return NoDrafter()
        assert cache.draft is not None
        return drafter_of(
            self.draft,
            cache.draft,
            cache.features,
            config.block_size,
            self.dtype,
            self.shape,
            self.proposal,
            self.kernels,
        )

    def _capture_graphs(self, runner: ModelRunner, drafter: Drafter) -> None:
        if self.device.type != "cuda" or not self.kernels.on_device or self.config.enforce_eager:
            return
        # Imported late: they bring Triton.
        from specdec.execution.cuda_graphs import CudaGraphs, attach_graphs
        from specdec.execution.warm_up import capture_graphs

        began, seats = time.perf_counter(), self.config.scheduler.max_num_seqs
        model_drafter = drafter if isinstance(drafter, TreeDrafter) else None
        attach_graphs(runner, model_drafter, CudaGraphs().capture, seats, self.longest + self.slots)
        temperatures: Sequence[float] = (0.0, 1.0) if self.proposal == Proposal.DRAWN else (0.0,)
        shape = self.shape if self.draft or self.config.ngrams else None
        capture_graphs(runner, drafter, seats, self.longest, shape, self.draft_context, temperatures)
        logger.info("CUDA graphs captured in %.1f s", time.perf_counter() - began)

    def _connector(self, cache: KVCache) -> KVConnector | None:
        config = self.config
        if config.kv_transfer_config is None:
            return None
        keys = partial(block_keys, config, cache, self.head)
        context = ConnectorContext(KVCaches(cache.parts, self.kernels), cache.block_size, keys)
        cache.loader = connector = make_connector(config.kv_transfer_config, context)
        return connector

    def _scheduler(
        self, runner: ModelRunner, drafter: Drafter, connector: KVConnector | None, *, measures: bool
    ) -> Scheduler:
        config, cache = self.config, runner.cache
        manager = KVCacheManager(
            cache.num_blocks, cache.block_size, cache.num_host_blocks, config.enable_prefix_caching
        )
        swap_cost = measure_preemption_cost(runner) if cache.num_host_blocks else PreemptionCost()
        step_cost = None
        if measures:
            positions = min(self.model.config.max_position, self.head.llama.max_position if self.head else sys.maxsize)
            began = time.perf_counter()
            logger.info("measuring step costs")
            step_cost = measure_step_cost(runner, positions, drafter, self.shape if self.draft else None)
            seconds = (time.perf_counter() - began, 1e3 * step_cost.passes(1), 1e3 * step_cost.all_levels(1))
            logger.info("step costs measured in %.1f s: plain step %.2f ms, draft tree %.2f ms", *seconds)
        return Scheduler(
            manager,
            config.scheduler,
            self.shape,
            swap_cost,
            self.draft_context,
            step_cost,
            read_values(config.draft) if config.draft is not None else (),
            draws=self.proposal == Proposal.DRAWN,
            connector=connector,
        )
