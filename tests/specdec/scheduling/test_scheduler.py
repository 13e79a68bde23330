"""Each rule of the Scheduler by itself; all of them together are in test_scheduler_machine.py."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import pytest

from specdec.core.errors import QueueFullError
from specdec.core.request import Request, RequestGroup
from specdec.core.sampling_params import SamplingParams
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.scheduling.integrity import check_scheduler
from specdec.scheduling.request_queues import PRIORITY_STEPS, TURN_STEPS
from specdec.scheduling.step_cost import MeasuredStep
from specdec.scheduling.step_planner import MOST_OVERTAKEN
from tests.specdec.fake_memory import make_request
from tests.specdec.scheduling.scheduled_steps import ask, costs, finish, make, names, run, step


def test_prompts_are_split_and_outputs_go_on_beside_them() -> None:
    scheduler = make()
    ask(scheduler, "a", 4)
    ask(scheduler, "b", 40)
    assert [step(scheduler) for _ in range(2)] == [[("a", 4), ("b", 12)], [("a", 1), ("b", 15)]]
    assert [step(scheduler) for _ in range(2)] == [[("a", 1), ("b", 13)], [("a", 1), ("b", 1)]]


def test_a_token_is_kept_for_every_output_even_behind_a_long_prompt() -> None:
    scheduler = make(scheduling_policy="priority", max_num_batched_tokens=8)
    for name in "ab":
        ask(scheduler, name, 2)
    step(scheduler)
    ask(scheduler, "p", 20, priority=-1)
    assert [step(scheduler) for _ in range(2)] == [[("p", 6), ("a", 1), ("b", 1)], [("p", 6), ("a", 1), ("b", 1)]]


def test_no_prompt_gets_more_than_the_threshold_in_a_step() -> None:
    scheduler = make(long_prefill_token_threshold=5)
    for name, length in (("a", 11), ("b", 5)):
        ask(scheduler, name, length)
    assert [step(scheduler) for _ in range(3)] == [[("a", 5), ("b", 5)], [("a", 5), ("b", 1)], [("a", 1), ("b", 1)]]


@pytest.mark.parametrize(
    ("limit", "value", "rows"),
    [("blocks", 5, "ac"), ("max_num_partial_prefills", 2, "abc"), ("max_num_seqs", 2, "a"), ("blocks", 4, "a")],
)
def test_a_wait_for_another_prompt_is_overtaken_but_keeps_its_place(limit: str, value: int, rows: str) -> None:
    """Several prompts take several steps; no request takes the waiting one's seat or blocks."""
    scheduler = make(**{limit: value}, long_prefill_token_threshold=4)
    for name, length in (("a", 8), ("b", 8), ("c", 3)):
        ask(scheduler, name, length, most=1)
    assert "".join(name for name, _ in step(scheduler)) == rows


def test_whoever_overtook_another_does_not_keep_it_waiting() -> None:
    """It waits for those who came before it alone: here for 17 tokens, and for none of the outputs behind it."""
    scheduler = make(20, long_prefill_token_threshold=2, max_num_batched_tokens=10, max_num_seqs=10)
    before, overtaken = ask(scheduler, "a", 16, most=1), ask(scheduler, "b", 40, most=1)
    for name in "cdefghi":
        ask(scheduler, name, 2, most=40)
    for _ in range(1 + before.max_length):
        step(scheduler)
    assert overtaken.num_cached > 0


def test_an_admission_leaves_blocks_for_those_that_run() -> None:
    """If no request runs, it may take them all."""
    scheduler = make(10, watermark=0.3)
    for name, length in (("a", 4), ("b", 24), ("c", 1), ("d", 40)):
        ask(scheduler, name, length, most=1)
    assert step(scheduler) == [("a", 4), ("b", 12)]
    assert names(scheduler.waiting) == "cd"
    assert step(scheduler) == [("b", 12), ("c", 1)]
    assert step(scheduler) == [("d", 16)]


