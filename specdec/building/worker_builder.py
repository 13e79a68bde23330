"""Assembly of a worker from settings and loaded models."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.building.block_identity import block_keys
from specdec.building.draft_loader import load_replacement
from specdec.building.ranks import layout_of
from specdec.cache.kv_cache import KVCache, KVDtypes, entry_bytes
from specdec.config import EngineConfig
from specdec.core.device import DTYPES
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import Drafter, NoDrafter, Proposal
from specdec.draft_heads.drafting.drafters import drafter_of, shape_for
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.execution.model_runner import ModelRunner
from specdec.execution.split_verifier import SplitVerifier
from specdec.execution.stages import StageWorker
from specdec.execution.worker import Worker
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.kv_entries import KV_DTYPES, LARGEST
from specdec.kernels.types.ragged_rows import WORD_BITS
from specdec.kv_transfer.connector_factory import ConnectorContext, make_connector
from specdec.kv_transfer.kv_connector import KVCaches, KVConnector
from specdec.models.adapter_layout import draft_layout, draft_part, target_layout, target_part
from specdec.models.llama import LlamaModel
from specdec.models.lora_adapter import AdapterFiles, AdapterWeights, read_adapter
from specdec.models.sharded_llama import sharded
from specdec.parallel.rank_layout import RankLayout
from specdec.parallel.ranks import Ranks
from specdec.verify.verifier import RULES, Verifier

if TYPE_CHECKING:
    from specdec.execution.cuda_graphs import CudaGraphs

logger = logging.getLogger(__name__)


class DraftSizes(NamedTuple):
    """Sizes of the draft model on which plans depend. Ranks of earlier pipeline stages get them without the model.

    Attributes:
        shape: bounds of draft trees, as far as the draft model can fill them.
        slots: cache entries of a tree.
        entries: those of a request's drafts: of one tree, or two.
        context: number of tokens from which on the draft model drafts nothing for a request; 0 without a model.
        positions: those that the draft model has; None without one.
        reach: see `CachedHead.reach`; None without a model.
        taps: target layers that the head reads.
    """

    shape: DraftShape
    slots: int
    entries: int
    context: int = 0
    positions: int | None = None
    reach: int | None = None
    taps: tuple[int, ...] = ()

    @property
    def words(self) -> int:
        """Number of 64-bit words that the ancestor bits of a tree's nodes need."""
        return max(1, ceil_div(self.slots, WORD_BITS))

    @classmethod
    def of(cls, config: EngineConfig, draft: DraftModel | None, kernels: KernelSet) -> "DraftSizes":
        """Return the sizes of a draft model, or of chains alone."""
        shape = shape_for(draft, config.shape)
        if draft is None:
            chained = shape.nodes if config.chains else 0
            return cls(shape, chained, chained)
        head = draft.head
        positions = head.llama.max_position
        entries = shape.slots_ahead if follows(config, kernels) else shape.slots
        # Beyond its positions a head would guess.
        return cls(shape, shape.slots, entries, positions - shape.positions, positions, head.reach, tuple(head.taps))


def follows(config: EngineConfig, kernels: KernelSet) -> bool:
    """Return whether trees are drafted ahead: by CUDA graphs, which do not wait for the host; see `DraftsAhead`."""
    has_graphs = torch.device(config.device).type == "cuda" and kernels.on_device and not config.enforce_eager
    return has_graphs and not config.shape.min_reach


def passes_ahead(device: torch.device, layout: RankLayout) -> bool:
    """Return whether plain steps are launched ahead: on a GPU, which would wait for the host between two of them."""
    return device.type == "cuda" and layout.stages == 1


