"""Requests on their way over a prefill replica to a decode replica, with calls in this process instead of Ray's."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, RequestOutput, SamplingParams
from specdec.async_engine.async_llm import AsyncLLM
from specdec.async_engine.messages import decode_command, encode
from specdec.async_engine.outbox import Outbox
from specdec.building.resolved_config import resolved_config
from specdec.building.vllm_keywords import LLMKeywords
from specdec.core.commands import Add, Delta, LoadAdapter, News, Refused
from specdec.core.outputs import SpeculationStats
from specdec.ray_serve import remote_prefill
from specdec.ray_serve.remote_prefill import RemotePrefill
from specdec.ray_serve.replicas import Route
from specdec.ray_serve.replicated_llm import ReplicatedLLM, _check_split
from tests.specdec.async_engine.served import states_of
from tests.specdec.kv_transfer.engines import DRAWN, GREEDY, PROMPT, SIZE, WHOLE, disk, engine, flush, run
from tests.specdec.ray_serve.scripted import Script, run_limited, sent, token
from tests.specdec.world import World

ONE = SamplingParams(max_tokens=2, detokenize=False)
Use = Callable[[AsyncLLM], Any]


class EngineHere:
    """Calls of an engine of this process, one after another.

    Attributes:
        requests: those that were run, as they came.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.requests = llm, list[Add]()

    async def start(self) -> None:
        pass

    async def generate(self, name: str, command: bytes, route: Route) -> AsyncIterator[bytes]:  # noqa: ARG002
        add, llm = decode_command(command), self.llm
        assert isinstance(add, Add)
        self.requests.append(add)
        route.replica = "A"
        group = llm.engine.handle(add)
        outbox = Outbox(99, group, add.interval)
        while not group.finished:
            for each in llm.engine.step():
                outbox.mark(each)
        flush(llm)
        yield encode([sent(News(outbox.take(time.monotonic())))])

    async def abort(self, name: str, route: Route) -> None:
        raise AssertionError((name, route))

    async def ask(self, command: bytes) -> Sequence[bytes]:
        asked = decode_command(command)
        assert isinstance(asked, LoadAdapter)
        return [encode(sent(self.llm.engine.handle(asked)))]

    async def close(self) -> None:
        pass


def served(world: World, replicas: Any, prefill: RemotePrefill, use: Use) -> Any:
    """What a front end of these replicas gives."""
    settings: LLMKeywords = {"dtype": "float64", "block_size": SIZE, "max_model_len": 128, "enable_lora": True}

    async def inside() -> Any:
        async with ReplicatedLLM(replicas, world.folder / "target", None, prefill=prefill, **settings) as llm:
            return await use(llm)

    return run_limited(inside)


@pytest.mark.long
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_request_passes_through_both(world: World, tmp_path: Path, params: SamplingParams) -> None:
    with engine(world, "eagle3", None) as llm:
        alone = run(llm, [PROMPT], params)

    async def three(llm: AsyncLLM) -> list[RequestOutput]:
        prompts = [PROMPT, PROMPT[: SIZE - 1], PROMPT]
        salts = [None, None, "salt"]
        return [
            (await states_of(llm, prompt, params, cache_salt=salt))[-1]
            for prompt, salt in zip(prompts, salts, strict=True)
        ]

    with (
        engine(world, "eagle3", disk(tmp_path), role="prefill") as first,
        engine(world, "eagle3", disk(tmp_path), role="decode") as second,
    ):
        prefill, decode = EngineHere(first), EngineHere(second)
        outputs = served(world, decode, RemotePrefill(prefill), three)
        stats = second.stats()
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids == alone.tokens[0]
    # Whoever asked sees nothing of the other engine: no token of it, and its work does not count as cached.
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [14, 14, 14]
    assert stats.external_prefix_hits == 2 * WHOLE
    # The prompt without a whole block was not sent.
    assert [(add.prompt, add.cache_salt) for add in prefill.requests] == [(PROMPT, None), (PROMPT, "salt")]
    assert [add.params.max_tokens for add in prefill.requests] == [1, 1]
    given = decode.requests[0].params
    assert (given.temperature, given.seed, given.max_tokens) == (params.temperature, params.seed, params.max_tokens)


@pytest.mark.long
def test_a_request_has_its_adapter_in_both(world: World, tmp_path: Path) -> None:
    """Both have it loaded, and the decode replica finds the blocks that the adapted target has made."""
    adapters, own = [world.adapter(number) for number in (1, 2)], {"enable_lora": True, "max_lora_rank": 17}
    assert adapters[0] is not None

    async def all_of(llm: AsyncLLM) -> list[int]:
        await llm.add_lora(adapters[0])
        outputs = [(await states_of(llm, PROMPT, GREEDY, lora_request=each))[-1] for each in adapters]
        return [output.token_ids for output in outputs]

    with (
        engine(world, "none", disk(tmp_path), role="prefill", **own) as first,
        engine(world, "none", disk(tmp_path), role="decode", **own) as second,
        engine(world, "none", None, **own) as third,
    ):
        prefill = EngineHere(first)
        found = served(world, EngineHere(second), RemotePrefill(prefill), all_of)
        expected = third.generate([PROMPT] * 2, GREEDY, lora_request=adapters, use_tqdm=False)
        assert found == [output.token_ids for output in expected]
        assert second.stats().external_prefix_hits == 2 * WHOLE
        assert first.list_loras() == adapters


