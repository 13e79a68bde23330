"""A scheduler with all that surrounds it, small and scarce, and checks of every step."""

import random
import sys
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple
from unittest import mock

from hypothesis import strategies as st

from specdec.cache.block_pool import extend_hashes
from specdec.cache.kept_entries import KeptEntries
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.choices import Choices
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams, Speculation
from specdec.draft_heads.drafting.draft_shape import BlockShape, DraftShape
from specdec.kv_transfer.host_tier import HEAD
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.integrity import check_pool, check_scheduler
from specdec.scheduling.rank_values import TreeOutcome
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_cost import Curve, MeasuredStep, StepCost
from specdec.scheduling.step_plan import PlannedRow, RowResult, StepPlan
from specdec.scheduling.step_planner import LEAST_FETCHING
from specdec.scheduling.tree_sizer import TreeSizer
from tests.specdec.fake_connector import FakeConnector
from tests.specdec.fake_memory import FakeMemory, make_request
from tests.strategies import seeds

END, TOKENS = 2, [0] * 19 + [1] * 19 + [2]
places = st.integers(0, 9)


class Case(NamedTuple):
    """A scheduler's surroundings, so small that everything is scarce."""

    blocks: int
    size: int
    caching: bool
    shape: DraftShape
    draft_context: int
    config: SchedulerConfig
    # Of a pass per token, and of a level per tree, where a pass by itself takes 1; None for no costs at all.
    prices: tuple[float, float] | None
    # Blocks of host memory, seed and timeout of a connector; None for none.
    connector: tuple[int, int, float] | None
    # Whether the head reads prompts in the steps that compute them.
    reads_prompts: bool
    # Entries that later rows read.
    kept: KeptEntries
    # Whether trees and passes are launched behind the step before.
    ahead: bool = False

    def step_cost(self) -> StepCost | None:
        if self.prices is None:
            return None
        token, level = self.prices
        first, every = (Curve([(1, level * n), (9, 9 * level * n)]) for n in (1, 3))
        return StepCost(Curve([(1, 1 + token), (9, 1 + 9 * token)]), first_level=first, all_levels=every, depth=3)


def fitted(kept: KeptEntries) -> KeptEntries:
    """Return the entries of a window that holds the head's, too."""
    return KeptEntries(max(kept.window, kept.head_reach + 1) if kept.window else 0, kept.head_reach)


@st.composite
def cases(draw: st.DrawFn, max_seats: int = 4, max_blocks: int = 10, connectors: bool = False) -> Case:
    seats = draw(st.integers(1, max_seats))
    bounds = {"depth": st.integers(1, 3), "branching": st.integers(1, 3), "nodes": st.integers(1, 6)}
    shapes = st.builds(DraftShape, **bounds) | st.builds(BlockShape, **bounds, rows=st.integers(3, 5))
    caching = draw(st.sampled_from([True, True, True, False]))
    connector = st.tuples(st.sampled_from([2, 4, 6, 20]), seeds, st.sampled_from([1e9, 1e9, 0.0]))
    return Case(
        blocks=draw(st.integers(3, max_blocks)),
        size=draw(st.integers(1, 4)),
        caching=caching,
        connector=draw(st.none() | connector) if connectors and caching else None,
        reads_prompts=draw(st.booleans()),
        ahead=draw(st.booleans()),
        kept=draw(
            st.builds(KeptEntries, st.sampled_from([0, 0, 3, 5, 8]), st.sampled_from([0, 1, 2, 4, 7])).map(fitted)
        ),
        shape=draw(shapes),
        draft_context=draw(st.sampled_from([sys.maxsize, 9, 0])),
        config=SchedulerConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=draw(st.integers(seats, 12)),
            max_num_partial_prefills=draw(st.integers(1, 2)),
            long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1, 3])),
            scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
            watermark=draw(st.sampled_from([0.0, 0.0, 0.3])),
            prefill_stretch=draw(st.sampled_from([0.0, 1.1, 2.0])),
            adaptive_drafts=draw(st.booleans()),
        ),
        prices=draw(st.none() | st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 0.01, 1.0]))),
    )


