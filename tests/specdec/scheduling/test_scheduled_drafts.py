"""The scheduler's drafts: who has them, and how large they are."""

from typing import Any

import pytest

from specdec.core.sampling_params import SamplingParams, Speculation
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.scheduling.tree_sizer import LARGEST_EVERY, LONE
from tests.specdec.scheduling.scheduled_steps import TREE, ask, costs, grants, make, run, step


def test_drafts_come_from_the_second_token_on_and_only_where_they_could_be_kept() -> None:
    scheduler = make(shape=TREE, draft_context=9)
    request = ask(scheduler, "a", 4, most=5)
    assert [grants(scheduler) for _ in range(3)] == [[("a", 0, 0)], [("a", 6, 3)], [("a", 6, 2)]]
    request.drafts_enabled = False
    assert grants(scheduler) == [("a", 0, 0)]
    # One token is left, and the step has one without drafts.
    assert grants(scheduler) == [("a", 0, 0)]
    assert (scheduler.stats().drafts_asked, scheduler.stats().drafts_granted) == (12, 12)
    ask(scheduler, "b", 7)
    assert [grants(scheduler)[0][1] for _ in range(3)] == [0, 6, 0]


def test_accepted_drafts_are_cached() -> None:
    scheduler = make(shape=TREE)
    request = ask(scheduler, "a", 4, most=9)
    lengths = [len(request.token_ids) for _ in range(4) if step(scheduler, accepted=3)]
    assert lengths == [5, 9, 13]
    assert (scheduler.stats().drafts_accepted, scheduler.stats().known_tokens) == (6, 6)


@pytest.mark.parametrize(
    ("tokens", "nodes"), [(2, (0, 0)), (3, (0, 1)), (4, (1, 1)), (7, (2, 3)), (13, (5, 6)), (14, (6, 6)), (99, (6, 6))]
)
def test_drafts_share_the_tokens_that_are_left(tokens: int, nodes: tuple[int, int]) -> None:
    scheduler = make(shape=TREE, max_num_seqs=2, max_num_batched_tokens=tokens)
    for name in "ab":
        ask(scheduler, name, 1)
    step(scheduler)
    assert tuple(granted for _, granted, _ in grants(scheduler)) == nodes
    assert scheduler.stats().step_tokens == 2 + sum(nodes)


@pytest.mark.parametrize(
    ("length", "granted"), [(8, (6, 3)), (11, (4, 3)), (12, (3, 2)), (13, (2, 2)), (14, (1, 1)), (15, (0, 0))]
)
def test_drafts_shrink_to_the_blocks_that_are_left(length: int, granted: tuple[int, int]) -> None:
    """While drafting, each level but the last has entries too. No request is preempted for drafts."""
    scheduler = make(5, shape=TREE, max_num_batched_tokens=32)
    ask(scheduler, "a", length, most=17 - length)
    ask(scheduler, "b", 1, most=4)
    step(scheduler)
    assert grants(scheduler) == [("a", *granted), ("b", 2, 2)]


def test_blocks_of_drafts_are_taken_back_for_admissions_and_for_outputs() -> None:
    scheduler = make(6, shape=DraftShape(depth=1, branching=1, nodes=12), max_num_batched_tokens=32)
    ask(scheduler, "a", 6)
    step(scheduler)
    assert grants(scheduler) == [("a", 12, 1)]
    ask(scheduler, "b", 8)
    assert grants(scheduler) == [("a", 8, 1), ("b", 0, 0)]
    # Now each has nine tokens, in three blocks.
    assert grants(scheduler) == [("a", 3, 1), ("b", 3, 1)]
    assert scheduler.stats().preemptions == 0


def test_a_long_prompt_is_read_by_the_head_in_parts_before_it_drafts() -> None:
    scheduler = make(shape=TREE, max_num_batched_tokens=10, max_num_seqs=2)
    ask(scheduler, "a", 30)
    for _ in range(3):
        step(scheduler)
    reads = [[(row.draft_prefill_end, row.num_nodes) for row in run(scheduler)] for _ in range(4)]
    assert reads == [[(12, 0)], [(24, 0)], [(33, 6)], [(34, 6)]]


def test_trees_are_as_large_as_the_load_allows() -> None:
    def sizes(token: float, **limits: Any) -> list[tuple[str, int, int]]:
        scheduler = make(shape=TREE, step_cost=costs(token), **limits)
        ask(scheduler, "a", 4)
        step(scheduler)
        return grants(scheduler)

    assert sizes(0.001) == [("a", 6, 3)]
    assert sizes(20.0) == [("a", 0, 0)]
    assert sizes(20.0, adaptive_drafts=False) == [("a", 6, 3)]