def test_a_request_larger_than_the_cache_is_refused_at_once() -> None:
    """The last token need not be cached."""
    scheduler = make(4)
    message = r"a request of up to 18 tokens needs 5 cache blocks of 4, and there are 4; lower max_tokens or raise"
    with pytest.raises(ValueError, match=message):
        ask(scheduler, "a", 8, most=10)
    assert isinstance(scheduler.refusal(make_request([1] * 8, 10)), ValueError)
    assert scheduler.refusal(make_request([1] * 8, 9)) is None


def test_a_full_queue_sends_others_away_until_later() -> None:
    scheduler = make(max_queued_requests=2, max_num_seqs=1)
    for name in "ab":
        ask(scheduler, name, 1)
    assert isinstance(scheduler.refusal(make_request([1])), QueueFullError)
    with pytest.raises(QueueFullError, match="2 requests wait, as many as may; try again later"):
        ask(scheduler, "c", 1)
    step(scheduler)
    ask(scheduler, "c", 1)
    assert names(scheduler.waiting) == "bc"


def test_a_queue_that_others_have_filled_takes_a_clients_first_request() -> None:
    scheduler = make(max_queued_requests=2)
    for name in "ab":
        ask(scheduler, name, 1, client="many")
    ask(scheduler, "c", 1, client="few")
    for client in ("many", "few"):
        with pytest.raises(QueueFullError):
            ask(scheduler, "d", 1, client=client)
    assert names(scheduler.waiting) == "acb"


def test_samples_of_one_prompt_wait_as_one_request() -> None:
    """Or a prompt of more samples than may wait would never be taken, however idle the engine is."""
    scheduler = make(max_queued_requests=2, max_num_seqs=1)
    shared: dict[Request, None] = {}
    for name in ("a0", "a1", "a2", "a3"):
        request = make_request([1], 2, request_id=name, cached_samples=shared)
        scheduler.add(request)
    ask(scheduler, "b", 1)
    with pytest.raises(QueueFullError, match="2 requests wait, as many as may; try again later"):
        ask(scheduler, "c", 1)
    assert names(scheduler.waiting) == "a0a1a2a3b"


def test_lower_priorities_go_first_and_equals_in_order_of_arrival() -> None:
    scheduler = make(scheduling_policy="priority")
    for name, priority in zip("abcde", (1, 0, -1, 0, 1), strict=True):
        ask(scheduler, name, 1, priority=priority)
    assert names(scheduler.waiting) == "cbdae"


@pytest.mark.long
@pytest.mark.parametrize(("later", "order"), [(PRIORITY_STEPS - 1, "ba"), (PRIORITY_STEPS, "ab")])
def test_a_long_wait_ends_overtaking(later: int, order: str) -> None:
    scheduler = make(300, max_num_seqs=1, scheduling_policy="priority")
    ask(scheduler, "r", 1, most=later, priority=-1)
    ask(scheduler, "a", 1, priority=1)
    for _ in range(later):
        assert step(scheduler) == [("r", 1)]
    ask(scheduler, "b", 1)
    assert names(scheduler.waiting) == order


def test_a_client_with_many_requests_delays_its_own() -> None:
    """Another's first request takes the last seat that they hold, its second one the next."""
    scheduler = make(max_num_seqs=3)
    for name in "abcde":
        ask(scheduler, name, 1, client="many")
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 1)]
    ask(scheduler, "f", 1, client="few")
    assert step(scheduler) == [("a", 1), ("f", 1), ("b", 1)]
    ask(scheduler, "g", 1, client="few")
    assert step(scheduler) == [("a", 1), ("f", 1), ("b", 1)]
    assert names(scheduler.waiting) == "gcde"
    # A client's own requests keep their order.
    scheduler.abort(scheduler.running[0])
    ask(scheduler, "h", 1, client="many")
    assert step(scheduler) == [("f", 1), ("b", 1), ("g", 1)]
    assert names(scheduler.waiting) == "cdeh"


def test_a_past_burst_delays_none_of_a_clients_requests() -> None:
    """Its last requests rank as if they came now, and its next one does not rank behind what has ended."""
    scheduler = make(max_num_seqs=2)
    for name in "abcdef":
        ask(scheduler, name, 1, most=9, client="few")
    while names(scheduler.running) != "ef":
        step(scheduler)
    for name in "uvwxyz":
        ask(scheduler, name, 1, client="many")
    ask(scheduler, "g", 1, client="few")
    assert step(scheduler) == [("e", 1), ("u", 1)]
    assert names(scheduler.waiting) == "fvwgxyz"