class World:
    """The engine's part of a step, and what was promised about every step.

    Attributes:
        requests: all that were ever queued.
        beams: those that take no token: once nothing is missing in the cache they wait to be forked.
        spoilt: share of steps with drafts that have to be done again without.
    """

    def __init__(self, case: Case, spoilt: float = 0.1) -> None:
        self.case, self.spoilt = case, spoilt
        self.manager = KVCacheManager(
            case.blocks, case.size, case.caching, case.kept, case.config.max_num_batched_tokens
        )
        self.connector = None if case.connector is None else FakeConnector(self.manager, *case.connector)
        cost, most_read = case.step_cost(), case.config.max_num_batched_tokens + case.config.max_num_seqs
        sizer = TreeSizer(cost, case.shape) if cost is not None and case.config.adaptive_drafts else None
        budget = DraftBudget(
            case.shape, case.draft_context, most_read, sizer, reads_prompts=case.reads_prompts, follows=case.ahead
        )
        self.scheduler = Scheduler(
            self.manager, case.config, budget, cost, passes_ahead=case.ahead, connector=self.connector
        )
        self.memory = FakeMemory(self.manager)
        if self.connector is not None:
            self.connector.memory = self.memory
        self.requests: list[Request] = []
        self.beams: set[Request] = set()

    @property
    def room(self) -> int:
        """Entries that a request may have in all: as many as it likes where it gives back what slid out."""
        held = self.case.blocks * self.case.size
        return held if self.manager.bounds.most_known == sys.maxsize else max(held, 40)

    @property
    def alive(self) -> list[Request]:
        return list(self.scheduler.queues)

    def add(
        self,
        prompt: list[int],
        most: int,
        priority: int = 0,
        salt: str | None = None,
        samples: int = 1,
        speculation: Speculation | None = None,
        client: str = "",
    ) -> None:
        """Queue the samples of a prompt, cut to what the cache can hold."""
        params = SamplingParams(speculation=speculation or Speculation())
        room = self.room
        prompt = prompt[:room]
        most = min(most, room + 1 - len(prompt))
        fields: dict[str, Any] = {"cache_salt": salt, "end_tokens": frozenset([END]), "params": params}
        group = [make_request(prompt, most, **fields) for _ in range(samples)]
        for request in group:
            request.cached_samples = group[0].cached_samples
            request.priority = priority if self.case.config.scheduling_policy == "priority" else 0
            request.client = client
            self.scheduler.add(request)
            self.requests.append(request)

    def add_choices(self, prompt: list[int], choices: list[list[int]]) -> None:
        """Queue a request that scores choices, cut to what the cache and a step can hold."""
        most = min(self.scheduler.max_choice_nodes, self.room - 1)
        found = Choices([choice[: most + 1] for choice in choices])
        prompt = prompt[: self.room - found.most_nodes]
        request = make_request(prompt, found.most_nodes + 1, choices=found, least_nodes=found.least_nodes)
        self.scheduler.add(request)
        self.requests.append(request)

    def make_beam(self, request: Request) -> None:
        self.beams.add(request)
        request.cached_samples, request.drafts_enabled, request.may_follow = {}, False, False

    def fork(self, parent: Request, tokens: Sequence[int]) -> None:
        """Children that go on otherwise after what the parent has in the cache; then it ends, as a beam does."""
        start = parent.token_ids[: max(parent.num_cached, parent.num_prompt)]
        if len(start) + 1 < parent.max_length:
            seats = self.case.config.max_num_seqs - len(self.scheduler.running) + (parent in self.scheduler.running)
            late = []
            for place, token in enumerate(tokens):
                child = make_request([*start, token], parent.max_length - parent.num_prompt, parent.num_prompt)
                child.cache_salt, child.end_tokens = parent.cache_salt, parent.end_tokens
                self.requests.append(child)
                if parent in self.beams:
                    self.make_beam(child)
                if place < seats:
                    self.scheduler.fork(parent, child)
                else:
                    late.append(child)
            self.scheduler.abort(parent)
            for child in late:
                self.scheduler.fork(parent, child)

    def begin(self) -> StepPlan:
        """A step as far as its forward pass."""
        queued = list(self.scheduler.queues)
        scored = {request for request in self.scheduler.running if request.num_uncached_tokens == 0}
        with mock.patch("specdec.scheduling.step_cost.LEAST_PROMPT_TOKENS", 1):
            plan = self.scheduler.schedule()
        # Those that wait for their blocks are passed over.
        late = self.scheduler.queues.waiting_for_kv
        asked = [request for request in queued if request not in late]
        first = min(asked, key=lambda request: request.rank, default=None)
        if self.is_unasked(first):
            first = None
        # Those that came behind the launch of a step wait for the next one.
        self.check_plan(plan, None if plan.is_launched else first)
        # Not even one that was preempted: a beam would be scored again.
        assert scored.isdisjoint(row.request for row in plan.rows)
        self.memory.apply_moves(plan.moves, None if self.connector is None else self.connector.start_load_kv)
        if plan.rows:
            self.check_memory()
        for row in plan.rows:
            self.write(row, plan.is_launched)
        return plan

    def is_unasked(self, request: Request | None) -> bool:
        """Return whether it ranks behind as many as may wait for their blocks, and so is not admitted."""
        late = self.scheduler.queues.waiting_for_kv
        return (
            len(late) == max(self.case.config.max_num_seqs, LEAST_FETCHING)
            and request in self.scheduler.waiting
            and all(other.rank < request.rank for other in late)
        )

    def write(self, row: PlannedRow, is_launched: bool) -> None:
        """Known tokens; and junk wherever drafts may come, of the head even behind the row's own bounds.

        Args:
            is_launched: whether the pass has written what it writes.
        """
        request, size = row.request, self.case.size
        end, room = request.num_cached + row.num_known, len(request.block_table) * size
        for place in range(request.num_cached // size, -(-(room if row.num_nodes else end) // size)):
            assert self.manager.pool.is_private(request.block_table[place])
        self.memory.write(request, request.num_draft_cached, row.draft_prefill_end, head=True)
        if not is_launched:
            self.memory.write(request, request.num_cached, end)
        if row.num_nodes:
            self.memory.write(request, end, room, head=True, content="draft")
            self.memory.write(request, end, end + row.num_nodes, content="draft")
        if row.choices is not None:
            nodes = len(row.choices.tokens)
            for place in range(request.num_cached // size, -(-(end + nodes) // size)):
                assert self.manager.pool.is_private(request.block_table[place])
            self.memory.write(request, end, end + nodes, content="choice")

    def check_plan(self, plan: StepPlan, first: Request | None) -> None:
        """Check that limits hold, and that the request that ranks first advances."""
        scheduler, config, rows = self.scheduler, self.case.config, plan.rows
        requests = [row.request for row in rows]
        assert len({*requests}) == len(rows)
        assert {*requests} <= {*scheduler.running}
        assert len(scheduler.running) <= config.max_num_seqs
        chosen = sum(len(row.choices.tokens) for row in rows if row.choices is not None)
        assert sum(row.num_known + row.num_nodes for row in rows) + chosen <= config.max_num_batched_tokens
        reads = sum(max(0, row.draft_prefill_end - row.request.num_draft_cached) for row in rows)
        assert reads <= config.max_num_batched_tokens + config.max_num_seqs
        if first is not None:
            assert first in scheduler.running
            assert first in requests or first.num_uncached_tokens == 0
        assert rows or all(request in self.beams for request in scheduler.running)
        assert not plan.followed or len(rows) == len(scheduler.running)
        assert rows or scheduler.running or all(map(self.is_unasked, scheduler.waiting))
        for row in rows:
            self.check_row(row)

    def check_row(self, row: PlannedRow) -> None:
        request, shape = row.request, self.case.shape
        assert not request.finished
        assert (
            1 <= row.num_known <= min(request.num_uncached_tokens, self.case.config.long_prefill_token_threshold or 99)
        )
        is_last = row.num_known == request.num_uncached_tokens
        assert (row.sampled, row.choices is not None) == (
            (is_last, False) if request.choices is None else (False, is_last)
        )
        if row.choices is not None:
            # Every tree scores a choice at least.
            assert row.choices.paths
            assert len(row.choices.tokens) <= self.scheduler.max_choice_nodes
        assert row.draft_prefill_end <= request.num_cached + row.num_known
        if row.num_nodes == 0:
            assert row.max_depth == 0
            return
        assert request.drafts_enabled
        assert request.num_output > 0
        assert row.num_known == request.num_uncached_tokens == 1
        assert row.draft_prefill_end == len(request.token_ids) < self.case.draft_context
        asked = request.params.speculation
        assert asked.enabled
        assert 1 <= row.num_nodes <= min(shape.nodes, asked.max_nodes or sys.maxsize)
        assert 1 <= row.max_depth <= min(shape.depth, asked.max_depth or sys.maxsize, request.num_remaining - 1)
        room = len(request.block_table) * self.case.size - len(request.token_ids)
        assert max(row.num_nodes, shape.scratch(row.max_depth)) <= room

    def end(self, plan: StepPlan, chance: random.Random) -> None:
        """The rest of the step: accepted drafts move behind their chain, tokens are appended, beams fork."""
        results = [self.verify(row, chance) for row in plan.rows]
        self.follow(plan)
        self.scheduler.update(plan, results)
        if self.connector is not None:
            self.connector.wait_for_save(self.connector.build_connector_meta(self.manager.take_published()))
        for beam in self.beams:
            beam.drafts_enabled = False
        self.learn(plan, chance)
        is_stuck = not plan.rows
        for beam in [beam for beam in self.beams.intersection(self.alive) if beam.num_uncached_tokens == 0]:
            # What lost its blocks, or keeps those that others lack, makes room; some have to wait for others.
            if is_stuck or not beam.block_table or chance.random() < 0.1:
                self.scheduler.abort(beam)
            elif chance.random() < 0.6:
                self.fork(beam, [chance.choice([0, 1]) for _ in range(chance.choice([1, 1, 1, 1, 2, 3]))])

    def follow(self, plan: StepPlan) -> None:
        """The pass of the next step writes the entry of each new token; of a request that ended, any."""
        for request in plan.followed:
            entry = request.num_cached + 1
            assert self.manager.pool.is_private(request.block_table[entry // self.case.size])
            content = None if len(request.token_ids) > entry else "followed"
            self.memory.write(request, entry, entry + 1, content=content)

    def learn(self, plan: StepPlan, chance: random.Random) -> None:
        """Any costs, and any outcome."""
        trees = [row for row in plan.rows if row.num_nodes]
        if not plan.rows:
            return
        seconds, levels = chance.uniform(0, 5), max((row.max_depth for row in trees), default=0)
        prompts = sum(row.num_known for row in plan.rows if row.num_known > 1)
        self.scheduler.learn(
            MeasuredStep(len(plan.rows), len(plan.rows), prompts, seconds, len(trees), levels, 0, seconds),
            [
                TreeOutcome(
                    row.num_nodes,
                    row.num_nodes,
                    chance.sample(range(row.num_nodes), chance.randint(0, row.num_nodes)),
                    row.request.acceptance_history,
                )
                for row in trees
            ],
        )

    def verify(self, row: PlannedRow, chance: random.Random) -> RowResult:
        request, end = row.request, row.request.num_cached + row.num_known
        if row.num_nodes > 0 and chance.random() < self.spoilt:
            return RowResult(row.num_nodes, needs_retry=True)
        if row.choices is not None and not request.finished:
            request.take_scores(row.choices, [float(token) for _, token in row.choices.read])
        if request.finished or not row.sampled or request in self.beams:
            return RowResult()
        path = range(chance.randint(0, min(row.num_nodes, row.max_depth)))
        tokens = [chance.choice(TOKENS) for _ in range(len(path) + 1)]
        num_new = request.take(tokens, len(path), row.num_nodes)
        num_accepted = min(len(path), num_new)
        self.memory.write(request, end, end + num_accepted)
        return RowResult(row.num_nodes, path, num_new=num_new, num_accepted=num_accepted)

    def check(self) -> None:
        """Check that each request's memory holds its own tokens only, and that hashes match their blocks."""
        check_scheduler(self.scheduler)
        self.check_memory()
        pool = self.manager.pool
        for block in range(pool.num_blocks):
            name = pool._hashes[block]
            if name is not None:
                target, head = self.memory.device[block]
                self.check_named(target, name)
                assert not pool.is_read(block) or head == target
        if self.connector is not None:
            self.check_connector(self.connector)

    def check_connector(self, connector: FakeConnector) -> None:
        """Check that host memory holds what its hashes say, and that no block is held by nothing."""
        tier = connector.tier
        check_pool(tier.pool, tier.holders())
        for block, name in enumerate(tier.pool._hashes):
            # A block that is being copied gets its content at the end of the step.
            if name is not None:
                target, head = connector.host[block]
                self.check_named(target, name)
                assert HEAD not in tier._parts[block] or head == target
        for name, parts in connector.store.items():
            for entries in parts.values():
                self.check_named(entries, name)

    def check_memory(self) -> None:
        """After what is still to be moved: a step without rows leaves that to the next."""
        memory = self.memory
        if self.manager.moves:
            memory = deepcopy(memory)
            memory.apply_moves(self.manager.moves)
        for request in self.alive:
            memory.check(request)

    def check_named(self, entries: list[Any], name: bytes) -> None:
        salt, token_ids = entries[-1]
        start = len(token_ids) - self.case.size
        assert entries == [(salt, token_ids[: start + i + 1]) for i in range(self.case.size)]
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, self.case.size, salt)
        assert hashes[start // self.case.size :] == [name]

    def run_out(self, chance: random.Random) -> None:
        """Everything comes to its end, and nothing is left behind."""
        steps = 0
        while self.alive:
            assert steps <= (1 + len(self.requests)) * sum(request.max_length for request in self.requests)
            plan = self.begin()
            self.end(plan, chance)
            self.check()
            steps += bool(plan.rows) or not self.scheduler.queues.waiting_for_kv
        assert self.scheduler.schedule() == StepPlan()
        while self.connector is not None and self.connector.pending:
            self.connector.update_connector_output(self.connector.get_finished())
        if self.connector is not None:
            assert self.connector.tier.pool.num_free == self.connector.tier.pool.num_blocks
        assert self.manager.pool.num_free == self.manager.pool.num_blocks
        stats = self.scheduler.stats()
        reasons = [request.finish_reason for request in self.requests]
        assert None not in reasons
        for request in self.requests:
            if request.choices is not None and request.finish_reason == "stop":
                # The scores are the tokens here.
                assert all(score.logprobs == score.token_ids for score in request.choices.scores())
        assert (stats.queued, stats.aborted) == (len(reasons), reasons.count("abort"))
        assert stats.finished == stats.queued - stats.aborted
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
