"""The end of an engine, and calls from several threads until then."""

import gc
import threading
import weakref
from typing import Any

import pytest

from specdec import LLM, BeamSearchParams, SamplingParams
from tests.specdec.tiny_checkpoints import Tiny

LONG = SamplingParams(temperature=0, max_tokens=10_000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CLOSED = "^this LLM is closed; make another$"


def small(tiny: Tiny, **settings: Any) -> LLM:
    return LLM(tiny.target, dtype="float64", adaptive_drafts=False, prefill_stretch=0, **settings)


@pytest.mark.long
def test_a_with_block_gives_the_model_up(tiny: Tiny) -> None:
    with small(tiny) as llm:
        assert len(llm.generate("ab", SHORT)[0].token_ids) == 4
        model, engine = weakref.ref(llm.model), weakref.ref(llm.engine)
    gc.collect()
    assert (model(), engine()) == (None, None)
    calls: list[Any] = [
        lambda: llm.generate("ab", SHORT),
        lambda: next(llm.stream("ab", SHORT)),
        lambda: llm.chat([{"role": "user", "content": "a"}], SHORT),
        lambda: llm.beam_search("ab", BeamSearchParams(2, 2)),
        llm.stats,
        llm.get_metrics,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=CLOSED):
            call()
    llm.close()


def test_calls_of_other_threads_end_with_the_engine(tiny: Tiny) -> None:
    llm = small(tiny)
    begun, closed, errors = threading.Barrier(4), threading.Event(), []

    def work() -> None:
        states = llm.stream("ab", LONG)
        next(states)
        begun.wait(120)
        closed.wait(120)
        try:
            list(states)
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(120)
    llm.close()
    closed.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == ["this LLM is closed; make another"] * 3


def test_threads_share_steps(tiny: Tiny) -> None:
    """A lock of one step at a time: the calls of four threads run together, not one behind the other."""
    with small(tiny) as llm:
        want = llm.generate("ab", SHORT)[0].token_ids
        most = 0
        barrier = threading.Barrier(4)
        plain_step = llm.engine.step

        def step() -> Any:
            nonlocal most
            news = plain_step()
            most = max(most, len(news))
            return news

        llm.engine.step = step  # type: ignore[method-assign]
        found: list[Any] = []

        def work() -> None:
            states = llm.stream("ab", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
            next(states)
            barrier.wait(120)
            found.append(list(states)[-1].token_ids)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(found) == 4
        assert all(tokens[:4] == want for tokens in found)
        assert most == 4
