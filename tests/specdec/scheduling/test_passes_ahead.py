"""Plain steps whose pass is launched behind the step before, when the host does not know its tokens yet."""

import pytest

from specdec.core.sampling_params import SamplingParams, Speculation
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.step_plan import StepPlan
from tests.specdec.scheduling.scheduled_steps import TREE, ask, finish, make


def names(plan: StepPlan) -> list[str]:
    return [row.request.request_id for row in plan.rows]


def followed(scheduler: Scheduler) -> StepPlan:
    """Plan steps up to one that is followed; return it."""
    while not (plan := scheduler.schedule()).followed:
        assert plan.rows, "no step is followed"
        finish(scheduler, plan)
    return plan


def test_a_plain_step_is_followed_by_the_same_rows_and_newcomers_wait_for_the_one_after() -> None:
    scheduler = make(passes_ahead=True)
    first, second = ask(scheduler, "a", 3), ask(scheduler, "b", 5)
    plan = followed(scheduler)
    assert (names(plan), plan.followed, plan.is_launched) == (["a", "b"], [first, second], False)
    # Blocks for the tokens that the host does not know yet.
    assert all(4 * len(one.block_table) >= one.num_cached + 2 for one in plan.followed)
    ask(scheduler, "c", 3)
    finish(scheduler, plan)
    launched = scheduler.schedule()
    assert (names(launched), launched.is_launched) == (["a", "b"], True)
    # One waits, so the step after this one is planned anew.
    assert not launched.followed
    finish(scheduler, launched)
    assert names(scheduler.schedule()) == ["a", "b", "c"]


def test_rows_that_have_ended_are_left_out_and_counted() -> None:
    scheduler = make(passes_ahead=True)
    first, second = ask(scheduler, "a", 3), ask(scheduler, "b", 5)
    plan = followed(scheduler)
    first.end_tokens = frozenset([0])
    finish(scheduler, plan)
    assert first.finished
    launched = scheduler.schedule()
    assert (names(launched), launched.followed, scheduler.stats().passes_wasted) == (["b"], [second], 1)
    finish(scheduler, launched)
    scheduler.abort(second)
    assert scheduler.schedule() == StepPlan()
    assert scheduler.stats().passes_wasted == 2


def test_a_request_that_has_its_last_token_is_not_followed() -> None:
    scheduler = make(passes_ahead=True)
    ask(scheduler, "a", 3, most=2)
    ask(scheduler, "b", 3, most=4)
    finish(scheduler, scheduler.schedule())
    plan = scheduler.schedule()
    assert [one.request_id for one in plan.followed] == ["b"]
    finish(scheduler, plan)
    assert scheduler.schedule().is_launched
    assert scheduler.stats().passes_wasted == 0


@pytest.mark.parametrize("why", ["prompt", "drafts", "waiting", "beam"])
def test_other_steps_are_not_followed(why: str) -> None:
    scheduler = make(
        shape=TREE if why == "drafts" else None,
        passes_ahead=True,
        max_num_seqs=1 if why == "waiting" else 8,
        max_num_batched_tokens=9 if why == "prompt" else 16,
    )
    own = ask(scheduler, "a", 3, most=5)
    if why == "waiting":
        ask(scheduler, "b", 3)
    if why == "prompt":
        ask(scheduler, "b", 40)
    if why == "beam":
        own.may_follow = False
    for _ in range(4):
        plan = scheduler.schedule()
        assert not plan.followed
        finish(scheduler, plan)


def test_a_step_is_not_followed_where_a_token_lacks_a_block() -> None:
    scheduler = make(blocks=2, passes_ahead=True)
    ask(scheduler, "a", 2, most=6)
    finish(scheduler, scheduler.schedule())
    plan = followed(scheduler)
    assert len(plan.followed[0].block_table) == 1
    finish(scheduler, plan)
    held = scheduler.manager.pool.allocate(1)
    launched = scheduler.schedule()
    assert (launched.is_launched, launched.followed) == (True, [])
    scheduler.manager.pool.free(held)
    finish(scheduler, launched)
    assert followed(scheduler).followed


def test_a_request_without_drafts_is_followed_beside_a_head() -> None:
    scheduler = make(shape=TREE, draft_context=99, passes_ahead=True)
    ask(scheduler, "a", 3, params=SamplingParams(speculation=Speculation(enabled=False)))
    assert followed(scheduler).followed


def test_a_step_that_failed_is_followed_by_none() -> None:
    scheduler = make(passes_ahead=True)
    ask(scheduler, "a", 3)
    plan = followed(scheduler)
    scheduler.cancel(plan)
    again = scheduler.schedule()
    assert (names(again), again.is_launched) == (["a"], False)
