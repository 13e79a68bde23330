"""`AsyncLLM` as its users see it: the tokens of `LLM`, beside requests that are wrong, cancelled or not read."""

import asyncio
import itertools
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, AsyncLLM, QueueFullError, RequestOutput, RequestOutputKind, SamplingParams
from specdec.core.commands import Add
from specdec.core.outputs import Logprob, SpeculationStats, TreeTrace
from specdec.engine.request_maker import RequestMaker
from tests.profiles import num_cases
from tests.specdec.async_engine.served import (
    ENDLESS,
    SETTINGS,
    SHORT,
    Served,
    assert_idle,
    long_world,
    states_of,
)
from tests.specdec.drawn_requests import arrivals
from tests.specdec.world import VOCAB, World

pytestmark = pytest.mark.slow

# Seconds between two states; states of the last come with the first token and the end alone.
INTERVALS = (0.0, 0.01, math.inf)
CASES = num_cases(25)


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_world(world, tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Served(folder) as served:
        yield served


@pytest.fixture(scope="module")
def offline(folder: Path) -> LLM:
    return LLM(folder / "target", folder / "head", **SETTINGS)


def _logprobs(found: Any) -> Any:
    """Numbers for a comparison; their last bits depend on the batch."""
    if isinstance(found, float):
        return pytest.approx(found, rel=1e-9)
    if isinstance(found, Logprob):
        return _logprobs(found.logprob), found.rank, found.decoded_token, found.part_bytes
    if isinstance(found, dict):
        return {key: _logprobs(value) for key, value in found.items()}
    return [_logprobs(value) for value in found] if isinstance(found, list) else found


def _scores(output: RequestOutput) -> list[list[float]] | None:
    return None if output.choices is None else [score.logprobs for score in output.choices]


def assert_same(found: RequestOutput, expected: RequestOutput) -> None:
    """Everything but the drafts' share is equal: that depends on the batch."""
    assert found.finished
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.prompt == expected.prompt
    assert found.prompt_logprobs == _logprobs(expected.prompt_logprobs)
    assert _scores(found) == _logprobs(_scores(expected))
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert (one.index, one.token_ids, one.text) == (other.index, other.token_ids, other.text)
        assert (one.finish_reason, one.stop_reason, one.error) == (other.finish_reason, other.stop_reason, other.error)
        assert one.logprobs == _logprobs(other.logprobs)
        assert one.cumulative_logprob == _logprobs(other.cumulative_logprob)
        assert len(one.accepted) == len(one.token_ids)


def assert_grows(states: list[RequestOutput]) -> None:
    """Each state continues the one before, and the new text of all is the text."""
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]
    for before, after in itertools.pairwise(states):
        for one, other in zip(before.outputs, after.outputs, strict=True):
            assert other.token_ids[: len(one.token_ids)] == one.token_ids
    for index, last in enumerate(states[-1].outputs):
        pieces = [piece.text for state in states for piece in state.outputs[index].segments]
        assert "".join(pieces) == last.text


@pytest.mark.long
@settings(max_examples=CASES)
@given(arrivals, st.integers(0, 2**32 - 1))
def test_tokens_are_those_of_llm_whatever_else_runs(served: Served, offline: LLM, cases: list[Any], seed: int) -> None:
    """Each request is there several times: read to its end, left after some states, and aborted."""
    chance = random.Random(seed)
    cases = [case._replace(params=replace(case.params, max_tokens=case.params.max_tokens or 30)) for case in cases]
    expected = [offline.generate(case.prompt, case.params, use_tqdm=False)[0] for case in cases]

    async def leave(case: Any) -> None:
        stream = served.llm.generate(case.prompt, replace(case.params, max_tokens=4000))
        for _ in range(chance.randint(1, 4)):
            if (await anext(stream)).finished:
                break
        await stream.aclose()

    async def abort(case: Any, name: str) -> None:
        params, interval = replace(case.params, max_tokens=4000), chance.choice(INTERVALS)
        async for state in served.llm.generate(case.prompt, params, request_id=name, interval=interval):
            if not state.finished:
                await served.llm.abort(name)

    async def refused() -> None:
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await states_of(served.llm, [VOCAB], SHORT)

    async def work() -> list[list[RequestOutput]]:
        others = [leave(case) for case in cases]
        others += [abort(case, f"name {index}") for index, case in enumerate(cases)]
        others += [refused()]
        read = [states_of(served.llm, case.prompt, case.params, interval=chance.choice(INTERVALS)) for case in cases]
        together = await asyncio.gather(*read, *others)
        await assert_idle(served.llm)
        return together[: len(read)]  # type: ignore[return-value]

    for states, one in zip(served.run(work()), expected, strict=True):
        assert_grows(states)
        assert_same(states[-1], one)