def test_a_client_alone_is_served_in_the_order_of_arrival() -> None:
    """Whatever it had queued before: none of its requests preempts an earlier one."""
    scheduler, served = make(max_num_seqs=2), ""
    for name in "abcdefghijkl":
        ask(scheduler, name, 1, most=3)
        if name > "f":
            served += names([row.request for row in run(scheduler)])
    while list(scheduler.queues):
        served += names([row.request for row in run(scheduler)])
    assert "".join(dict.fromkeys(served)) == "abcdefghijkl"
    assert scheduler.stats().preemptions == 0


@pytest.mark.long
@pytest.mark.parametrize(("later", "order"), [(TURN_STEPS - 1, "ba"), (TURN_STEPS, "ab")])
def test_a_clients_second_request_is_not_overtaken_for_ever(later: int, order: str) -> None:
    scheduler = make(300, max_num_seqs=1)
    ask(scheduler, "r", 1, most=later + 1, client="many")
    ask(scheduler, "a", 1, client="many")
    for _ in range(later):
        assert step(scheduler) == [("r", 1)]
    ask(scheduler, "b", 1, client="few")
    assert names(scheduler.waiting) == order


def test_a_request_that_preempted_others_runs_at_once() -> None:
    """Without the blocks in front of it, a connector may begin a search that it did not begin before."""
    connector = Mock(KVConnector, instance=True)
    connector.get_num_new_matched_tokens.side_effect = [(0, False), (0, False), (None, True)]
    connector.update_state_after_alloc.return_value = []
    scheduler = make(max_num_seqs=1, scheduling_policy="priority")
    scheduler.connector = scheduler.planner.connector = connector
    ask(scheduler, "a", 4)
    assert step(scheduler) == [("a", 4)]
    ask(scheduler, "p", 4, priority=-1)
    assert step(scheduler) == [("p", 4)]


def test_a_connector_fetches_for_no_more_requests_than_may_run() -> None:
    """Each asked one costs time of the step, and holds host memory until it is admitted."""
    connector = Mock(KVConnector, instance=True)
    connector.get_num_new_matched_tokens.return_value = (None, True)
    scheduler = make(max_num_seqs=3)
    scheduler.connector = scheduler.planner.connector = connector
    for name in "abcdefghijk":
        ask(scheduler, name, 4)
    for count in (8, 16):
        assert step(scheduler) == []
        assert names(scheduler.queues.waiting_for_kv) == "abcdefgh"
        assert connector.get_num_new_matched_tokens.call_count == count


def test_a_priority_needs_the_policy() -> None:
    with pytest.raises(ValueError, match="priority -1 needs scheduling_policy 'priority'; it is 'fcfs'"):
        ask(make(), "a", 1, priority=-1)


@pytest.mark.parametrize("blocks", [4, 5])
def test_the_last_rank_is_preempted_and_computed_again(blocks: int) -> None:
    """It is preempted by a request that lacks a block, or by itself."""
    scheduler = make(blocks)
    first, last = ask(scheduler, "a", 8, most=blocks * 4 - 14), ask(scheduler, "b", 8, most=5)
    step(scheduler)
    plan = scheduler.schedule()
    assert [(row.request, row.num_known) for row in plan.rows] == [(first, 1)]
    assert (scheduler.running, scheduler.waiting) == ([first], [last])
    assert (last.num_cached, last.block_table, len(last.token_ids)) == (0, [], 9)
    finish(scheduler, plan)
    while not first.finished:
        assert step(scheduler) == [("a", 1)]
    # Its first block is still cached, as no request has needed it; its output is computed like a prompt.
    assert step(scheduler) == [("b", 5)]
    stats = scheduler.stats()
    # What it finds again of its own is no hit.
    assert (stats.preemptions, stats.prefix_queries, stats.prefix_hits) == (1, 16, 0)


