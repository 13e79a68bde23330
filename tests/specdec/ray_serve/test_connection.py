"""The front end of replicas, with calls in this process instead of Ray's."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from specdec import LLM, EngineDeadError, LoRARequest, QueueFullError, RequestOutput, SamplingParams
from specdec.async_engine.async_llm import AsyncLLM
from specdec.core.commands import Done, EngineReply, Integrity, Refused, Stats, Unloaded
from specdec.core.engine_stats import DraftOutlook, EngineStats
from specdec.ray_serve.connection import MOST_ATTEMPTS
from specdec.ray_serve.engine_replica import EngineReplica
from specdec.ray_serve.replicas import Route
from specdec.ray_serve.replicated_llm import ReplicatedLLM
from tests.lora_adapters import save_adapter, save_draft_adapter
from tests.specdec.async_engine.served import ENDLESS, SETTINGS, SHORT, assert_idle, states_of
from tests.specdec.ray_serve.scripted import Script, run_limited, token
from tests.specdec.tiny_checkpoints import Tiny

pytestmark = pytest.mark.slow


class OneReplica:
    """Calls of one replica in this process."""

    def __init__(self, replica: EngineReplica) -> None:
        self.replica = replica

    async def start(self) -> None:
        await self.replica.check_health()

    async def generate(self, name: str, command: bytes, route: Route) -> AsyncIterator[bytes]:
        route.replica = "A"
        async with aclosing(self.replica.generate(name, command)) as parts:
            async for part in parts:
                yield part

    async def abort(self, name: str, route: Route) -> None:
        assert route.only == "A"
        await self.replica.abort(name)

    async def ask(self, command: bytes) -> Sequence[bytes]:
        return [await self.replica.ask(command)]

    async def close(self) -> None:
        await self.replica.close()


@pytest.mark.long
def test_one_replica_with_an_engine_process(tiny: Tiny, tmp_path: Path) -> None:
    """All in one test, which starts one process."""
    arguments: Any = (tiny.target, tiny.head)
    own: Any = {**SETTINGS, "enable_lora": True}
    target = LlamaForCausalLM.from_pretrained(tiny.target, dtype="float64")
    draft = str(save_draft_adapter(tmp_path / "draft", tiny.head))
    adapter = LoRARequest("a", 1, str(save_adapter(tmp_path / "adapter", target)), draft)
    offline = LLM(*arguments, **own)
    prompts = [[3 + index, 4, 5] * 12 for index in range(6)]

    async def run() -> None:
        async with ReplicatedLLM(OneReplica(EngineReplica(*arguments, own, 60.0)), *arguments, **own) as llm:
            assert llm.healthy
            assert llm.engine_pid is None
            found = await asyncio.gather(*(states_of(llm, prompt, SHORT) for prompt in prompts))
            expected = offline.generate(prompts, SHORT)
            assert [states[-1].token_ids for states in found] == [output.token_ids for output in expected]
            assert (await llm.stats()).generated_tokens == 6 * 12

            with pytest.raises(ValueError, match="x: no such folder"):
                await llm.add_lora(replace(adapter, lora_path=str(tmp_path / "x")))
            await llm.add_lora(adapter)
            states = await states_of(llm, prompts[0], SHORT, lora_request=adapter)
            (adapted,) = offline.generate([prompts[0]], SHORT, lora_request=adapter)
            assert states[-1].token_ids == adapted.token_ids != expected[0].token_ids
            assert (await llm.stats()).adapters == {"a": offline.stats().adapters["a"]}
            assert [await llm.remove_lora(1) for _ in range(2)] == [True, False]

            with pytest.raises(ValueError, match="prompt"):
                await states_of(llm, [], SHORT)

            # Ended by its name: the last state has what came before.
            async with aclosing(llm.generate(prompts[0], ENDLESS, request_id="x")) as states:
                first = await anext(states)
                assert await llm.abort("x")
                *_, last = [state async for state in states]
            assert (last.finish_reason, last.token_ids[:1]) == ("abort", first.token_ids[:1])
            # Ended by leaving.
            async with aclosing(llm.generate(prompts[0], ENDLESS)) as states:
                await anext(states)
            await assert_idle(llm)
        assert not llm.healthy
        with pytest.raises(EngineDeadError, match="closed"):
            await states_of(llm, prompts[0], SHORT)

    run_limited(run)


GONE = RuntimeError("The actor died.")
ONE = SamplingParams(max_tokens=2, detokenize=False)


@pytest.fixture
def scripted(tiny: Tiny) -> Callable[..., Any]:
    def run(script: Script, use: Callable[[AsyncLLM], Any]) -> Any:
        async def inside() -> Any:
            async with ReplicatedLLM(script, tiny.target, None, **SETTINGS) as llm:
                return await use(llm)

        return run_limited(inside)

    return run


def one_request(llm: AsyncLLM) -> Any:
    return states_of(llm, [3, 4], ONE)


def test_a_replica_that_fails_before_the_first_token_is_replaced(scripted: Callable[..., Any]) -> None:
    script = Script([GONE], [token(None), token("length")])
    states: list[RequestOutput] = scripted(script, one_request)
    assert states[-1].token_ids == [7, 7]
    assert script.tried == [set(), {"r1"}]


def test_a_replica_that_fails_after_it_ends_the_request(scripted: Callable[..., Any]) -> None:
    script = Script([token(None), GONE], [token("length")])
    with pytest.raises(EngineDeadError, match=r"^replica r1 failed: The actor died; try again$") as error:
        scripted(script, one_request)
    assert error.value.restarting
    assert len(script.tried) == 1


def test_a_request_does_not_try_for_ever(scripted: Callable[..., Any]) -> None:
    script = Script(*[[GONE]] * 9)
    with pytest.raises(EngineDeadError, match=f"replica r{MOST_ATTEMPTS} failed"):
        scripted(script, one_request)


def test_an_answer_without_an_end(scripted: Callable[..., Any]) -> None:
    with pytest.raises(EngineDeadError, match="replica r1 ended the answer too early"):
        scripted(Script([token(None)]), one_request)


def test_a_call_that_ray_cancels(scripted: Callable[..., Any]) -> None:
    script = Script([asyncio.CancelledError()], [token(None), token("length")])
    states: list[RequestOutput] = scripted(script, one_request)
    assert states[-1].token_ids == [7, 7]


def test_the_failure_of_one_request_is_its_own(scripted: Callable[..., Any]) -> None:
    async def two(llm: AsyncLLM) -> Any:
        return await asyncio.gather(one_request(llm), one_request(llm), return_exceptions=True)

    failed, fine = scripted(Script([token(None), GONE], [token(None), token("length")]), two)
    assert isinstance(failed, EngineDeadError)
    assert fine[-1].token_ids == [7, 7]


def test_the_cause_of_a_remote_error_is_shown(scripted: Callable[..., Any]) -> None:
    remote = RuntimeError("ray::ServeReplica.generate()\nTraceback")
    remote.cause = EngineDeadError("the engine process died (exit code -9)")  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="exit code -9"):
        scripted(Script([token(None), remote]), one_request)


def test_a_full_queue(scripted: Callable[..., Any]) -> None:
    script = Script([Refused("100 requests wait", "queue_full")])
    with pytest.raises(QueueFullError, match="100 requests wait"):
        scripted(script, one_request)


@pytest.mark.parametrize("calls", [[None], [token(None), None]])
def test_abort(scripted: Callable[..., Any], calls: list[Any]) -> None:
    """Of a request that waits for a replica, and of one that a replica has."""
    script = Script(calls)

    async def use(llm: AsyncLLM) -> Any:
        reading = asyncio.ensure_future(states_of(llm, [3, 4], ONE, request_id="x"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert await llm.abort("x")
        await asyncio.sleep(0.01)
        if not script.aborted:
            return (await reading)[-1].finish_reason
        reading.cancel()
        return "asked"

    assert scripted(script, use) == ("asked" if len(calls) > 1 else "abort")
    assert script.aborted == (["r1"] if len(calls) > 1 else [])


def test_an_adapter_that_a_replica_does_not_load_is_refused(scripted: Callable[..., Any]) -> None:
    adapter = LoRARequest("a", 1, "/a")

    def load(*answers: EngineReply) -> None:
        scripted(Script(answers=answers), lambda llm: llm.add_lora(adapter))

    fine = Done()
    load(fine, fine)
    with pytest.raises(ValueError, match="no such folder"):
        load(fine, Refused("/a: no such folder", "wrong"))
    with pytest.raises(QueueFullError, match="other adapters"):
        load(Refused("running requests have max_loras 1 other adapters", "queue_full"), fine)

    class Gone(Script):
        async def ask(self, command: bytes) -> Sequence[bytes]:  # noqa: ARG002
            raise GONE

    with pytest.raises(QueueFullError, match=r"a replica did not answer: The actor died; try again"):
        scripted(Gone(), lambda llm: llm.add_lora(adapter))
    answers = [Unloaded(False), Unloaded(True)]
    assert scripted(Script(answers=answers), lambda llm: llm.remove_lora(1))


def test_figures_of_all_replicas(scripted: Callable[..., Any]) -> None:
    outlook = DraftOutlook(True, 1.5, 2.5)
    parts = [
        EngineStats(running=1, kv_usage=0.5, trees_by_accepted={0: 1, 2: 3}),
        EngineStats(running=2, kv_usage=0.0, trees_by_accepted={2: 1}, outlook=outlook),
    ]
    total = scripted(Script(answers=[Stats(part) for part in parts]), lambda llm: llm.stats())
    expected = EngineStats(running=3, kv_usage=0.25, trees_by_accepted={0: 1, 2: 4}, outlook=outlook)
    assert total == expected
    assert scripted(Script(), lambda llm: llm.stats()) == EngineStats()


def test_figures_do_not_fall_to_nothing_where_a_replica_does_not_answer(scripted: Callable[..., Any]) -> None:
    class Silent(Script):
        async def ask(self, command: bytes) -> Sequence[bytes]:  # noqa: ARG002
            raise ConnectionError("the actor is gone")

    with pytest.raises(QueueFullError, match=r"a replica did not answer: .*the actor is gone"):
        scripted(Silent(), lambda llm: llm.stats())


def test_integrity_of_all_replicas(scripted: Callable[..., Any]) -> None:
    fine, wrong = Integrity(None, 1, 2), Integrity("a block is lost", 0, 1)
    assert scripted(Script(answers=[fine, fine]), lambda llm: llm.check_integrity()) == (2, 4)
    with pytest.raises(AssertionError, match="a block is lost"):
        scripted(Script(answers=[fine, wrong]), lambda llm: llm.check_integrity())


def test_hashes_are_those_of_the_engine(tiny: Tiny) -> None:
    """So that a prefix is one replica's exactly where its cache can hold it; and no replica gets another head."""
    seen: list[Sequence[bytes]] = []

    class Spy(Script):
        async def generate(self, name: str, command: bytes, route: Route) -> AsyncIterator[bytes]:
            seen.append(route.blocks)
            async for part in super().generate(name, command, route):
                yield part

    async def run() -> None:
        spy = Spy(*[[token(None), token("length")]] * 6)
        async with ReplicatedLLM(spy, tiny.target, None, **SETTINGS) as llm:
            with pytest.raises(ValueError, match="replicas cannot replace their head; deploy the application anew"):
                await llm.update_draft(tiny.head)
            for prompt, salt in (([5] * 32, None), ([5] * 33, None), ([5] * 33, "s")):
                await states_of(llm, prompt, ONE, cache_salt=salt)
            for adapter in (LoRARequest("a", 1, "/a"), LoRARequest("a", 1, "/a", "/d"), LoRARequest("a", 1, "/a")):
                await states_of(llm, [5] * 33, ONE, lora_request=adapter)

    run_limited(run)
    with pytest.raises(ValueError, match="collect_drafts is ring; one engine writes there; use no replicas"):
        ReplicatedLLM(Script(), tiny.target, None, **{**SETTINGS, "collect_drafts": "ring"})
    assert [len(each) for each in seen] == [1, *[2] * 5]
    assert seen[1][0] == seen[0][0] != seen[2][0]
    # Prefixes are routed within an adapter, that of the draft model included.
    assert len({each[0] for each in seen}) == 4
    assert seen[5] == seen[3] != seen[4]
