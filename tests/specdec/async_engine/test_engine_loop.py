"""The engine process's loop, run in a thread of the test: steps that fail, a front end that does not read."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq

from specdec import LLM
from specdec.async_engine import engine_loop
from specdec.async_engine.engine_loop import MOST_FAILURES, EngineLoop
from specdec.async_engine.messages import Call, Replies, decode_from_engine, encode
from specdec.cache.block_moves import BlockMove
from specdec.cache.kv_cache import KVCache
from specdec.core.commands import CheckIntegrity, Delta, GetStats, Integrity, News, Refused, Stats
from specdec.engine.engine import LLMEngine
from specdec.execution.executor import Executor
from specdec.execution.model_runner import ModelRunner
from specdec.parallel.ranks import RankDeadError
from tests.specdec.async_engine.loop_peer import WAIT_MS, Peer, add, call
from tests.specdec.async_engine.served import ENDLESS, SETTINGS, SHORT
from tests.specdec.world import World

pytestmark = pytest.mark.slow

LONG = replace(SHORT, max_tokens=200)


@pytest.fixture(scope="module")
def llm(world: World) -> LLM:
    return LLM(world.folder / "target", world.folder / "head", **{**SETTINGS, "max_num_seqs": 2})


@pytest.fixture(autouse=True, params=[False, True], ids=["cpu", "device"])
def works_beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether news go out as beside a device."""
    monkeypatch.setattr(LLMEngine, "works_beside", property(lambda _: request.param))
    return bool(request.param)


@pytest.fixture
def peer(llm: LLM) -> Iterator[Peer]:
    peer = Peer(llm)
    yield peer
    peer.close()
    assert not llm.engine.has_unfinished
    assert llm.stats().kv_usage == 0


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_news_go_out_while_a_device_computes_the_next_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, works_beside: bool
) -> None:
    """On a CPU a step is over when it is launched, so they go out behind it; the last ones are never held."""
    events: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def work(*args: Any) -> Any:
            events.append(name)
            return real(*args)

        return work

    def sent(data: bytes) -> bytes:
        message = decode_from_engine(data)
        if isinstance(message, Replies):
            events.extend("news" for reply in message.replies if isinstance(reply.reply(), News))
        return data

    monkeypatch.setattr(Executor, "step", noted("launch", Executor.step))
    monkeypatch.setattr(Executor, "collect", noted("read", Executor.collect))
    monkeypatch.setattr(engine_loop, "encode", lambda message: sent(encode(message)))
    peer = Peer(llm, most_messages=1000)
    peer.send(add(1, [3, 4], replace(SHORT, max_tokens=20)))
    tokens = tokens_of(peer.ended(1)[1])
    peer.close()
    assert len(tokens) == 20
    steps = "".join({"launch": "l", "news": "n", "read": "r"}[event] for event in events)
    assert re.fullmatch("lr(lnr)+n" if works_beside else "(lrn)+", steps), steps


@pytest.mark.long
def test_a_front_end_that_does_not_read_gets_merged_news(llm: LLM, peer: Peer) -> None:
    expected = llm.generate([3, 4], LONG, use_tqdm=False)[0]
    done = llm.engine.scheduler._stats.finished
    peer.send(add(1, [3, 4], LONG))
    while llm.engine.scheduler._stats.finished == done:
        # Only the connection's own queues are filled.
        peer.thread.join(0.01)
        assert len(peer.loop._unsent) <= 1
    deltas = peer.ended(1)[1]
    assert tokens_of(deltas) == expected.token_ids
    assert "".join(piece.text for delta in deltas for piece in delta.segments) == expected.text
    assert deltas[-1].stats.tokens == expected.stats.tokens
    # Two queues of one message, and what was merged behind them.
    assert len(deltas) <= 5


