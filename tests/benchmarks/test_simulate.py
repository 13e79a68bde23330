"""The simulation of replicas, against what can be worked out by hand."""

from dataclasses import replace

import pytest

pytest.importorskip("simpy", reason="the package simpy is not installed: pip install 'specdec[simulate]'")

from benchmarks import arrival_trace, recorded_trace
from benchmarks.arrival_trace import Arrival, traced
from benchmarks.capacity import Costs, cache_tokens, kv_bytes_per_token, roofline_costs
from benchmarks.simulated_replicas import Engine, Job, job_seconds, simulate
from benchmarks.simulated_replicas import jobs_of as jobs_of_requests

# A step of 10 ms, 20 ms with drafts of two tokens; 1 ms per prompt token.
COSTS = Costs((1,), (0.01,), (2.0,), (2.0,), 0.001, overhead=0.1, network=(0.5, 4000.0))
ENGINE = Engine(seats=4, budget=2048, stretch=0, capacity=1000)
TRACE = arrival_trace.read()


def jobs_of(trace: list[Arrival], copies: int, speed: float) -> list[Job]:
    return jobs_of_requests(traced(trace, ENGINE.block), copies, speed)


def test_the_committed_trace_is_the_one_that_is_drawn() -> None:
    assert arrival_trace.draw() == TRACE


def test_one_request() -> None:
    (job,) = jobs_of([Arrival(1.0, 0, 64, 36, 9)], 1, 1.0)
    busy = simulate([job], 1, COSTS, "prefix", ENGINE)
    # 400 bytes of prompt, a step of 100 prompt tokens, and 4 steps for the other 8 tokens.
    first = 0.1 + 0.5 + 0.1 + 0.01 + 0.1
    assert job_seconds(job) == pytest.approx((first, first + 4 * 0.02))
    assert busy == pytest.approx(0.19 / (job.at + first + 0.08))


def test_a_prompt_waits_for_a_seat_and_finds_its_prefix() -> None:
    jobs = jobs_of([Arrival(0.1, 0, 64, 36, 1), Arrival(0.1, 0, 64, 36, 1)], 1, 1.0)
    simulate(jobs, 1, COSTS, "prefix", Engine(seats=1, budget=2048, stretch=0, capacity=1000))
    assert [job.cached for job in jobs] == [0, 64]
    assert jobs[1].end - jobs[0].end == pytest.approx(0.01 + 0.036)


def test_a_prompt_may_stretch_a_step_so_far() -> None:
    jobs = jobs_of([Arrival(0.0, 0, 0, 16, 1000), Arrival(0.5, 1, 0, 100, 1)], 1, 1.0)
    simulate(jobs, 1, COSTS, "prefix", Engine(seats=4, budget=2048, stretch=2.0, capacity=1000))
    # 20 tokens in each step of 20 ms, which then takes 40 ms.
    first, _ = job_seconds(jobs[1])
    arrived = 0.1 + 0.5 + 0.1
    assert arrived + 5 * 0.04 <= first <= arrived + 6 * 0.04


@pytest.mark.parametrize("policy", ["prefix", "round robin"])
def test_all_requests_end(policy: str) -> None:
    jobs = jobs_of(TRACE[:40], 4, 2.0)
    simulate(jobs, 4, COSTS, policy, ENGINE)
    assert len(jobs) == 160
    assert all(job.at < job.first <= job.end for job in jobs)


def test_routing_by_prefix_computes_less() -> None:
    cached = {}
    for policy in ("prefix", "round robin"):
        jobs = jobs_of(TRACE, 8, 1.0)
        simulate(jobs, 8, Costs((1,), (0.001,), (1.0,), (2.0,), 1e-5), policy, ENGINE)
        cached[policy] = sum(job.cached for job in jobs)
    assert cached["prefix"] > 1.2 * cached["round robin"]


def test_a_small_cache_forgets() -> None:
    trace = [Arrival(0.1 * index, index % 2, 160, 16, 1) for index in range(8)]
    found = []
    for capacity in (1000, 12):
        jobs = jobs_of(trace, 1, 0.01)
        simulate(jobs, 1, COSTS, "prefix", Engine(4, 2048, 0, capacity))
        found.append(sum(job.cached for job in jobs))
    assert found[0] == 6 * 160
    assert found[1] < found[0]


def test_costs_between_and_beyond_the_measured() -> None:
    costs = Costs((1, 3), (0.01, 0.03), (1.0, 1.0), (3.0, 2.0), 0.0)
    assert [costs.step(rows, 0) for rows in (1, 2, 5)] == pytest.approx([0.01, 0.02, 0.05])
    assert [costs.tokens_per_row(rows) for rows in (1, 2, 9)] == pytest.approx([3.0, 2.5, 1.0])


def test_capacity() -> None:
    assert kv_bytes_per_token(32, 8, 128, 2) == 131_072
    assert cache_tokens(72e9, 16e9, 131_072) == 427_246
    # Per request 50 ms for its prompt, and 4 of 8 requests' steps of 20 ms.
    costs = Costs((1, 8), (0.01, 0.01), (2.0, 2.0), (2.0, 2.0), 0.001)
    assert costs.requests_per_second(8, 50, 9) == pytest.approx(1 / (0.05 + 4 * 0.02 / 8))
    gpu = roofline_costs((1, 1000), 16e9, 8e9, 1e8, 2e12, 5e14)
    assert gpu.plain == pytest.approx((16.1e9 / 2e12, 116e9 / 2e12))
    assert gpu.token == pytest.approx(16e9 / 5e14)


def test_a_request_waits_for_memory() -> None:
    """Two of 112 tokens, 7 blocks each, do not fit into 12 at once."""
    trace = [Arrival(0.1, group, 0, 100, 12) for group in range(2)]
    for capacity in (14, 12):
        jobs = jobs_of(trace, 1, 1.0)
        simulate(jobs, 1, COSTS, "prefix", Engine(4, 2048, 0, capacity))
        assert (jobs[1].first > jobs[0].end) == (capacity == 12)


def test_a_request_that_comes_between_steps_waits_for_the_end_of_one() -> None:
    """Steps that are alike are one event, until a request comes."""
    jobs = jobs_of([Arrival(0.0, 0, 0, 16, 1000), Arrival(0.305, 1, 0, 20, 1)], 1, 1.0)
    simulate(jobs, 1, replace(COSTS, overhead=0.0, network=(0.0, float("inf"))), "prefix", ENGINE)
    # After a prompt of 16 tokens, 14 steps of 20 ms end at 306 ms; the next reads 20 tokens besides.
    assert jobs[1].first == pytest.approx(0.026 + 14 * 0.02 + 0.04)
    assert jobs[0].end == pytest.approx(0.026 + 500 * 0.02 + 0.02)


def test_the_recorded_trace() -> None:
    """It is cut from the published one, whose lines are unchanged; scaled, a block has fewer tokens."""
    requests = recorded_trace.read()
    assert len(requests) == 2000
    first = requests[0]
    assert (first.at, first.size, first.answer, first.blocks) == (0.0, 6758, 500, tuple(map(str, range(13))))
    assert all(len(each.blocks) == each.size // 512 for each in requests)
    small = recorded_trace.read(scale=16, longest=2048)
    assert small[0].size == 6758 // 16
    assert small[0].blocks == first.blocks
    assert all(each.size + each.answer <= 2048 for each in small)
    assert len(small) < len(requests)
