"""Scheduler and KVCacheManager under everything that can happen to them, over a memory that shows every mistake."""

import itertools
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.cache.kept_entries import KeptEntries
from specdec.core.request import Request
from specdec.core.sampling_params import Speculation
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_plan import StepPlan
from tests.profiles import num_cases
from tests.specdec.scheduling.scheduled_world import (
    Case,
    World,
    cases,
    places,
)
from tests.strategies import prompts, seeds, speculations

pytestmark = pytest.mark.slow

# Most often one: then all are served in the order of their arrival.
clients = st.sampled_from(["a", "a", "b", "c"])


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, forks and aborts."""

    @initialize(case=cases(connectors=True))
    def start(self, case: Case) -> None:
        self.world = World(case)
        self.is_within = False

    def begin(self) -> StepPlan:
        self.is_within = True
        return self.world.begin()

    def end(self, plan: StepPlan, chance: random.Random) -> None:
        self.world.end(plan, chance)
        self.is_within = False

    @rule(
        prompt=prompts(vocab_size=2, max_len=16),
        most=st.integers(1, 16),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, None, "a"]),
        samples=st.sampled_from([1, 1, 1, 2, 3]),
        speculation=speculations(max_nodes=6, max_depth=3),
        client=clients,
    )
    def add(
        self,
        prompt: list[int],
        most: int,
        priority: int,
        salt: str | None,
        samples: int,
        speculation: Speculation,
        client: str,
    ) -> None:
        self.world.add(prompt, most, priority, salt, samples, speculation, client)

    @rule(prompt=prompts(vocab_size=2, max_len=16), most=st.integers(1, 16))
    def add_a_beam(self, prompt: list[int], most: int) -> None:
        self.world.add(prompt, most)
        self.world.make_beam(self.world.requests[-1])

    @rule(
        prompt=prompts(vocab_size=2, max_len=16),
        choices=st.lists(prompts(vocab_size=2, max_len=5), min_size=1, max_size=6),
    )
    def add_choices(self, prompt: list[int], choices: list[list[int]]) -> None:
        self.world.add_choices(prompt, choices)

    @rule(seed=seeds, count=st.integers(1, 6))
    def step(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        for _ in range(count):
            self.end(self.begin(), chance)
            self.world.check()

    @rule(seed=seeds, which=places)
    def abort_within_a_step(self, seed: int, which: int) -> None:
        """Abort any request: one in the step, one that waits, or one that was left out."""
        plan = self.begin()
        if alive := self.world.alive:
            for _ in range(2):
                self.world.scheduler.abort(alive[which % len(alive)])
        self.end(plan, random.Random(seed))

    @rule()
    def cancel_a_step(self) -> None:
        self.world.scheduler.cancel(self.begin())
        self.is_within = False

    @rule(which=places)
    def abort(self, which: int) -> None:
        if alive := self.world.alive:
            self.world.scheduler.abort(alive[which % len(alive)])

    @rule(which=places, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def fork(self, which: int, tokens: list[int]) -> None:
        """Fork a request in any state, not only one whose tokens are all cached."""
        if alive := self.world.alive:
            self.world.fork(alive[which % len(alive)], tokens)

    @invariant()
    def is_sound(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.is_within:
            self.world.run_out(random.Random(0))


SchedulerMachine.TestCase.settings = settings(max_examples=num_cases(100), stateful_step_count=50)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.parametrize("blocks", [8, 10, 12])
def test_a_prompt_of_choices_in_a_window_is_read_in_parts(blocks: int) -> None:
    """Found by the machine above: nodes of choices took blocks in steps before the one that has them, for ever."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=11)
    world = World(
        Case(
            blocks=blocks, size=1, caching=True, shape=DraftShape(1, 1, 1), draft_context=0,
            config=config, prices=None, connector=None, reads_prompts=False, kept=KeptEntries(3, 2),
        )
    )  # fmt: skip
    world.add_choices([0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 0], [[0, 0, 0, 0, 1], [1, 0]])
    world.run_out(random.Random(0))