@pytest.mark.long
def test_tokens_that_were_cached_before_are_shown(world: World, tmp_path: Path) -> None:
    async def twice(llm: AsyncLLM) -> list[int | None]:
        return [(await states_of(llm, PROMPT, GREEDY))[-1].num_cached_tokens for _ in range(2)]

    with (
        engine(world, "eagle3", disk(tmp_path), role="prefill") as first,
        engine(world, "eagle3", disk(tmp_path), role="decode") as second,
    ):
        prefill = RemotePrefill(EngineHere(first))
        assert served(world, EngineHere(second), prefill, twice) == [0, WHOLE]


def test_prompts_that_are_scored_are_not_sent(world: World) -> None:
    prefill = Script()
    params = replace(ONE, prompt_logprobs=1)
    served(world, _answering(1), RemotePrefill(prefill), lambda llm: states_of(llm, PROMPT, params))
    assert prefill.tried == []


FAILURES: dict[str, Sequence[Any]] = {
    "dies": [RuntimeError("The actor died.")],
    "is cancelled by Ray": [asyncio.CancelledError()],
    "refuses": [Refused("100 requests wait", "queue_full")],
    "fails": [News([Delta(0, [], [], [], "", SpeculationStats(), [], "error", None, "no token")])],
    "says nothing": [],
    "hangs": [token(None), None],
}


@pytest.mark.parametrize("failure", FAILURES)
def test_whatever_fails_is_left_to_the_decode_replica(
    world: World, failure: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prefill, "PATIENCE", 0.05)
    prefill, decode = Script(FAILURES[failure]), _answering(1)
    remote = RemotePrefill(prefill)
    states = served(world, decode, remote, lambda llm: states_of(llm, PROMPT, ONE))
    assert states[-1].token_ids == [7, 7]
    assert (len(prefill.tried), len(decode.tried)) == (1, 1)
    assert ("its decode replica computes the prompt" in caplog.text) == (failure not in ("fails", "says nothing"))


def test_few_requests_wait_when_no_replica_takes_calls(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for a replica ends in time; then none is made for a while."""
    monkeypatch.setattr(remote_prefill, "PATIENCE", 0.05)
    prefill, decode = Script([None], [None]), _answering(3)

    async def three(llm: AsyncLLM) -> None:
        for _ in range(3):
            await states_of(llm, PROMPT, ONE)

    served(world, decode, RemotePrefill(prefill), three)
    assert (len(prefill.tried), len(decode.tried)) == (1, 3)


def test_one_request_finds_out_whether_there_is_a_replica_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "PAUSE", 0.0)
    monkeypatch.setattr(remote_prefill, "PATIENCE", 0.05)
    prefill, decode = Script([None], [None], [token("length")], [token("length")]), _answering(5)

    async def five(llm: AsyncLLM) -> None:
        await states_of(llm, PROMPT, ONE)
        await asyncio.gather(*(states_of(llm, PROMPT, ONE) for _ in range(2)))
        assert len(prefill.tried) == 2
        # The first of these two finds one, and the other asks it too.
        for _ in range(2):
            await states_of(llm, PROMPT, ONE)

    served(world, decode, RemotePrefill(prefill), five)
    assert (len(prefill.tried), len(decode.tried)) == (4, 5)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_that_ends_early_ends_there_too(world: World, leaves: bool) -> None:
    """By `abort`, and by leaving."""
    ended = asyncio.Event()

    class Hanging(Script):
        async def generate(self, name: str, command: bytes, route: Route) -> AsyncIterator[bytes]:  # noqa: ARG002
            route.replica = "P"
            try:
                await asyncio.Event().wait()
                yield b""
            finally:
                ended.set()

    async def use(llm: AsyncLLM) -> str | None:
        async with aclosing(llm.generate(PROMPT, ONE, request_id="x")) as states:
            reading = asyncio.ensure_future(anext(states))
            for _ in range(20):
                await asyncio.sleep(0)
            if leaves:
                reading.cancel()
                await asyncio.wait([reading])
                await ended.wait()
                return None
            await llm.abort("x")
            reason = (await reading).finish_reason
            await ended.wait()
            return reason

    decode = Script()
    assert served(world, decode, RemotePrefill(Hanging()), use) == (None if leaves else "abort")
    assert decode.tried == []


def _answering(count: int) -> Script:
    return Script(*[[token(None), token("length")]] * count)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "role is 'decode'; it needs a kv_transfer_config with a store that engines share"),
        ({"role": "prefill", "folder": "/dev/shm/x"}, "role is 'prefill' and there are prefill replicas"),
        ({"folder": "/dev/shm/x", "kv_role": "kv_producer"}, "role is 'decode' and kv_transfer_config has kv_role"),
        ({"folder": "x"}, "root_dir x is relative, and replicas run in other folders"),
    ],
)
def test_replicas_that_cannot_share_are_refused(settings: dict[str, Any], message: str) -> None:
    config = None
    if "folder" in settings:
        config = {**disk(Path(settings["folder"])), "kv_role": settings.get("kv_role", "kv_both")}
    own: dict[str, Any] = {name: value for name, value in settings.items() if name == "role"}
    with pytest.raises(ValueError, match=message):
        _check_split(resolved_config(None, None, {"kv_transfer_config": config, **own}))
