"""Moments at which news of a request are sent."""

from specdec import LLM, SamplingParams
from specdec.async_engine.outbox import Outbox
from specdec.core.request import Request, RequestGroup
from tests.new_groups import new_group
from tests.specdec.world import World


def _group(world: World, samples: int) -> RequestGroup:
    llm = LLM(world.folder / "target", draft=None, kv_cache_memory=1 << 22)
    return new_group(llm, [3, 4], SamplingParams(max_tokens=8, n=samples, ignore_eos=True))


def _take(request: Request, *tokens: int) -> None:
    for token in tokens:
        request.append(token, False)


def test_news_wait_for_the_interval_but_for_the_first_token_and_the_end(world: World) -> None:
    group = _group(world, samples=2)
    first, second = group.requests
    outbox = Outbox(7, group, interval=0.5)
    outbox.mark(first)
    # News without a token start no interval.
    assert outbox.is_due(0.0)
    assert [delta.token_ids for delta in outbox.take(0.0)] == [[]]
    _take(first, 5)
    outbox.mark(first)
    assert outbox.is_due(0.0)
    assert [delta.token_ids for delta in outbox.take(10.2)] == [[5]]
    _take(first, 6)
    outbox.mark(first)
    _take(second, 8, 9)
    outbox.mark(second)
    assert not outbox.is_due(10.4)
    _take(first, 7)
    outbox.mark(first)
    assert outbox.is_due(10.5)
    assert [(delta.sample_index, delta.token_ids) for delta in outbox.take(10.5)] == [(0, [6, 7]), (1, [8, 9])]
    for request in group.requests:
        _take(request, *range(3, 3 + request.num_remaining))
        outbox.mark(request)
        assert outbox.is_due(10.6) == group.finished
    assert [delta.finish_reason for delta in outbox.take(10.6)] == ["length", "length"]
