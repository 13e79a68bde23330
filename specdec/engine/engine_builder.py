"""From settings to an engine: head, cache, drafter, scheduler, runner."""

import sys
from dataclasses import replace

from specdec.cache.kv_cache import KVCache, entry_bytes
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.config import NGRAM, EngineConfig
from specdec.core.logprobs import LogprobsMode
from specdec.draft_heads.drafting.drafter import Drafter, NoDrafter, Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.drafting.ngram_drafter import NGramDrafter
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.engine.acceptance_rule import AcceptanceRule
from specdec.engine.engine import LLMEngine
from specdec.engine.memory_profile import Rehearsal, cache_bytes
from specdec.execution.cost_measurement import measure_step_cost
from specdec.execution.cuda_graphs import CudaGraphs
from specdec.execution.model_runner import ModelRunner
from specdec.execution.warm_up import capture_graphs
from specdec.kernels.kernel_set import KernelSet
from specdec.models.llama import LlamaModel
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_cost import PreemptionCost


def build_engine(
    config: EngineConfig,
    model: LlamaModel,
    draft: DraftModel | None,
    kernels: KernelSet,
    rule: AcceptanceRule,
    mode: LogprobsMode,
) -> LLMEngine:
    """An engine around a loaded target and what drafts for it, None to decode plainly.

    Raises:
        ValueError: the cache's memory is too small, or the kernels were not made for the model or its trees.
    """
    head = draft.head if draft else None
    llama = head.llama if head else None
    by_text = config.draft == NGRAM
    shape = config.shape if head or by_text else None
    slots = shape.slots if shape else 0
    for sizes in (model.config, llama):
        if sizes is not None:
            kernels.check_model(sizes.head_dim, sizes.num_heads // sizes.num_kv_heads)
    kernels.check_tree(slots)
    # Beyond its positions a head would guess.
    draft_context = llama.max_position - config.shape.depth if llama else sys.maxsize
    positions = min(config.max_position for config in (model.config, llama) if config)
    longest = config.context(model.config.max_position)

    def assemble(num_blocks: int, num_host_blocks: int = 0, *, rehearses: bool = False) -> LLMEngine:
        size = config.block_size
        cache = KVCache(
            num_blocks, size, model.config, head, config.dtype, config.device, num_host_blocks, kernels=kernels
        )
        # Measurements and captures read it.
        cache.clear_null_block()
        runner = ModelRunner(model, cache, head, longest)
        heads: list[ModelDrafter] = []
        if draft is not None and cache.draft is not None:
            # The second is for measurements: it goes as deep as it may, whatever it sees.
            parts = (*draft, cache.draft, cache.features, size)
            heads = [
                ModelDrafter(*parts, bounds, rule.proposal, kernels)
                for bounds in (config.shape, replace(config.shape, min_reach=0.0))
            ]
        drafters: list[Drafter] = [*heads] or [NGramDrafter(config.shape) if by_text else NoDrafter()]
        unhindered = drafters[-1] if shape else None
        if config.device.type == "cuda" and kernels.on_device and not config.enforce_eager:
            # Late: it brings Triton.
            from specdec.execution.cuda_graphs import attach_graphs

            seats = config.scheduler.max_num_seqs
            attach_graphs(runner, heads, CudaGraphs().capture, seats, longest + slots)
            temperatures = (0.0, 1.0) if rule.proposal == Proposal.DRAWN else (0.0,)
            capture_graphs(runner, unhindered, seats, longest, shape, draft_context, temperatures)
        manager = KVCacheManager(num_blocks, size, num_host_blocks, config.enable_prefix_caching)
        cost = runner.preemption_cost() if num_host_blocks else PreemptionCost()
        # A rehearsal is of the largest steps.
        measures = config.scheduler.is_fitted and not rehearses
        step_cost = measure_step_cost(runner, positions, unhindered, shape) if measures else None
        scheduler = Scheduler(manager, config.scheduler, shape, cost, draft_context, step_cost)
        return LLMEngine(scheduler, runner, cache, drafters[0], rule.verifier(kernels), mode)

    per_block = config.block_size * entry_bytes(model.config, head, config.dtype)
    rehearsal = Rehearsal(config, longest, slots)

    def rehearse() -> int:
        rehearsal.run(assemble(rehearsal.num_blocks, rehearses=True))
        return rehearsal.num_blocks * per_block

    memory = cache_bytes(config, rehearse)
    num_blocks = memory // per_block
    if num_blocks < 1:
        raise ValueError(f"kv_cache_memory {memory} is less than one block of {per_block} bytes")
    # More than all seats at full length is never used.
    most = config.scheduler.max_num_seqs * -(-(longest + slots) // config.block_size)
    return assemble(min(num_blocks, most), int(config.swap_space * (1 << 30)) // per_block)