@pytest.mark.parametrize(("limit", "tokens"), [("blocks", 16), ("max_num_seqs", 16), ("max_num_seqs", 1)])
def test_a_waiting_request_takes_the_place_of_a_later_rank(limit: str, tokens: int) -> None:
    """A block, a seat, or a token."""
    limits = {"max_num_seqs": tokens, limit: 1}
    scheduler = make(**limits, max_num_batched_tokens=tokens, scheduling_policy="priority")
    ask(scheduler, "l", 1, most=4, priority=1)
    assert step(scheduler) == [("l", 1)]
    ask(scheduler, "f", 1, most=4)
    assert step(scheduler) == [("f", 1)]
    assert (names(scheduler.running), names(scheduler.waiting)) == ("f", "l")


def test_nobody_is_admitted_into_what_a_preemption_has_freed() -> None:
    """It would be preempted next."""
    scheduler = make(5)
    for name, length in (("a", 8), ("b", 8), ("c", 1)):
        ask(scheduler, name, length)
    assert [step(scheduler) for _ in range(2)] == [[("a", 8), ("b", 8)], [("a", 1)]]
    assert names(scheduler.waiting) == "bc"


def test_prompts_beside_outputs_get_what_the_stretch_allows() -> None:
    """A prompt alone gets the whole step; beside an output, whose step takes 17/16, it may double that time."""
    scheduler = make(max_num_batched_tokens=64, prefill_stretch=2.0, step_cost=costs(0.0625))
    ask(scheduler, "a", 60)
    assert step(scheduler) == [("a", 60)]
    ask(scheduler, "b", 46)
    assert step(scheduler) == [("a", 1), ("b", 17)]
    # Two may lengthen a step twice as much; the second gets what the first has left.
    ask(scheduler, "c", 8)
    assert step(scheduler) == [("a", 1), ("b", 29), ("c", 5)]
    assert step(scheduler) == [("a", 1), ("b", 1), ("c", 3)]


def test_under_a_load_of_prompts_some_steps_compute_none() -> None:
    """They measure what decoding rows take. A prompt of the first rank goes on in each step."""
    settings = {"scheduling_policy": "priority", "prefill_stretch": 2.0}
    for priority, expected in ((1, 2), (-1, 0)):
        cost = costs(0.125)
        scheduler = make(900, max_num_batched_tokens=64, step_cost=cost, **settings)
        ask(scheduler, "d", 2, most=300)
        step(scheduler)
        ask(scheduler, "b", 3000, priority=priority)
        alone = 0
        for _ in range(150):
            rows = step(scheduler)
            alone += rows == [("d", 1)]
            prompts = sum(known for name, known in rows if name == "b")
            scheduler.learn(MeasuredStep(1, 1, prompts, 1.0 + 0.125 * prompts, 0, 0, 0, 0.0), [])
        assert alone == expected


def test_a_prompt_whose_turn_does_not_come_preempts_nobody() -> None:
    """`b` takes what the stretch allows, so `c`, which ranks before the running `d`, waits, and `d` goes on."""
    settings = {"scheduling_policy": "priority", "prefill_stretch": 2.0, "step_cost": costs(0.125)}
    scheduler = make(max_num_batched_tokens=64, **settings)
    ask(scheduler, "d", 2, priority=1)
    step(scheduler)
    ask(scheduler, "b", 50)
    ask(scheduler, "c", 8)
    assert step(scheduler) == [("b", 18), ("d", 1)]
    assert scheduler.stats().preemptions == 0


def test_equal_prompts_wait_for_the_first_and_then_share_it() -> None:
    scheduler = make()
    scheduler.add(make_request(list(range(20)), request_id="a"))
    scheduler.add(make_request([*range(18), 99], request_id="b"))
    assert step(scheduler) == [("a", 16)]
    assert step(scheduler) == [("a", 4), ("b", 3)]
    assert (scheduler.stats().prefix_queries, scheduler.stats().prefix_hits) == (39, 16)