class WorkerBuilder:
    """Builder of workers around a loaded target.

    Args:
        draft: the draft head or small model; None for plain decoding, or chains alone, and in pipeline stages before
            the last.
        ranks: this rank among all.

    Attributes:
        proposal: how drafts are chosen for the acceptance rule.
        head: the draft head, if any.
        sizes: of the draft model, be it here or in the last pipeline stage.
        longest: limit of a request's tokens.
        kv_dtypes: of the cache's keys and values.
        target_scales: the checkpoint's scales of them, where they are for the codes in use.
        block_bytes: memory of one cache block.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LlamaModel,
        draft: DraftModel | None,
        kernels: KernelSet,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self.config, self.model, self.draft, self.kernels = config, model, draft, kernels
        self.proposal = Proposal.DRAWN if RULES[config.verify].draws else Proposal.COUPLED
        self.device, self.dtype = torch.device(config.device), DTYPES[config.dtype]
        self.head = draft.head if draft else None
        self.sizes = self._ranks.decide(lambda: DraftSizes.of(config, draft, kernels))
        self.longest = config.context(model.config.max_position)
        self.kv_dtypes = self._kv_dtypes()
        # One stream and its workspaces, also for a head that comes later.
        self._graphs: CudaGraphs | None = None
        self.target_scales = self._target_scales()
        entry = entry_bytes(model.config, self.head, self.dtype, self.kv_dtypes, self.target_scales)
        self.block_bytes = config.block_size * entry

    def build(self, num_blocks: int) -> Worker:
        """Allocate a cache, and capture CUDA graphs of common steps where they are used."""
        config = self.config
        cache = KVCache(
            num_blocks,
            config.block_size,
            self.model.config,
            self.head,
            self.dtype,
            self.device,
            kernels=self.kernels,
            kv_dtypes=self.kv_dtypes,
            target_scales=self.target_scales,
        )
        # Captures and measurements read it.
        cache.clear_null_block()
        sizes = self.sizes
        return self._worker(
            ModelRunner(self.model, cache, self.dtype, self.head, self.longest, sizes.taps, sizes.words)
        )

    def _kv_dtypes(self) -> KVDtypes:
        config = self.config
        asked: str = config.kv_cache_dtype
        if asked == "auto" and self.model.config.kv_cache_dtype is not None:
            asked = self.model.config.kv_cache_dtype
        draft = config.draft_kv_cache_dtype or asked
        return KVDtypes(KV_DTYPES.get(asked, self.dtype), KV_DTYPES.get(draft, self.dtype))

    def _target_scales(self) -> Tensor | None:
        """Return the checkpoint's scales, where they are for the codes in use."""
        made_for = self.model.config.kv_cache_dtype
        scales, own = self.model.kv_scales, self.kv_dtypes.target
        if scales is not None and own in LARGEST and KV_DTYPES.get(made_for or "fp8_e4m3") == own:
            return scales
        if own == torch.float8_e4m3fn:
            logger.warning(
                "kv_cache_dtype is fp8_e4m3, and the checkpoint has no scales for it: keys and values beyond %g become "
                "%g; where that hurts, use fp8_e5m2 or int8",
                LARGEST[own],
                LARGEST[own],
            )
        return None

    def load_draft(self, folder: Path) -> DraftModel:
        """See `WorkerMaker.load_draft`."""
        config = replace(self.config, draft=folder)
        return load_replacement(config, self.model, self.kernels, self.draft)

    def with_draft(self, worker: Worker, draft: DraftModel) -> Worker:
        """See `WorkerMaker.with_draft`.

        Graphs that hold weights of the old head are released before others are captured. If that fails, the old worker
        goes on without them.
        """
        before, runner = (self.draft, self.head), worker.runner
        if isinstance(worker.drafter, TreeDrafter):
            worker.drafter.graphs = None
        try:
            self.draft, self.head = draft, draft.head
            runner.use_head(draft.head)
            return self._worker(runner)
        except BaseException:
            self.draft, self.head = before
            assert self.head is not None
            runner.use_head(self.head)
            raise

    def read_adapter(self, files: AdapterFiles) -> AdapterWeights:
        """See `WorkerMaker.read_adapter`."""
        target = None
        if files.target is not None:
            layout = target_layout(self.model.whole_config)
            whole = read_adapter(files.target, layout, self.config.max_lora_rank, self.dtype)
            target = target_part(self.model, whole)
        draft = None
        if files.draft is not None:
            if self.draft is None:
                raise ValueError(
                    f"draft_lora_path is {str(files.draft)!r}, and the engine drafts without a model; leave it out"
                )
            own = read_adapter(
                files.draft, draft_layout(self.draft), self.config.max_lora_rank, self.dtype, of="draft model"
            )
            draft = draft_part(self.draft, own)
        return AdapterWeights(target, draft)

    def put_adapter(self, place: int, adapter: AdapterWeights) -> None:
        """See `WorkerMaker.put_adapter`."""
        if adapter.target is not None:
            assert self.model.adapters is not None
            self.model.adapters.put(place, adapter.target)
        if adapter.draft is not None:
            assert self.draft is not None
            assert self.draft.adapters is not None
            self.draft.adapters.put(place, adapter.draft)

    def _worker(self, runner: ModelRunner) -> Worker:
        drafter: Drafter = NoDrafter()
        if not self._ranks.layout.in_last_stage(self._ranks.rank):
            self._capture_graphs(runner, drafter)
            return StageWorker(runner, self._verifier(), self._ranks)
        if self.draft is not None:
            kv = runner.cache.draft
            assert kv is not None
            sizes = self.config.block_size, self.dtype, self.sizes.shape
            drafter = drafter_of(self.draft, kv, runner.cache.features, *sizes, self.proposal, self.kernels)
        self._capture_graphs(runner, drafter)
        return Worker(runner, drafter, self._verifier(), self._graphs)

    def connect(self, worker: Worker, block_bytes: int, rank: int, parts: Sequence[str]) -> KVConnector:
        """See `WorkerMaker.connect`."""
        config, cache = self.config, worker.cache
        assert config.kv_transfer_config is not None
        common: set[str] = set()
        if config.tensor_parallel_size > 1:
            # Features are sums over ranks; a head that is split has its own part of keys and values.
            common = {"features"} if config.draft_tensor_parallel_size > 1 else {"features", "head"}
        layout = layout_of(config)
        caches = KVCaches(cache.parts, self.kernels, layout.size, layout.tensor, frozenset(common), parts)
        keys = partial(block_keys, config, cache, self.head, rank)
        context = ConnectorContext(caches, cache.block_size, keys, block_bytes, rank)
        connector = make_connector(config.kv_transfer_config, context)
        cache.load = connector.start_load_kv
        return connector

    def _verifier(self) -> Verifier:
        verifier = RULES[self.config.verify].make(self.kernels)
        return verifier if self.model.shard is None else SplitVerifier(verifier, sharded(self.model), self.kernels)

    def _capture_graphs(self, runner: ModelRunner, drafter: Drafter) -> None:
        """Capture passes and drafting where CUDA graphs are used; passes that are captured already stay."""
        config, limits = self.config, self.config.scheduler
        if self.device.type != "cuda" or not self.kernels.on_device or config.enforce_eager:
            return
        # Imported late: they bring Triton.
        from specdec.execution.cuda_graphs import CudaGraphs
        from specdec.execution.graph_capture import DRAFTED_CONTEXT, capture_drafting, capture_passes
        from specdec.verify.pass_graphs import GraphLimits

        began, self._graphs = time.perf_counter(), self._graphs or CudaGraphs(self.device)
        self._graphs.release()
        entries = self.longest + self.sizes.entries
        largest = GraphLimits(
            limits.max_num_seqs,
            tokens=min(limits.max_num_batched_tokens, limits.max_num_seqs * entries),
            blocks=ceil_div(entries, config.block_size),
            words=self.sizes.words,
            adapters=config.max_loras if config.enable_lora else 0,
        )
        if runner.graphs is None:
            capture_passes(runner, self._graphs.capture, largest)
        if isinstance(drafter, TreeDrafter) and self.sizes.context > DRAFTED_CONTEXT + 1:
            capture_drafting(drafter, runner, self._graphs.capture, largest)
        logger.info("CUDA graphs captured in %.1f s", time.perf_counter() - began)