def _without_times(step: TreeTrace) -> TreeTrace:
    return step._replace(values=(), probs=(), seconds=0, plain_seconds=None)


@pytest.mark.long
def test_steps_carry_their_trees(served: Served, offline: LLM) -> None:
    """The same trees as in this process, by either reader: one of each state, and one of the last state alone."""
    params = replace(SHORT, n=2)

    async def work() -> list[RequestOutput]:
        return [state async for state in served.llm.generate([5, 6, 7], params, trace=True)]

    states = served.run(work())
    *_, expected = offline.stream([5, 6, 7], params, trace=True)
    for index, own in enumerate(states[-1].outputs):
        other = expected.outputs[index]
        assert len(own.steps) == len(own.trace) == 1 + own.stats.steps
        assert [step.output for step in own.trace] == [step.output for step in other.trace]
        for step, twin in zip(own.trace, other.trace, strict=True):
            assert _without_times(step) == _without_times(twin)
            assert step.values == pytest.approx(twin.values, rel=1e-6)
            assert step.probs == pytest.approx(twin.probs, rel=1e-6)
        for state in states:
            assert own.steps[: len(state.outputs[index].steps)] == state.outputs[index].steps


@pytest.mark.long
def test_a_hundred_requests_at_once(served: Served, offline: LLM) -> None:
    chance = random.Random(7)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 50))] for _ in range(100)]
    params = [
        SamplingParams(
            temperature=chance.choice([0.0, 0.7, 1.3]),
            top_p=chance.choice([1.0, 0.8]),
            seed=chance.randrange(1 << 40),
            max_tokens=chance.randint(1, 40),
            ignore_eos=chance.random() < 0.5,
        )
        for _ in prompts
    ]

    async def work() -> list[list[RequestOutput]]:
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(
            *(states_of(served.llm, prompt, own, priority=index % 3) for index, (prompt, own) in enumerate(pairs))
        )

    expected = offline.generate(prompts, params, use_tqdm=False)
    for states, one in zip(served.run(work()), expected, strict=True):
        assert_grows(states)
        assert_same(states[-1], one)
    served.run(assert_idle(served.llm))


def test_text_prompts_and_speculation_figures(served: Served, offline: LLM) -> None:
    expected = offline.generate("ab cd", SHORT, use_tqdm=False)[0]
    (*_, last) = served.run(states_of(served.llm, "ab cd", SHORT))
    assert last.prompt == "ab cd"
    assert_same(last, expected)
    # Alone in the engine, so the trees are the same too.
    assert last.stats == expected.stats != SpeculationStats()
    assert last.outputs[0].accepted == expected.outputs[0].accepted
    stats = served.run(served.llm.stats())
    assert stats.drafts_verified >= stats.trees_verified >= max(stats.accepted_per_depth, default=0)
    assert sum(stats.accepted_per_depth) == stats.drafts_accepted


def test_text_that_a_stop_string_may_cut_is_in_the_text_and_in_no_segment(served: Served, folder: Path) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=60, allowed_token_ids=[3, 4], stop="aaaaaaaa")
    # Plain decoding shows the text after every token.
    plain = LLM(folder / "target", draft=None, **SETTINGS)
    texts = {len(state.token_ids): state.text for state in plain.stream([3], params)}
    states = served.run(states_of(served.llm, [3], params))
    assert_grows(states)
    assert len(states) > 10
    given = ""
    held = set()
    for state in states:
        assert state.text == texts[len(state.token_ids)]
        given += "".join(piece.text for piece in state.segments)
        held.add(state.text.removeprefix(given))
    assert {"", "a"} < held


