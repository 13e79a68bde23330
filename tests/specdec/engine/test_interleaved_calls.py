"""Several calls at once on one engine: each gets every state of its own requests, and the tokens it gets alone."""

import gc
import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specdec import LLM, BeamSearchParams, DraftShape, RequestOutput, SamplingParams
from specdec.cache.block_moves import BlockMove
from specdec.cache.kv_cache import KVCache
from specdec.core.commands import Search
from specdec.core.request import Request, RequestGroup
from specdec.engine.engine import LLMEngine
from tests.fakes import save_random_head, save_random_llama

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12]]
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("calls")
    save_random_llama(folder / "target")
    save_random_head(folder / "head")
    return LLM(folder / "target", folder / "head", dtype="float64", shape=DraftShape(3, 2, 6), max_model_len=64)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    """The tokens of each prompt when nothing else runs."""
    return [llm.generate(prompt, PARAMS)[0].token_ids for prompt in PROMPTS]


def assert_complete(states: Iterable[RequestOutput], tokens: list[int]) -> None:
    """The states of one request: each has more tokens than the one before, and the last one is final."""
    states = list(states)
    for before, after in itertools.pairwise(states):
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert len(after.token_ids) > len(before.token_ids)
    assert [state.finished for state in states] == [False] * (len(states) - 1) + [True]
    assert states[-1].token_ids == tokens


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.has_unfinished
    assert llm.stats().kv_usage == 0


@pytest.mark.long
def test_generate_inside_a_stream(llm: LLM, alone: list[list[int]]) -> None:
    undisturbed = [state.token_ids for state in llm.stream(PROMPTS[0], PARAMS)]
    states = []
    for state in llm.stream(PROMPTS[0], PARAMS):
        states.append(state)
        if len(states) <= 2:
            assert llm.generate(PROMPTS[1], PARAMS)[0].token_ids == alone[1]
    assert_complete(states, alone[0])
    # Every step's state is there, although most steps were taken by the inner calls.
    assert len(states) >= len(undisturbed) - 1
    assert_idle(llm)


def test_two_streams_in_turns(llm: LLM, alone: list[list[int]]) -> None:
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS[:2]]
    pairs = list(itertools.zip_longest(*streams))
    for states, tokens in zip(zip(*pairs, strict=True), alone, strict=False):
        assert_complete([state for state in states if state is not None], tokens)
    assert_idle(llm)


def test_samples_of_one_prompt_beside_another_call(llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, n=3)
    expected = [one.token_ids for one in llm.generate(PROMPTS[0], params)[0].outputs]
    stream = llm.stream(PROMPTS[0], params)
    next(stream)
    llm.generate(PROMPTS[1], PARAMS)
    *_, last = stream
    assert [one.token_ids for one in last.outputs] == expected
    assert last.finished


