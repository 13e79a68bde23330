"""From settings, a loaded target and what drafts for it to an engine."""

import logging
import sys
import time
from functools import partial

from specdec.building.draft_check import PROMPT, check_first_drafts
from specdec.building.host_memory import check_cache
from specdec.building.rehearsal import Rehearsal, cache_bytes, run_warmup, small_cache, warmup_kinds
from specdec.building.tap_probe import questions
from specdec.building.worker_builder import WorkerBuilder, follows, passes_ahead
from specdec.cache.kept_entries import KEEPS_ALL, KeptEntries
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.config import EngineConfig
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.engine.engine import LLMEngine
from specdec.engine.request_maker import RequestMaker
from specdec.execution.cost_measurement import measure_step_cost
from specdec.execution.executor import Executor
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.types.integers import ceil_div
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.models.llama import LlamaModel
from specdec.parallel.ranks import Ranks
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.rank_values import read_values
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_planner import MOST_NODES
from specdec.scheduling.tree_sizer import TreeSizer

logger = logging.getLogger(__name__)


class EngineBuilder:
    """Builds an engine around a loaded target.

    Args:
        draft: the draft head or small model; None for plain decoding, or chains alone.
        ranks: this rank among those of the engine, which all build theirs at the same time.
        requests: makes the requests of commands.

    Attributes:
        block_bytes: memory of one cache block in the rank where it is largest.
        workers: makes the worker of this process; holds the sizes that follow from model and settings.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: LlamaModel,
        draft: DraftModel | None,
        kernels: KernelSet,
        ranks: Ranks,
        requests: RequestMaker,
    ) -> None:
        self._requests = requests
        self.config, self.model, self.kernels, self._ranks = config, model, kernels, ranks
        self.workers = WorkerBuilder(config, model, draft, kernels, self._ranks)
        self.sizes = self.workers.sizes
        self.block_bytes = max(self._ranks.share(self.workers.block_bytes))

    def build(self) -> LLMEngine:
        """Check, profile, and assemble the engine with its cache at full size.

        Raises:
            ValueError: cache memory that is too small, or kernels that do not support the model or its trees.
        """
        self._check_kernels()
        num_blocks, block_bytes = self._num_blocks(), self.block_bytes
        tokens, mebibytes = num_blocks * self.config.block_size, num_blocks * block_bytes / (1 << 20)
        sizes = (tokens, num_blocks, self.config.block_size, mebibytes)
        logger.info("cache: %d tokens in %d blocks of %d, %.1f MiB", *sizes)
        check_cache(num_blocks * block_bytes, self.config)
        with self.kernels.limited_threads():
            executor = Executor(self.workers, self._ranks, num_blocks)
            if executor.worker.device.type == "cuda" and self.kernels.on_device:
                self._warm_up(executor)
            connector = None if self.config.kv_transfer_config is None else executor.connect(block_bytes)
            return self._engine(executor, connector, serves=True)

    def _check_kernels(self) -> None:
        for name in ("draft_kv_cache_dtype", "draft_window_size"):
            asked = getattr(self.config, name)
            if asked is not None and self.sizes.positions is None:
                raise ValueError(
                    f"{name} is {asked!r}; it is for a draft model, and draft is "
                    f"{self.config.sources or 'none'!r}; leave it out, or name a head or small model"
                )
        for sizes in [self.model.config, *([self.workers.head.llama] if self.workers.head else [])]:
            self.kernels.check_model(sizes.head_dim, sizes.num_heads // sizes.num_kv_heads)
        # A request may bring a predicted text, whatever else drafts.
        nodes, window = self.sizes.shape.nodes, self._window
        self.kernels.check_tree(max(self.sizes.slots, nodes))
        head, levels = self.workers.head, self.sizes.shape.positions
        narrowest = min((own for own in head.windows if own), default=levels) if head else levels
        if levels > narrowest:
            raise ValueError(
                f"the draft model's sliding window of {narrowest} tokens is narrower than its drafts of {levels}; "
                "raise draft_window_size, or lower draft_depth"
            )
        if window is not None and nodes > window:
            raise ValueError(
                f"draft_nodes {nodes} is more than the target's sliding window of {window} tokens, which no draft path "
                f"may leave; use at most {window}"
            )

    @property
    def _window(self) -> int | None:
        """The target's narrowest sliding window, which no path of a tree may leave; None without windows."""
        return min((window for window in self.model.whole_config.layer_windows if window), default=None)

    def _num_blocks(self) -> int:
        """Return how many blocks the memory of every rank holds, or the seats can use if that is less."""
        memory, workers = cache_bytes(self.config, self._rehearse), self.workers
        held = min(self._ranks.share(memory // workers.block_bytes))
        if held < 1:
            raise small_cache(self.config, memory, self.block_bytes)
        most = self.config.scheduler.max_num_seqs * ceil_div(
            workers.longest + self.sizes.entries, self.config.block_size
        )
        return min(held, most)

    def _rehearse(self) -> int:
        """Run the largest steps on an engine that is thrown away; return the bytes of its cache."""
        rehearsal = Rehearsal(self.config, self.workers.longest, max(self.sizes.entries, self.sizes.shape.nodes))
        rehearsal.run(self._engine(Executor(self.workers, self._ranks, rehearsal.num_blocks)))
        return rehearsal.num_blocks * self.workers.block_bytes

    def _warm_up(self, executor: Executor) -> None:
        began, engine = time.perf_counter(), self._engine(executor)
        entries = max(self.sizes.entries, self.sizes.shape.nodes)
        # A head drafts by itself; without one, requests may still bring predicted texts.
        has_model = self.sizes.positions is not None
        depth, adapted = self.sizes.shape.depth if has_model else 1, self.config.enable_lora
        kinds = self._ranks.decide(lambda: warmup_kinds(depth, adapted=adapted))
        run_warmup(engine, kinds, self.workers.longest, entries, 0 if has_model else 2 + entries)
        logger.info("kernels warmed up in %.1f s", time.perf_counter() - began)

    def _check_drafts(self, executor: Executor) -> None:
        prompts = questions(self._requests.tokenizer, self.model.config.vocab_size)
        limits, context = self.config.scheduler, min(self.sizes.context, self.workers.longest)
        prompts = prompts[: min(limits.max_num_seqs, limits.max_num_batched_tokens // PROMPT)]
        check_first_drafts(executor, prompts, context, self.sizes.slots)

    def _engine(self, executor: Executor, connector: KVConnector | None = None, *, serves: bool = False) -> LLMEngine:
        """Return an engine around an executor: one that serves users, or one for a rehearsal or warm-up."""
        config, sizes, cache = self.config, self.sizes, executor.worker.cache
        manager = KVCacheManager(
            cache.num_blocks,
            cache.block_size,
            config.enable_prefix_caching,
            # A rehearsal's steps are not to be smaller than others.
            KeptEntries.of(self.model.whole_config.layer_windows, sizes.reach) if serves else KEEPS_ALL,
            config.scheduler.max_num_batched_tokens,
        )
        step_cost = None
        if serves and config.scheduler.is_fitted:
            # No request, nor its graphs' block tables, has more.
            positions = min(self.workers.longest, sizes.positions or sys.maxsize)
            began = time.perf_counter()
            logger.info("measuring step costs")
            step_cost = measure_step_cost(executor, positions, None if sizes.positions is None else sizes.shape)
            seconds = (time.perf_counter() - began, 1e3 * step_cost.passes(1), 1e3 * step_cost.all_levels(1))
            logger.info("step costs measured in %.1f s: plain step %.2f ms, draft tree %.2f ms", *seconds)
            if sizes.positions is not None:
                self._check_drafts(executor)
        prior = self._ranks.decide(lambda: read_values(config.draft) if config.draft is not None else [])
        limits, sizer = config.scheduler, None
        if step_cost is not None and limits.adaptive_drafts:
            sizer = TreeSizer(step_cost, sizes.shape, prior=prior)
        budget = DraftBudget(
            sizes.shape,
            sizes.context,
            # A step adds no more tokens than this to those that the draft head has not read.
            most_read=limits.max_num_batched_tokens + limits.max_num_seqs,
            tree_sizer=sizer,
            draws=self.workers.proposal == Proposal.DRAWN,
            reads_prompts=config.is_prefill,
            follows=follows(config, self.kernels),
        )
        scheduler = Scheduler(
            manager,
            limits,
            budget,
            step_cost,
            passes_ahead=passes_ahead(self.workers.device, self._ranks.layout),
            connector=connector,
            share=partial(self._ranks.share, in_step=True),
            max_choice_nodes=min(self.kernels.limits.max_nodes or MOST_NODES, self._window or MOST_NODES),
        )
        return LLMEngine(scheduler, executor, self.kernels, config, self._requests)