def test_long_text_is_tokenized_beside_the_event_loop(
    served: Served, offline: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.async_engine.async_llm.SHORT_TEXT", 4)
    threads = []
    real = RequestMaker.add

    def add(maker: RequestMaker, *args: Any) -> Add:
        threads.append(threading.current_thread())
        return real(maker, *args)

    monkeypatch.setattr(RequestMaker, "add", add)
    for prompt in ("ab c", "ab cd"):
        assert_same(
            served.run(states_of(served.llm, prompt, SHORT))[-1], offline.generate(prompt, SHORT, use_tqdm=False)[0]
        )
    with pytest.raises(ValueError, match="the prompt is not valid text"):
        served.run(states_of(served.llm, "abcd\ud800", SHORT))
    # Every other call is of `offline`.
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False, True, False]


def test_settings_are_known_without_the_engine(served: Served, offline: LLM) -> None:
    llm = served.llm
    assert llm.config == offline.config
    assert llm.max_model_len == offline.max_model_len
    assert llm.end_tokens == offline.end_tokens
    assert llm.generation_config == offline.generation_config
    assert llm.get_default_sampling_params() == offline.get_default_sampling_params()
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode("ab") == offline.tokenizer.encode("ab")  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="no chat template"):
        llm.chat_prompt([{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("prompt", "params", "more", "message"),
    [
        ([], SHORT, {}, "the prompt is empty"),
        ([VOCAB], SHORT, {}, "outside the vocabulary"),
        ("\ud800", SHORT, {}, "the prompt is not valid text"),
        (b"ab", SHORT, {}, "it must be text or a list of token ids"),
        ([1] * 10_000, SHORT, {}, "10000 tokens > 9999 maximum"),
        ([3], SamplingParams(allowed_token_ids=[VOCAB]), {}, "token ids lie between"),
        ([3], {"temperature": 0}, {}, "it must be SamplingParams"),
        ([3], SHORT, {"priority": 0.5}, "priority is 0.5"),
        ([3], SHORT, {"priority": 1 << 70}, "priority is 1180591620717411303424"),
        ([3], SHORT, {"cache_salt": 3}, "cache_salt is 3"),
        ([3], SHORT, {"request_id": 3}, "request_id is 3"),
    ],
)
def test_a_bad_request_is_refused(served: Served, prompt: Any, params: Any, more: Any, message: str) -> None:
    queued = served.run(served.llm.stats()).queued
    with pytest.raises(ValueError, match=message) as caught:
        served.run(states_of(served.llm, prompt, params, **more))
    assert "\n" not in str(caught.value)
    assert served.run(served.llm.stats()).queued == queued


@pytest.mark.long
def test_refusals_of_the_engine_reach_the_caller(world: World) -> None:
    """A request larger than the cache, one above the queue's limit, and a priority without the policy."""
    with Served(
        world.folder, max_queued_requests=2, max_num_seqs=1, scheduling_policy="fcfs", kv_cache_memory=16 << 12
    ) as served:

        async def work() -> None:
            with pytest.raises(ValueError, match=r"cache blocks of 16.*raise kv_cache_memory"):
                await states_of(served.llm, [3], replace(SHORT, max_tokens=250))
            with pytest.raises(ValueError, match="scheduling_policy 'priority'"):
                await states_of(served.llm, [3], SHORT, priority=1)
            # One seat, and two places in the queue: of two requests with three samples each, both wait.
            several = replace(SHORT, n=3, max_tokens=40)
            waiting = [asyncio.create_task(states_of(served.llm, [3], several)) for _ in range(2)]
            while (await served.llm.stats()).queued < 6:
                assert not any(task.done() for task in waiting)
            with pytest.raises(QueueFullError, match="2 requests wait, as many as may"):
                await states_of(served.llm, [3], SHORT)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert (await states_of(served.llm, [3], SHORT))[-1].finish_reason == "length"
            await assert_idle(served.llm)

        served.run(work())


def test_numbers_of_numpy_travel(served: Served, offline: LLM) -> None:
    params = SamplingParams(
        temperature=np.float64(0.7),
        seed=np.int64(3),  # type: ignore[arg-type]
        max_tokens=np.int32(9),  # type: ignore[arg-type]
        stop_token_ids=np.array([4]),  # type: ignore[arg-type]
        allowed_token_ids={np.int64(4), 5, 6, 7, 8},  # type: ignore[arg-type]
        logit_bias={np.int64(7): np.float32(2.0)},  # type: ignore[dict-item]
    )
    (*_, last) = served.run(states_of(served.llm, np.array([3, 4]), params))
    assert_same(last, offline.generate(np.array([3, 4]), params, use_tqdm=False)[0])  # type: ignore[arg-type]


def test_closing_or_cancelling_frees_everything(served: Served) -> None:
    async def work() -> None:
        aborted = (await served.llm.stats()).aborted
        closed = served.llm.generate([3, 4], ENDLESS)
        await anext(closed)
        task = asyncio.create_task(states_of(served.llm, [5], ENDLESS))
        dropped = served.llm.generate([6], ENDLESS)
        await anext(dropped)
        await closed.aclose()
        task.cancel()
        del dropped
        await assert_idle(served.llm)
        assert (await served.llm.stats()).aborted == aborted + 3

    served.run(work())


def test_abort_by_name(served: Served) -> None:
    async def work() -> None:
        stream = served.llm.generate([3], ENDLESS, request_id="mine")
        first = await anext(stream)
        assert first.request_id == "mine"
        with pytest.raises(ValueError, match="request_id 'mine' is taken by a running request"):
            await states_of(served.llm, [3], SHORT, request_id="mine")
        assert await served.llm.abort("mine")
        rest = [state async for state in stream]
        assert rest[-1].finish_reason == "abort"
        assert len(rest[-1].token_ids) < 8000
        assert not await served.llm.abort("mine")
        # The name is free again, and news of the old request are not taken for the new one's.
        for _ in range(20):
            stream = served.llm.generate([3], ENDLESS, request_id="mine")
            await anext(stream)
            await stream.aclose()
        assert (await states_of(served.llm, [3], SHORT, request_id="mine"))[-1].finish_reason == "length"
        await assert_idle(served.llm)

    served.run(work())


def test_numbers_given_to_requests_pass_over_names_that_are_taken(served: Served) -> None:
    async def work() -> None:
        last = int((await states_of(served.llm, [3], SHORT))[-1].request_id)
        named = served.llm.generate([3], ENDLESS, request_id=str(last + 1))
        await anext(named)
        assert (await states_of(served.llm, [3], SHORT))[-1].request_id == str(last + 2)
        await named.aclose()
        await assert_idle(served.llm)

    served.run(work())


@pytest.mark.long
def test_states_are_merged_for_a_slow_reader(served: Served, offline: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=300, ignore_eos=True, logprobs=0)

    async def work() -> None:
        slow = served.llm.generate([3, 4], params)
        states = [await anext(slow)]
        # It began later and is as long, so the slow one's output is complete when this one ends.
        quick = await states_of(served.llm, [3, 4], params)
        assert len(quick) > 50
        states += [state async for state in slow]
        assert len(states) == 2
        assert_grows(states)
        assert_same(states[-1], offline.generate([3, 4], params, use_tqdm=False)[0])

    served.run(work())


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads processor time from /proc")
@pytest.mark.parametrize("samples", [1, 3])
def test_a_whole_answer_has_a_state_after_its_first_token_and_at_its_end(
    served: Served, offline: LLM, samples: int
) -> None:
    params = replace(SHORT, n=samples, max_tokens=40)
    states = served.run(states_of(served.llm, [3, 4, 5], params, interval=math.inf))
    assert len(states) == 2
    assert any(output.token_ids for output in states[0].outputs)
    assert_grows(states)
    assert_same(states[-1], offline.generate([3, 4, 5], params, use_tqdm=False)[0])


@pytest.mark.long
def test_no_sample_is_shown_before_the_prompt_is_scored(folder: Path) -> None:
    """The second one has its first tokens early, behind a cached prompt; the first one scores it, part by part."""
    prompt, scored = list(range(3, 52)), replace(SHORT, n=2, prompt_logprobs=1)
    with Served(folder, long_prefill_token_threshold=8) as served:
        served.run(states_of(served.llm, prompt, SHORT))
        states = served.run(states_of(served.llm, prompt, scored))
    assert {len(state.prompt_logprobs or ()) for state in states} == {len(prompt)}


def test_an_interval_of_states_is_no_negative_number(served: Served) -> None:
    for interval in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"interval is {interval}; it must be a number of seconds from 0"):
            served.run(states_of(served.llm, [3], SHORT, interval=interval))


def test_kinds_of_output_and_times_of_a_request(served: Served, offline: LLM) -> None:
    expected = offline.generate([5, 6, 7], SHORT)[0]

    async def work(kind: RequestOutputKind) -> list[RequestOutput]:
        return await states_of(served.llm, [5, 6, 7], replace(SHORT, output_kind=kind))

    deltas = served.run(work(RequestOutputKind.DELTA))
    assert [token for state in deltas for token in state.token_ids] == expected.token_ids
    (last,) = served.run(work(RequestOutputKind.FINAL_ONLY))
    assert_same(last, expected)
    times = last.metrics
    assert times is not None
    assert last.num_cached_tokens == 0
    assert 0 < times.queued_ts <= times.scheduled_ts <= times.first_token_ts < times.last_token_ts
    assert times.num_generation_tokens == len(expected.token_ids)


def test_an_idle_engine_sleeps(served: Served) -> None:
    served.run(states_of(served.llm, [3], SHORT))

    def threads() -> dict[str, tuple[bool, int]]:
        """Return of each thread whether it sleeps, and how often it has gone to sleep."""
        found = {}
        for task in Path(f"/proc/{served.llm.engine_pid}/task").iterdir():
            facts = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            found[task.name] = facts["State"].startswith("S"), int(facts["voluntary_ctxt_switches"])
        return found

    async def wakes() -> float:
        """Return how often a second threads wake, once each has been seen asleep."""
        # A thread that spins never sleeps, however little of the machine it gets.
        awake = set(threads())
        async with asyncio.timeout(60):
            while awake:
                awake -= {thread for thread, (sleeps, _) in threads().items() if sleeps}
                await asyncio.sleep(0.01)
        began, before = time.monotonic(), threads()
        await asyncio.sleep(1)
        # On a loaded machine a thread that looks for work again and again wakes less often, and one that waits no more.
        total = sum(count - before.get(thread, (True, count))[1] for thread, (_, count) in threads().items())
        return total / (time.monotonic() - began)

    assert served.run(wakes()) <= 20


@pytest.mark.long
def test_it_is_started_once_and_says_if_it_is_not(folder: Path) -> None:
    llm = AsyncLLM(folder / "target", draft=None, **SETTINGS)
    assert not llm.healthy
    with pytest.raises(RuntimeError, match=r"not started; use 'async with AsyncLLM\(\.\.\.\)', or await start\(\)"):
        asyncio.run(states_of(llm, [3], SHORT))
    asyncio.run(llm.close())
    with pytest.raises(RuntimeError, match="the engine is closed; make a new AsyncLLM"):
        asyncio.run(llm.start())


@pytest.mark.long
def test_missing_packages_are_named_with_the_remedy() -> None:
    code = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("zmq", "msgspec") else real(name, *more)
import specdec
assert specdec.SamplingParams
try:
    specdec.AsyncLLM
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = "AsyncLLM needs pyzmq, msgspec; run: pip install 'specdec[serve]'\n"
    assert (done.stdout, done.stderr) == (expected, "")