@pytest.mark.parametrize("is_beam", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("ending", ["abort", "abort within the step", "finish", "fail"])
def test_no_host_block_is_held_behind_steps_that_failed(is_beam: bool, count: int, ending: str) -> None:
    """Host memory is as free as before, also where no step comes after them."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=2)
    world = World(
        Case(
            blocks=3, size=1, caching=True, shape=DraftShape(1, 1, 1), draft_context=0,
            config=config, prices=None, connector=(2, 0, 1e9), reads_prompts=False, kept=KeptEntries(0, 0),
        )
    )  # fmt: skip
    world.add([1, 1], 1)
    (request,) = world.requests
    if is_beam:
        world.make_beam(request)
    for _ in range(count):
        while not (plan := world.begin()).rows:
            # A store is asked first.
            world.end(plan, random.Random(0))
        assert [row.num_known for row in plan.rows] == [2]
        if ending == "abort within the step":
            world.scheduler.abort(request)
        world.scheduler.cancel(plan)
        world.check()
        if request.finished:
            break
    if ending == "abort":
        world.scheduler.abort(request)
    elif ending == "finish":
        world.scheduler.finish(request)
    elif ending == "fail":
        world.scheduler.fail(request, "the step failed")
    assert world.connector is not None
    assert not world.connector.pending
    assert world.connector.tier.pool.num_free == world.connector.tier.pool.num_blocks
    world.run_out(random.Random(0))


class Arrival(NamedTuple):
    """A request to come: how many tokens, how many more at most, of what priority, and whose."""

    step: int
    length: int
    most: int
    priority: int
    client: str


lengths, mosts = st.sampled_from([1, 1, 2, 5, 16]), st.sampled_from([1, 1, 5, 24, 24])
arrivals = st.builds(Arrival, st.sampled_from([0, 0, 0, 1, 2, 9]), lengths, mosts, st.integers(-1, 1), clients)


@pytest.mark.long
@settings(max_examples=num_cases(150))
@given(cases(8, 24), st.lists(arrivals, min_size=2, max_size=12), seeds)
def test_nobody_waits_longer_than_promised(case: Case, coming: list[Arrival], seed: int) -> None:
    """A request waits at most as many steps as all that have ranked before it have tokens, each at its longest.

    With priorities or several clients some of those can be preempted for later arrivals; what they have lost is
    computed again. Where passes are launched ahead, one that comes behind such a launch waits a step more.
    """
    world, chance, lost = World(case, spoilt=0), random.Random(seed), 0
    waiting: dict[Request, tuple[int, int, set[Request]]] = {}
    for step in itertools.count():
        for arrival in coming:
            if arrival.step == step:
                prompt = [chance.choice([0, 1]) for _ in range(arrival.length)]
                world.add(prompt, arrival.most, arrival.priority, client=arrival.client)
                waiting[world.requests[-1]] = (step, lost, set())
        for request, (_, _, before) in waiting.items():
            before.update(other for other in world.requests if other.rank < request.rank)
        cached = {request: request.num_cached for request in world.scheduler.running}
        plan = world.begin()
        if case.config.scheduling_policy == "priority" or len({arrival.client for arrival in coming}) > 1:
            lost += sum(count for request, count in cached.items() if request.num_cached == 0)
        for row in plan.rows:
            if row.request in waiting:
                came, lost_before, before = waiting.pop(row.request)
                most = sum(other.max_length for other in before) + lost - lost_before
                assert step - came <= most + case.ahead
        world.end(plan, chance)
        if not world.alive and step >= max(arrival.step for arrival in coming):
            break
    assert not waiting


@pytest.mark.long
@settings(max_examples=num_cases(15))
@given(
    case=cases(max_blocks=14, connectors=True),
    size=st.integers(1, 3),
    window=st.sampled_from([4, 6, 9]),
    reach=st.integers(1, 3),
    seed=seeds,
)
def test_long_requests_share_what_has_not_slid_out(case: Case, size: int, window: int, reach: int, seed: int) -> None:
    """One prompt of several lengths, all longer than the windows: prefixes are found without their beginning."""
    kept, chance = KeptEntries(window, reach), random.Random(seed)
    blocks = max(case.blocks, 3 + -(-window // size))
    world = World(case._replace(blocks=blocks, size=size, caching=True, kept=kept))
    for _ in range(5):
        world.add([0] * chance.randint(window + 2, 30), chance.randint(3, 12), samples=chance.choice([1, 1, 2]))
        for _ in range(chance.randint(1, 12)):
            world.end(world.begin(), chance)
            world.check()
    world.run_out(chance)
