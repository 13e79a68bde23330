"""Rows of choices: trees of nodes that are kept for them in tokens and blocks."""

import pytest

from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.choices import ROOT, Choices
from specdec.core.request import Request
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.draft_budget import DraftBudget
from specdec.scheduling.integrity import check_scheduler
from specdec.scheduling.scheduler import Scheduler
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.scheduling.step_cost import Curve, StepCost
from specdec.scheduling.step_plan import RowResult, StepPlan
from tests.specdec.fake_memory import make_request


def no_drafts() -> DraftBudget:
    return DraftBudget(DraftShape(1, 1, 1), context=0, most_read=0)


def scorer(prompt: list[int], choices: list[list[int]]) -> Request:
    found = Choices(choices)
    return make_request(prompt, found.most_nodes + 1, choices=found, least_nodes=found.least_nodes)


def step(scheduler: Scheduler) -> StepPlan:
    """One step in which the target says 7, and every score is the token's number."""
    plan, results = scheduler.schedule(), list[RowResult]()
    for row in plan.rows:
        if row.choices is not None:
            row.request.take_scores(row.choices, [float(token) for _, token in row.choices.read])
        results.append(RowResult(num_new=row.request.take([7], 0, 0)) if row.sampled else RowResult())
    scheduler.update(plan, results)
    check_scheduler(scheduler)
    return plan


def test_equal_beginnings_are_one_node_and_last_tokens_none() -> None:
    tree = Choices([[5, 6, 7], [5, 6, 8], [5], [9, 6]]).tree(99)
    assert (tree.tokens, tree.parents) == ([5, 6, 9], [ROOT, 0, ROOT])
    # 6 after 5 and 6 after 9 are two scores, and 5 after the prompt is one.
    assert sorted(tree.read) == [(ROOT, 5), (ROOT, 9), (0, 6), (1, 7), (1, 8), (2, 6)]


@pytest.mark.parametrize("most", range(2, 9))
def test_trees_of_any_size_score_all_choices(most: int) -> None:
    given = [[1, 2, 3], [4], [1, 2], [1, 3, 3], [4, 4, 4], [1, 2, 3]]
    choices, trees = Choices(given), 0
    while not choices.is_complete:
        tree = choices.tree(most)
        assert len(tree.tokens) <= most
        choices.record(tree, [10.0 * node + token for node, token in tree.read])
        trees += 1
    assert [score.token_ids for score in choices.scores()] == given
    assert [len(score.logprobs) for score in choices.scores()] == [3, 1, 2, 3, 3, 3]
    assert trees == {2: 3, 3: 2, 4: 2}.get(most, 1)


def test_blocks_of_a_planned_tree_are_not_given_to_a_later_row() -> None:
    """Each step has tokens for one choice; the request behind lacks blocks while it grows."""
    scheduler = Scheduler(
        KVCacheManager(5, 1), SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=4, watermark=0), no_drafts()
    )
    first, later = scorer([1, 2], [[token] * 3 for token in range(6)]), make_request([3], 4)
    scheduler.add(first)
    scheduler.add(later)
    for _ in range(6):
        step(scheduler)
    assert first.finished
    assert first.choices is not None
    assert [score.logprobs for score in first.choices.scores()] == [[float(token)] * 3 for token in range(6)]
    while not later.finished:
        step(scheduler)


def test_a_choice_that_no_step_holds_is_refused() -> None:
    scheduler = Scheduler(KVCacheManager(50, 1), SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=6), no_drafts())
    scheduler.add(scorer([1], [[1] * 5]))
    with pytest.raises(ValueError, match="choices holds one of 6 tokens; it may have at most 5"):
        scheduler.add(scorer([1], [[1] * 6]))
    with pytest.raises(ValueError, match="cache blocks"):
        scheduler.add(scorer([1] * 47, [[1] * 5]))


@pytest.mark.parametrize("stretch", [0, 2.0])
def test_choices_delay_a_request_that_generates_no_more_than_a_prompt_does(stretch: float) -> None:
    """A pass costs 40 and a token 1, so that a plain step of 41 leaves room for 41 nodes, or none is measured."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=400, prefill_stretch=stretch)
    cost = StepCost(Curve([(1, 41.0), (400, 440.0)]))
    scheduler = Scheduler(KVCacheManager(900, 1), config, no_drafts(), cost)
    scheduler.add(make_request([1], 30))
    step(scheduler)
    scheduler.add(scorer([1, 2], [[token, 1] for token in range(300)]))
    nodes = [sum(len(row.choices.tokens) for row in step(scheduler).rows if row.choices) for _ in range(5)]
    if stretch:
        assert all(30 <= count <= 50 for count in nodes)
    else:
        assert nodes == [300, 0, 0, 0, 0]


def test_nodes_count_as_tokens_of_prompts() -> None:
    """A request that generates is delayed by choices no more than by a long prompt."""
    scheduler = Scheduler(
        KVCacheManager(500, 1), SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=60), no_drafts()
    )
    requests = [scorer([token], [[token, 1] for token in range(9)]) for token in (1, 2)]
    for request in requests:
        scheduler.add(request)
    scheduler._prompt_tokens = lambda *_: 5  # type: ignore[method-assign]
    nodes = [[len(row.choices.tokens) for row in step(scheduler).rows if row.choices] for _ in range(4)]
    # One node each, and five between them.
    assert nodes == [[6, 1], [3, 3], [5], []]
    assert all(request.finished for request in requests)