@pytest.mark.parametrize(
    ("limit", "value", "rows"),
    [("max_num_seqs", 3, "ac"), ("max_num_seqs", 2, "a"), ("blocks", 11, "ac"), ("blocks", 10, "a")],
)
def test_a_wait_for_a_shared_prefix_is_overtaken_but_keeps_its_place(limit: str, value: int, rows: str) -> None:
    """Others that share nothing do not wait with it, and take neither its seat nor its blocks."""
    scheduler = make(**{limit: value}, long_prefill_token_threshold=4)
    ask(scheduler, "a", 20, most=1)
    scheduler.add(make_request([*range(97_000, 97_018), 1, 2], 1, request_id="b"))
    ask(scheduler, "c", 3, most=9)
    assert "".join(name for name, _ in step(scheduler)) == rows
    while "b" not in (ran := "".join(name for name, _ in step(scheduler))):
        assert scheduler.running
    # It took the seat that was kept, and shares the prompt.
    assert (ran[:2], scheduler.stats().prefix_hits) == ("ab", 16)


def test_few_are_looked_at_that_wait_for_a_shared_prefix() -> None:
    """Each has its prompt hashed and searched in the step, which all others wait for."""
    scheduler = make(max_num_seqs=60, max_num_batched_tokens=80, blocks=999, long_prefill_token_threshold=4)
    for number in range(50):
        scheduler.add(make_request([*range(20), number], 1, request_id=str(number)))
    with patch.object(scheduler.manager, "find_prefix", wraps=scheduler.manager.find_prefix) as searched:
        assert step(scheduler) == [("0", 4)]
    assert searched.call_count == 1 + MOST_OVERTAKEN


def test_a_long_queue_is_seldom_ranked_anew() -> None:
    """A request that ends, and one that comes, move nobody."""
    scheduler = make(max_num_seqs=2, max_queued_requests=None)
    ask(scheduler, "z", 1, client="few")
    for number in range(64):
        ask(scheduler, chr(256 + number), 1, client="many")
    with patch.object(scheduler.queues, "_renew_turns", wraps=scheduler.queues._renew_turns) as renewed:
        for number in range(64, 128):
            for ended in scheduler.waiting[1:3] if number < 68 else scheduler.waiting[1:2]:
                scheduler.abort(ended)
            ask(scheduler, chr(256 + number), 1, client="many")
    assert renewed.call_count == 0
    assert names(scheduler.waiting) == "z" + "".join(chr(256 + number) for number in range(68, 128))


def test_nobody_waits_for_what_is_computed_behind() -> None:
    scheduler = make(scheduling_policy="priority", long_prefill_token_threshold=4)
    for name, priority in (("l", 1), ("f", 0)):
        scheduler.add(make_request(list(range(20)), request_id=name, priority=priority))
        assert step(scheduler) == [(name, 4)]


def test_samples_compute_their_prompt_once() -> None:
    scheduler = make()
    cached: dict[Request, None] = {}
    group = [make_request(list(range(6)), request_id=name, cached_samples=cached) for name in "abc"]
    for request in group:
        scheduler.add(request)
    assert step(scheduler) == [("a", 6)]
    plan = scheduler.schedule()
    assert [(row.request.request_id, row.num_known) for row in plan.rows] == [("a", 1), ("b", 1), ("c", 1)]
    assert [move.is_load for move in plan.moves] == [False] * 2
    finish(scheduler, plan)
    assert len({request.block_table[0] for request in group}) == 1
    assert len({request.block_table[1] for request in group}) == 3