def test_one_row_in_turn_gets_the_largest_tree_now_and_then() -> None:
    """At a load at which small ones repay."""
    scheduler = make(300, shape=TREE, step_cost=costs(0.12), prefill_stretch=0)
    for name in "ab":
        ask(scheduler, name, 2, most=400)
    granted = [grants(scheduler) for _ in range(600)]
    lone = [[row for row in rows if row[1]] for rows in granted]
    largest = [rows for rows in lone if len(rows) == 1]
    assert 3 <= len(largest) <= 600 // LARGEST_EVERY
    assert all(row[1] == 6 for rows in largest for row in rows)
    both = [rows for rows in lone if len(rows) == 2]
    assert len(both) > 200
    assert all(row[1] < 6 for rows in both for row in rows)


def test_trees_are_chosen_anew_once_a_fifth_of_the_requests_are_others() -> None:
    scheduler = make(300, shape=TREE, step_cost=costs(0.12), prefill_stretch=0)
    sizer, chosen = scheduler.draft_budget.tree_sizer, []
    assert sizer is not None
    choose = sizer.choose_anew
    sizer.choose_anew = lambda: (chosen.append(len(scheduler.running)), choose())[1]  # type: ignore[method-assign]
    for name in "abcdef":
        ask(scheduler, name, 2, most=400)
        for _ in range(3):
            step(scheduler)
    # The fifth request is no more than a fifth of them, the last two are.
    assert chosen == [1, 2, 3, 4, 6]


def test_a_request_bounds_its_own_trees_or_has_none() -> None:
    scheduler = make(shape=TREE, max_num_batched_tokens=64)
    asked = {"a": Speculation(max_nodes=2), "b": Speculation(enabled=False), "c": Speculation(max_depth=1)}
    for name, speculation in {**asked, "d": Speculation(max_nodes=99, max_depth=99)}.items():
        ask(scheduler, name, 4, params=SamplingParams(speculation=speculation))
    step(scheduler)
    assert grants(scheduler) == [("a", 2, 2), ("b", 0, 0), ("c", 6, 1), ("d", 6, 3)]
    assert scheduler.stats().drafts_asked == scheduler.stats().drafts_granted == 14


def test_prompts_are_stretched_by_the_trees_that_requests_ask_for() -> None:
    """Trees that are larger than any may be would make the step longer than the prompt may."""
    settings = {"prefill_stretch": 2.0, "max_num_batched_tokens": 64, "adaptive_drafts": False}

    def known(speculation: Speculation) -> int:
        scheduler = make(shape=TREE, step_cost=costs(0.05), **settings)
        ask(scheduler, "a", 4, params=SamplingParams(speculation=speculation))
        step(scheduler)
        ask(scheduler, "b", 50)
        return dict(step(scheduler))["b"]

    assert known(Speculation()) > known(Speculation(max_nodes=1)) > 0
    assert known(Speculation(max_nodes=6)) == known(Speculation())


def test_a_row_without_drafts_leaves_its_tokens_to_others() -> None:
    def granted(*asked: Speculation) -> list[int]:
        scheduler = make(shape=TREE, max_num_batched_tokens=9)
        for name, speculation in zip("ab", asked, strict=True):
            ask(scheduler, name, 4, params=SamplingParams(speculation=speculation))
        step(scheduler)
        return [nodes for _, nodes, _ in grants(scheduler)]

    assert granted(Speculation(), Speculation()) == [3, 4]
    assert granted(Speculation(enabled=False), Speculation()) == [0, 6]
    assert granted(Speculation(max_nodes=1), Speculation()) == [1, 6]


def test_the_lone_tree_goes_to_a_request_without_a_bound() -> None:
    scheduler = make(300, shape=TREE, step_cost=costs(0.12), prefill_stretch=0)
    ask(scheduler, "a", 2, most=400, params=SamplingParams(speculation=Speculation(max_nodes=2)))
    ask(scheduler, "b", 2, most=400)
    granted = [grants(scheduler) for _ in range(600)]
    assert all(nodes <= 2 for rows in granted for name, nodes, _ in rows if name == "a")
    lone = [drafted for rows in granted if len(drafted := [row for row in rows if row[1]]) == 1]
    assert 3 <= len(lone) <= 600 // LARGEST_EVERY
    assert all((name, nodes) == ("b", 6) for ((name, nodes, _),) in lone)


def test_few_steps_have_trees_when_none_repays() -> None:
    scheduler = make(300, shape=TREE, step_cost=costs(20.0), prefill_stretch=0, max_num_batched_tokens=400)
    for name in "ab":
        ask(scheduler, name, 2, most=400)
    granted = [grants(scheduler) for _ in range(600)]
    assert 0 < sum(any(row[1] for row in rows) for rows in granted) <= 4 * LONE


def test_waiting_requests_beyond_max_num_seqs_do_not_hold_trees_back() -> None:
    """Their prompts are not computed before a running request ends."""
    scheduler = make(300, shape=TREE, step_cost=costs(0.001), max_num_seqs=2, prefill_stretch=0)
    for name in "abc":
        ask(scheduler, name, 2, most=100)
    step(scheduler)
    assert grants(scheduler) == [("a", 6, 3), ("b", 6, 3)]
