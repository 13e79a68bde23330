"""Choice of the requests that run in a step, and of how many known tokens and choices each computes. Pure Python."""

import time
from collections.abc import Sequence

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.cache.prefix_search import Prefix
from specdec.core.request import Request
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.scheduling.request_queues import RequestQueues
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_plan import StepBudget

# Most waiting requests that are passed over for a prefix that another computes: to look at each takes time.
MOST_OVERTAKEN = 8
# Requests whose blocks a connector may fetch, even where fewer may run.
LEAST_FETCHING = 8
# Largest tree of choices where the kernels have no limit of their own; that of `DraftShape.nodes` too.
MOST_NODES = 1024


class StepPlanner:
    """Plans rows of known tokens, admits waiting requests and preempts running ones.

    Requests get tokens in order of rank. A waiting request is admitted if there is a seat, and blocks for all its known
    tokens. A request that lacks a seat or a block first takes blocks of drafts. Then it preempts the running
    request that ranks last, if that ranks behind it.

    Therefore no request waits for one that ranks behind it, and the first in rank advances in every step. A request is
    admitted within as many steps as all requests that rank before it have tokens, each at its longest. Tokens that are
    computed again after a preemption by a later arrival, of higher priority or of a client with fewer requests, count
    again; so does a step whose pass was launched before the request came. Requests whose blocks a connector fetches are
    overtaken, until as many of them wait as may run, or `LEAST_FETCHING`.

    Admissions and preemptions update the queues.
    """

    def __init__(
        self,
        queues: RequestQueues,
        manager: KVCacheManager,
        config: SchedulerConfig,
        connector: KVConnector | None = None,
    ) -> None:
        self.queues, self.manager, self.config = queues, manager, config
        self.connector = connector
        # Blocks that an admission leaves free.
        self._watermark = int(config.watermark * manager.pool.num_blocks)

    def plan(self, step: StepBudget) -> None:
        """Merge running and waiting requests in order of rank, and plan each."""
        running, waiting = self.queues.running, self.queues.waiting
        while step.admitting and step.next_waiting < len(waiting):
            waits = waiting[step.next_waiting]
            runs = running[step.next_running] if step.next_running < len(running) else None
            if runs is None or waits.rank < runs.rank:
                self._plan_waiting(waits, step)
            else:
                self._plan_running(runs, step)
        # A running request that preempts another one ends admissions, so none waits for its turn from here on.
        while step.next_running < len(running):
            self._plan_running(running[step.next_running], step)

    def plan_choices(self, step: StepBudget, most: int) -> None:
        """Give the rows that reach the last token of their prompt a tree of choices to score.

        Each has the tokens and entries of one choice, which its planning has taken. Further nodes take tokens and
        blocks that no row of known tokens needs, and come before drafts. As they cost as much as a prompt's tokens,
        they count as such.

        Args:
            step: with all rows of known tokens planned.
            most: limit of a tree's nodes.
        """
        for row in step.choosing:
            request, end = row.request, row.request.num_cached + row.num_known
            assert request.choices is not None
            least = request.least_nodes
            more = max(0, min(step.tokens, step.prompt_tokens))
            tree = request.choices.tree(min(most, least + more))
            free = self.manager.extend(request, end + len(tree.tokens)) - end
            if free < len(tree.tokens):
                tree = request.choices.tree(free)
            row.choices = tree
            step.tokens -= len(tree.tokens) - least
            step.prompt_tokens -= len(tree.tokens)

    def _plan_running(self, request: Request, step: StepBudget) -> None:
        """Plan this running request's row, reclaiming memory from lower-ranked requests; preempt it if that is not
        enough.
        """
        uncached = len(request.token_ids) - request.num_cached
        step.next_running += 1
        if uncached == 0:
            return
        if uncached == 1:
            step.decodes_left -= 1
            known = 1
            if request.least_nodes and 1 + request.least_nodes > step.tokens - step.decodes_left:
                # Others take the tokens of the step first; it scores its choices in a later one.
                return
        else:
            known = self._share(request, uncached, step)
            if known <= 0 or (known < uncached and step.partial_prefills >= self.config.max_num_partial_prefills):
                return
        # Nodes of choices take entries only where the last known token is reached: `BlockBounds` allows no more.
        entries = request.num_cached + known + (request.least_nodes if known == uncached else 0)
        while not self.manager.reserve(request, entries):
            if self._reclaim():
                continue
            # What a preemption frees is for running requests, not for admissions.
            step.admitting = False
            if self.queues.running[-1] is request:
                # `_preempt_last` counts it off again.
                step.decodes_left += uncached == 1
                self._preempt_last(step)
                return
            self._preempt_last(step)
        step.take(request, known, uncached)

    def _plan_waiting(self, request: Request, step: StepBudget) -> None:
        """Admit the request, skip it, or stop admitting in this step; preempt lower-ranked requests for it."""
        config, manager, running = self.config, self.manager, self.queues.running
        last = running[-1] if running and running[-1].rank > request.rank else None
        full = len(running) + step.seats_kept >= config.max_num_seqs
        # The token reserved for the request about to be preempted is available too.
        tokens = step.tokens - step.decodes_left + (last is not None and last.num_uncached_tokens == 1)
        step.admitting = tokens > 0 and (not full or last is not None) and request not in step.preempted
        if not step.admitting:
            return
        ahead = running[: step.next_running]
        prefix = manager.find_prefix(request)
        if manager.is_being_prefilled(request, prefix, ahead):
            step.admitting = not full and step.prompt_tokens > 0 and step.next_waiting + 1 < MOST_OVERTAKEN
            step.skip(self._blocks_lacking(request, prefix))
            return
        external = self._external_tokens(request, prefix)
        if external is None and step.preempted:
            # Others have lost their memory for it: it runs without waiting.
            external = 0
        if external is None:
            self.queues.waiting_for_kv.append(self.queues.waiting.pop(step.next_waiting))
            # Each search holds host blocks until its request is admitted.
            step.admitting = len(self.queues.waiting_for_kv) < max(config.max_num_seqs, LEAST_FETCHING)
            return
        if external:
            prefix, external = manager.prefixes.without_slid(prefix, external)
        room = self._room(running) - step.blocks_kept
        lacking = self._blocks_lacking(request, prefix)
        if lacking > room and prefix.num_tokens % manager.block_size:
            prefix = manager.prefixes.whole_blocks(prefix)
            lacking = self._blocks_lacking(request, prefix)
        uncached = len(request.token_ids) - prefix.num_tokens - external
        known = self._share(request, uncached, step)
        if uncached > 1 and step.prompt_tokens <= 0:
            step.admitting = False
        elif max(known, 1) < uncached and step.partial_prefills >= config.max_num_partial_prefills:
            step.skip(lacking)
        elif full or lacking > room or known <= 0:
            held = sum(len(other.block_table) - other.num_slid for other in running[step.next_running :])
            step.admitting = last is not None and lacking <= self._room(ahead) + held - step.blocks_kept
            if step.admitting:
                self._preempt_last(step)
        else:
            del self.queues.waiting[step.next_waiting]
            if lacking > manager.pool.num_free:
                self._reclaim()
            self._admit(request, prefix, external, known, step)
            running.insert(step.next_running, request)
            step.next_running += 1
            step.take(request, known, uncached)

    def _share(self, request: Request, uncached: int, step: StepBudget) -> int:
        """Return how many of a request's uncached tokens the step can compute."""
        limit = self.config.long_prefill_token_threshold or uncached
        if uncached > 1:
            limit = min(limit, step.prompt_tokens)
        room = min(step.tokens - step.decodes_left, self.manager.bounds.most_known)
        known = min(uncached, limit, room)
        # Choices hang below the last token. If their nodes have no room, both are left to a later step.
        return known - 1 if known == uncached and known + request.least_nodes > room else known

    def _room(self, running: Sequence[Request]) -> int:
        """Return how many blocks an admission can take.

        Blocks of drafts count as free. Blocks that `running` requests still need for their known tokens do not.
        """
        lacking = self.manager.bounds.lacking
        claimed = sum(
            lacking(len(request.token_ids) + request.least_nodes, len(request.block_table), request.num_slid)
            for request in running
        )
        return self.manager.pool.num_free - claimed - (self._watermark if running else 0)

    def _blocks_lacking(self, request: Request, prefix: Prefix) -> int:
        """Return how many free blocks the request takes until all its known tokens are cached, and a choice's nodes."""
        manager, entries = self.manager, len(request.token_ids) + request.least_nodes
        unheld = sum(manager.pool.is_free(block) for block in prefix.held)
        copied = 1 if prefix.num_tokens % manager.block_size else 0
        return manager.bounds.lacking(entries, len(prefix.blocks), prefix.num_slid) + copied + unheld

    def _external_tokens(self, request: Request, prefix: Prefix) -> int | None:
        """Return how many tokens behind the prefix a connector can load, None while it fetches them."""
        if self.connector is None or request.params.prompt_logprobs is not None:
            return 0
        return self.connector.get_num_new_matched_tokens(request, prefix.num_tokens)[0]

    def _admit(self, request: Request, prefix: Prefix, external: int, known: int, step: StepBudget) -> None:
        """Give a waiting request its memory, of which there is enough.

        Args:
            external: tokens behind the prefix that a connector loads.
        """
        self.manager.take_prefix(request, prefix)
        self._load(request, external)
        # What a preempted request finds again of its own is no hit.
        if request.num_cached_prompt is None:
            request.num_cached_prompt = prefix.num_tokens + external
            request.times.scheduled = time.monotonic()
            stats, tokens = step.stats, len(request.token_ids)
            stats.prefix_queries += tokens
            stats.prefix_hits += prefix.num_tokens
            stats.external_prefix_queries += 0 if self.connector is None else tokens - prefix.num_tokens
            stats.external_prefix_hits += external
        end = request.num_cached + known
        entries = end + (request.least_nodes if end == len(request.token_ids) else 0)
        reserved = self.manager.reserve(request, entries)
        assert reserved, "an admitted request has its blocks"

    def _load(self, request: Request, external: int) -> None:
        """Give a request with its prefix the blocks that a connector fills."""
        if self.connector is None:
            return
        blocks = self.manager.pool.allocate(self.manager.blocks_for(external))
        sources = self.connector.update_state_after_alloc(request, blocks, external)
        if external:
            self.manager.load(request, blocks, sources, external)

    def _reclaim(self) -> bool:
        """Take back the blocks that only drafts have used; False if there were none."""
        before = self.manager.pool.num_free
        for request in self.queues.running:
            self.manager.trim(request)
        return self.manager.pool.num_free > before

    def _preempt_last(self, step: StepBudget) -> None:
        """Take the memory of the running request that ranks last; it resumes later with the same tokens."""
        request = self.queues.running.pop()
        step.decodes_left -= request.num_uncached_tokens == 1
        step.preempted.append(request)
        step.stats.preemptions += 1
        self.manager.release(request)
        self.queues.wait(request)