def lines_run(work: Callable[[], None]) -> int:
    """Lines of Python that `work` executes: a measure of its cost which is the same on every machine."""
    count = 0

    def trace(*_: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.long
def test_scheduling_samples_costs_their_number_and_not_its_square() -> None:
    """Each has ended when the next ones come."""

    def run_samples(count: int) -> None:
        scheduler, cached = make(), dict[Request, None]()
        samples = [make_request(list(range(6)), 1, cached_samples=cached) for _ in range(count)]
        group = RequestGroup("", None, samples[0].token_ids, samples)
        for request in samples:
            scheduler.add(request)
        while not group.finished:
            finish(scheduler, scheduler.schedule(), check=False)

    small, large = (lines_run(partial(run_samples, count)) for count in (50, 200))
    assert large < 4.2 * small


def test_the_time_of_a_prompt_is_not_negative() -> None:
    """A sample begins behind the cached prompt, while the one that scores it waits for another prompt."""
    scheduler, cached, tokens = make(long_prefill_token_threshold=4), dict[Request, None](), list(range(13))
    scheduler.add(make_request(tokens, 1))
    while scheduler.running or scheduler.waiting:
        step(scheduler)
    ask(scheduler, "p", 40)
    samples = [
        make_request(tokens, 4, cached_samples=cached, request_id=name, params=SamplingParams(prompt_logprobs=scored))
        for name, scored in (("a", 0), ("b", None))
    ]
    group = RequestGroup("", None, tokens, samples)
    for request in samples:
        scheduler.add(request)
    assert step(scheduler) == [("p", 4), ("b", 1)]
    while not group.finished:
        step(scheduler)
    times = group.metrics()
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts


def test_a_child_runs_at_once_behind_its_parent_or_waits_with_it() -> None:
    scheduler = make()
    parent, _ = ask(scheduler, "a", 6), ask(scheduler, "b", 1)
    early = make_request([*parent.token_ids, 7], request_id="d")
    scheduler.fork(parent, early)
    assert names(scheduler.waiting) == "adb"
    scheduler.abort(early)
    step(scheduler)
    child = make_request([*parent.token_ids[:6], 7], num_prompt=6, request_id="c")
    scheduler.fork(parent, child)
    assert names(scheduler.running) == "acb"
    assert child.block_table == parent.block_table
    assert step(scheduler) == [("a", 1), ("c", 1), ("b", 1)]


def test_requests_are_aborted_wherever_they_are() -> None:
    scheduler = make(4, max_num_seqs=2)
    running, preempted, waiting = (ask(scheduler, name, 8, most=5) for name in "abc")
    step(scheduler)
    plan = scheduler.schedule()
    assert [row.request for row in plan.rows] == [running]
    for request in (running, preempted, waiting):
        scheduler.abort(request)
        scheduler.abort(request)
        assert request.finish_reason == "abort"
    # What the step writes to is kept until it has ended.
    assert (names(scheduler.running), names(scheduler.waiting), len(running.block_table)) == ("a", "", 3)
    scheduler.cancel(plan)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
    assert (stats.queued, stats.aborted, stats.finished) == (3, 3, 0)


def test_a_cancelled_step_is_done_again() -> None:
    scheduler = make()
    request = ask(scheduler, "a", 6)
    scheduler.cancel(scheduler.schedule())
    assert (request.num_cached, len(request.token_ids), scheduler.stats().drafts_accepted) == (0, 6, 0)
    assert step(scheduler) == [("a", 6)]


def test_stats_count_what_has_happened() -> None:
    scheduler = make(4, max_num_seqs=1)
    for name in "ab":
        ask(scheduler, name, 5, most=2)
    for steps, step_tokens, running, kv_usage, known, finished in ((1, 5, 1, 0.5, 5, 0), (2, 1, 0, 0, 6, 1)):
        step(scheduler)
        stats = scheduler.stats()
        assert (stats.running, stats.waiting, stats.kv_usage, stats.step_tokens) == (running, 1, kv_usage, step_tokens)
        assert (stats.queued, stats.known_tokens, stats.finished, stats.steps) == (2, known, finished, steps)


def test_check_integrity_sees_queues_in_disorder() -> None:
    def fault(message: str, running: list[Request], waiting: list[Request]) -> None:
        scheduler.queues.running, scheduler.queues.waiting = running, waiting
        with pytest.raises(AssertionError, match=message):
            check_scheduler(scheduler)

    scheduler = make(8, max_num_seqs=2)
    a, b, c, d = (ask(scheduler, name, 5) for name in "abcd")
    step(scheduler)
    fault("a queue is out of order", [b, a], [c, d])
    fault("queued twice", [a, b], [b, c, d])
    fault("a waiting request holds blocks", [a], [b, c, d])


@pytest.mark.long
def test_the_scheduler_needs_no_torch() -> None:
    """It decides between two passes of a GPU, and must start and run without anything heavy."""
    code = "import sys, specdec.scheduling.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