@pytest.mark.long
def test_text_of_every_state_is_new_once() -> None:
    llm = LLM(draft=None, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    stream = llm.stream("I would like", params)
    states = [next(stream)]
    llm.generate("Hello", params)
    states += stream
    assert "".join(piece.text for state in states for piece in state.segments) == states[-1].text


@pytest.mark.parametrize("samples", [1, 3])
def test_four_threads(llm: LLM, alone: list[list[int]], samples: int) -> None:
    found: dict[int, list[list[RequestOutput]]] = {index: [] for index in range(len(PROMPTS))}

    def work(index: int) -> None:
        for _ in range(samples):
            found[index].append(list(llm.stream(PROMPTS[index], PARAMS)))

    threads = [threading.Thread(target=work, args=(index,)) for index in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, runs in found.items():
        assert len(runs) == samples
        for states in runs:
            assert_complete(states, alone[index])
    assert_idle(llm)


def test_beam_search_within_a_stream(llm: LLM, alone: list[list[int]]) -> None:
    (expected,) = llm.beam_search(PROMPTS[1], BEAMS)
    stream = llm.stream(PROMPTS[0], PARAMS)
    states = [next(stream)]
    (found,) = llm.beam_search(PROMPTS[1], BEAMS)
    assert_complete([*states, *stream], alone[0])
    assert [one.tokens for one in found.sequences] == [one.tokens for one in expected.sequences]
    assert_idle(llm)


def test_beam_search_in_a_thread_beside_others(llm: LLM, alone: list[list[int]]) -> None:
    (expected,) = llm.beam_search(PROMPTS[1], BEAMS)
    found, tokens = [], []
    threads = [
        threading.Thread(target=lambda: found.extend(llm.beam_search(PROMPTS[1], BEAMS))),
        threading.Thread(target=lambda: tokens.extend(llm.generate(PROMPTS, PARAMS, use_tqdm=False))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.tokens for one in found[0].sequences] == [one.tokens for one in expected.sequences]
    assert [len(one.logprobs) for one in found[0].sequences] == [len(one.logprobs) for one in expected.sequences]
    assert [one.token_ids for one in tokens] == alone
    assert_idle(llm)


def test_an_exception_in_one_call_leaves_the_other_alone(llm: LLM, alone: list[list[int]]) -> None:
    def fail_after_one_state() -> None:
        for _ in llm.stream(PROMPTS[1], PARAMS):
            raise RuntimeError("of the caller's own")

    stream = llm.stream(PROMPTS[0], PARAMS)
    states = [next(stream)]
    with pytest.raises(RuntimeError, match="of the caller's own"):
        fail_after_one_state()
    assert_complete([*states, *stream], alone[0])
    assert_idle(llm)


@pytest.mark.parametrize("fails_after", [False, True])
def test_a_failed_step_of_one_call_costs_no_other_its_states(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch, fails_after: bool
) -> None:
    """A step may fail before it did anything, or after requests have their tokens and before it could say so."""
    stream = llm.stream(PROMPTS[0], PARAMS)
    states = [next(stream)]
    real = LLMEngine.step

    def step(engine: LLMEngine) -> list[Request]:
        if not fails_after:
            raise KeyboardInterrupt
        while engine.has_unfinished:
            real(engine)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "step", step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], PARAMS)
    assert_complete([*states, *stream], alone[0])
    assert_idle(llm)


def test_calls_whose_blocks_a_failed_step_lost_end_with_its_error(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step fails before it copied a block for another call, whose prompt of whole blocks is cached."""
    prompt = list(range(3, 3 + 2 * llm.engine.scheduler.manager.block_size))
    expected = llm.generate(prompt, PARAMS)[0].token_ids
    real = KVCache.apply_moves
    moved: list[BlockMove] = []

    def fail_once(cache: KVCache, moves: Sequence[BlockMove]) -> None:
        if moves and not moved:
            moved.extend(moves)
            raise RuntimeError("out of memory")
        real(cache, moves)

    stream = llm.stream(PROMPTS[0], PARAMS)
    next(stream)
    with llm._shared.turn() as engine:
        (search,) = engine.handle(Search(llm._adds(PROMPTS[1], replace(PARAMS, logprobs=3)), BEAMS))
    next(stream)
    call = llm._shared.call(llm._adds(prompt, PARAMS), RequestGroup.output)
    monkeypatch.setattr(KVCache, "apply_moves", fail_once)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(stream)
    assert False in [move.is_load for move in moved]
    error = "a step failed while cache blocks were moved: out of memory; send it again"
    *_, last = call.run()
    assert (last.outputs[0].finish_reason, last.outputs[0].error) == ("error", error)
    assert (search.finished, search.error) == (True, error)
    assert_idle(llm)
    assert llm.generate(prompt, PARAMS)[0].token_ids == expected
    assert llm.generate(PROMPTS[0], PARAMS)[0].token_ids == alone[0]


def test_an_abandoned_stream_ends_its_own_requests_alone(llm: LLM, alone: list[list[int]]) -> None:
    kept, dropped = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
    states = [next(kept)]
    next(dropped)
    del dropped
    gc.collect()
    assert len(list(llm.engine.scheduler.queues)) == 1
    assert_complete([*states, *kept], alone[0])
    assert_idle(llm)


def test_a_stream_may_be_abandoned_in_the_middle_of_a_step(
    llm: LLM, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed as by the garbage collector, in the thread that takes the step, which must not wait for itself."""
    dropped = llm.stream(PROMPTS[1], PARAMS)
    next(dropped)
    real = LLMEngine.step

    def step(engine: LLMEngine) -> list[Request]:
        dropped.close()
        return real(engine)

    monkeypatch.setattr(LLMEngine, "step", step)
    assert llm.generate(PROMPTS[0], PARAMS)[0].token_ids == alone[0]
    assert_idle(llm)
