"""First come, first served, within the budget of tokens, seats and blocks."""

import pytest

from specdec.block_pool import BlockPool
from specdec.detokenizer import Detokenizer
from specdec.draft_heads.drafter import DraftShape
from specdec.request import Request
from specdec.sampling_params import SamplingParams
from specdec.scheduler import Scheduler
from specdec.verify.sampling import Sampling


def request(name: str, prompt: int, max_tokens: int = 10) -> Request:
    return Request(
        request_id=name,
        token_ids=list(range(prompt)),
        num_prompt=prompt,
        params=SamplingParams(max_tokens=max_tokens, seed=0),
        sampling=Sampling(),
        max_length=prompt + max_tokens,
        end_tokens=frozenset(),
        detokenizer=Detokenizer(None, ()),
    )


def scheduler(blocks: int = 100, seats: int = 4, tokens: int = 16, shape: DraftShape | None = None) -> Scheduler:
    return Scheduler(BlockPool(blocks), 8, seats, tokens, shape)


def finish_step(engine: Scheduler) -> list[tuple[str, int, int]]:
    """Run a step whose every sampled row emits token 0; (request, known tokens, nodes) of its rows."""
    plan = engine.schedule()
    for row in plan:
        row.request.num_cached += row.num_known
        if row.request.num_cached == len(row.request.token_ids):
            row.request.append(0, False)
            if row.request.finished:
                engine.release(row.request)
    return [(row.request.request_id, row.num_known, row.num_nodes) for row in plan]


def test_long_prompts_are_split_and_running_requests_come_first() -> None:
    engine = scheduler(tokens=16)
    engine.add(request("a", 4))
    engine.add(request("b", 40))
    assert finish_step(engine) == [("a", 4, 0), ("b", 12, 0)]
    assert finish_step(engine) == [("a", 1, 0), ("b", 15, 0)]
    assert finish_step(engine) == [("a", 1, 0), ("b", 13, 0)]
    assert finish_step(engine) == [("a", 1, 0), ("b", 1, 0)]


def test_nodes_only_under_the_last_token_of_a_running_output() -> None:
    engine = scheduler(shape=DraftShape(3, 2, 6))
    engine.add(request("a", 4, max_tokens=3))
    assert finish_step(engine) == [("a", 4, 0)]
    assert finish_step(engine) == [("a", 1, 6)]
    # One token is left: a draft could not be emitted any more.
    assert finish_step(engine) == [("a", 1, 0)]
    assert finish_step(engine) == []


def test_seats_are_given_in_order_of_arrival() -> None:
    engine = scheduler(seats=2)
    for name in "abc":
        engine.add(request(name, 2, max_tokens=2))
    assert [row[0] for row in finish_step(engine)] == ["a", "b"]
    assert [row[0] for row in finish_step(engine)] == ["a", "b"]
    assert [row[0] for row in finish_step(engine)] == ["c"]


def test_a_big_request_waits_for_blocks_and_is_not_overtaken() -> None:
    engine = scheduler(blocks=4)
    engine.add(request("a", 14, max_tokens=2))
    engine.add(request("big", 16, max_tokens=16))
    engine.add(request("small", 2, max_tokens=2))
    assert [row[0] for row in finish_step(engine)] == ["a"]
    assert [row[0] for row in finish_step(engine)] == ["a"]
    assert [row[0] for row in finish_step(engine)] == ["big"]
    engine.pool.check_integrity()


def test_what_can_never_fit_is_refused_at_once() -> None:
    engine = scheduler(blocks=4)
    with pytest.raises(ValueError, match="needs 5 cache blocks of 8, and there are 4; lower max_tokens"):
        engine.add(request("a", 30, max_tokens=10))
    assert not engine.waiting


def test_release_gives_blocks_back_from_either_queue() -> None:
    engine = scheduler(seats=1)
    a, b = request("a", 2), request("b", 2)
    engine.add(a)
    engine.add(b)
    engine.schedule()
    engine.release(b)
    engine.release(a)
    assert engine.pool.num_free == engine.pool.num_blocks
    assert engine.schedule() == []