@pytest.mark.parametrize("phase", ["before", "after"])
def test_a_failed_step_ends_its_own_requests(llm: LLM, peer: Peer, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """Of three requests two have a seat. Their third step together fails in the pass, or after its tokens are taken."""
    expected = llm.generate([5], SHORT, use_tqdm=False)[0].token_ids
    steps = [0]

    def fail_in_third_step(real: Any) -> Any:
        def work(*args: Any) -> Any:
            rows = next(arg for arg in args if isinstance(arg, list))
            steps[0] += len(rows) == 2
            if len(rows) == 2 and steps[0] == 3:
                raise RuntimeError("out of memory\nand more")
            return real(*args)

        return work

    if phase == "before":
        monkeypatch.setattr(ModelRunner, "prepare", fail_in_third_step(ModelRunner.prepare))
    else:
        scheduler = llm.engine.scheduler
        monkeypatch.setattr(scheduler, "update", fail_in_third_step(scheduler.update))
    peer.send(add(1, [3, 4], LONG), add(2, [3, 4, 5], LONG), add(3, [5]))
    deltas = peer.ended(1, 2, 3)
    for number in (1, 2):
        last = deltas[number][-1]
        assert (last.finish_reason, last.error) == ("error", "the step failed: out of memory")
        assert 0 < len(tokens_of(deltas[number])) < 200
    assert tokens_of(deltas[3]) == expected
    peer.send(call(9, CheckIntegrity()))
    assert peer.receive() == (9, Integrity(None, 0, 0))


def test_steps_that_fail_again_and_again_end_the_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(ModelRunner, "prepare", fail)
    peer = Peer(llm)
    for number in range(MOST_FAILURES - 1):
        peer.send(add(number, [3]))
        assert peer.ended(number)[number][-1].error == "the step failed: device lost"
    peer.send(add(9, [3]))
    peer.thread.join(WAIT_MS / 1000)
    assert str(peer.error) == "device lost"
    peer.context.destroy(linger=0)
    for request in list(llm.engine.scheduler.queues):
        llm.engine.scheduler.abort(request)


def test_a_failure_before_blocks_were_moved_ends_all_that_hold_blocks(
    llm: LLM, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed step admits a request whose prompt of whole blocks is cached, and copies its last block for it."""
    expected = llm.generate([3, 4], SHORT, use_tqdm=False)[0].token_ids
    cached = list(range(3, 3 + 2 * llm.engine.scheduler.manager.block_size))
    llm.generate(cached, SHORT, use_tqdm=False)
    real = KVCache.apply_moves

    def fail(cache: KVCache, moves: Sequence[BlockMove]) -> None:
        if moves:
            raise RuntimeError("no room for a copy")
        real(cache, moves)

    monkeypatch.setattr(KVCache, "apply_moves", fail)
    peer.send(add(1, [3, 4, 5], ENDLESS))
    assert peer.receive()[0] == 1
    peer.send(add(2, cached, ENDLESS), add(3, [3, 4]))
    for number, last in peer.ended(1, 2, 3).items():
        if number != 3:
            error = "a step failed while cache blocks were moved: no room for a copy; send it again"
            assert (last[-1].finish_reason, last[-1].error) == ("error", error)
        else:
            assert tokens_of(last) == expected
    peer.send(call(9, CheckIntegrity()))
    assert peer.receive() == (9, Integrity(None, 0, 0))


def test_an_idle_engine_notices_that_a_worker_is_gone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise RankDeadError("rank 1 of 2 has ended")

    monkeypatch.setattr(engine_loop, "_IDLE_MS", 10)
    monkeypatch.setattr(llm.engine.ranks, "check", gone)
    peer = Peer(llm)
    peer.thread.join(WAIT_MS / 1000)
    assert str(peer.error) == "rank 1 of 2 has ended"
    peer.context.destroy(linger=0)


def test_a_new_request_joins_at_the_next_step(llm: LLM) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()
    with context, context.socket(zmq.DEALER) as near, context.socket(zmq.DEALER) as far:
        near.bind("inproc://engine")
        far.connect("inproc://engine")
        loop = EngineLoop(llm.engine, far)
        for number in (1, 2):
            near.send(encode(add(number, [3, 4 + number], LONG)))
            loop._receive()
            loop._step()
        assert [reply.number for reply in loop._take_news()] == [1, 2]
        for number in (1, 2):
            loop._cancel(number)
        loop._take_news()
        assert (loop._outboxes, loop._owners) == ({}, {})


def test_malformed_messages_are_survived(llm: LLM, peer: Peer) -> None:
    expected = llm.generate([3, 4], SHORT, use_tqdm=False)[0].token_ids
    for data in (b"", b"\xc1", encode(3), encode(["Call", 1]), encode(["Nothing"]), encode(["Call", "x", 3])):
        peer.socket.send(data)
    peer.cancel(77)
    peer.send(add(1, [3, 4]))
    hot, cold = ({"temperature": value} for value in ("hot", -1.0))
    adds = [{"prompt": [3], "params": hot}, {"prompt": [3], "params": cold}, {"prompt": [3], "params": 5}, {}]
    bad = [*(["Add", add] for add in adds), ["Nothing", {}], 3]
    peer.send(*(Call(2 + index, msgspec.Raw(encode(command))) for index, command in enumerate(bad)))
    refused: dict[int, str] = {}
    tokens: list[int] = []
    finished = False
    while not finished or len(refused) < len(bad):
        match peer.receive():
            case number, Refused(reason):
                assert "\n" not in reason
                refused[number] = reason
            case 1, News(deltas):
                tokens += tokens_of(deltas)
                finished = finished or any(delta.finish_reason is not None for delta in deltas)
    assert tokens == expected
    assert "temperature is -1.0" in refused[3]
    assert sorted(refused) == [2, 3, 4, 5, 6, 7]


def test_stop_aborts_and_delivers(llm: LLM) -> None:
    peer = Peer(llm)
    peer.send(add(1, [3], LONG), add(2, [4], LONG), add(3, [5], LONG), call(4, GetStats()))
    while peer.receive()[0] != 4:
        pass
    peer.stop()
    assert {found[-1].finish_reason for found in peer.ended(1, 2, 3).values()} == {"abort"}
    peer.thread.join(WAIT_MS / 1000)
    assert not peer.thread.is_alive()
    peer.context.destroy(linger=0)


def test_a_request_for_which_the_queue_is_too_short_leaves_nothing(world: World) -> None:
    """Samples of one prompt wait as one request, and are refused together."""
    llm = LLM(world.folder / "target", draft=None, **{**SETTINGS, "max_queued_requests": 2, "max_num_seqs": 1})
    peer = Peer(llm)
    several = replace(LONG, n=3)
    peer.send(add(1, [3], several), add(2, [4], several), add(3, [5], several), call(4, GetStats()))
    refused, stats = {}, None
    while stats is None:
        match peer.receive():
            case number, Refused(_, kind):
                refused[number] = kind
            case 4, Stats(stats):
                pass
    assert refused == {3: "queue_full"}
    assert (stats.queued, stats.aborted) == (6, 0)
    # The last states of an aborted request are taken, or the loop does not end.
    peer.stop()
    peer.ended(1, 2)
    peer.thread.join(WAIT_MS / 1000)
    assert not peer.thread.is_alive()
    peer.context.destroy(linger=0)
