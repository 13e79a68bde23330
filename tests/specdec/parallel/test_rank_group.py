"""Operations between ranks, none of which waits for ever for a rank that is there and does not take part."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import LLM, SamplingParams
from specdec.building.ranks import ranks_of
from specdec.engine.engine import LLMEngine
from specdec.parallel import first_rank
from specdec.parallel.rank_group import RankGroup, file_store
from specdec.parallel.rank_link import MOST_MISSED
from specdec.parallel.ranks import BEAT, MOST_IDLE, RankDeadError
from tests.specdec.parallel.ranked_engine import PROMPT, engine
from tests.specdec.world import World

pytestmark = pytest.mark.slow

# Seconds after which an operation of these tests gives up, on ever slower machines.
TIMEOUTS = (0.5, 2.0, 8.0, 32.0)


def send(group: RankGroup, x: Tensor) -> None:
    group.send(x, 1)
    group.flush()


OPERATIONS: dict[str, Callable[[RankGroup, Tensor], Any]] = {
    "all_reduce": RankGroup.all_reduce,
    "all_gather": RankGroup.all_gather,
    "receive": lambda group, x: group.receive(x, 1),
    "send": send,
}


def joined(folder: Path) -> Iterator[tuple[float, list[RankGroup]]]:
    """Yield two ranks that have found each other, and their timeout; joining ends by it too on a loaded machine."""
    for timeout in TIMEOUTS:
        store = str(folder / f"store-{timeout}")
        with ThreadPoolExecutor(2) as threads:
            ranks = [
                threads.submit(RankGroup, rank, 2, file_store(store), torch.device("cpu"), timeout) for rank in range(2)
            ]
        if all(rank.exception() is None for rank in ranks):
            yield timeout, [rank.result() for rank in ranks]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_ends_by_its_timeout(tmp_path: Path, operation: str) -> None:
    """The other rank has joined, and lives."""
    timeout, (group, other) = next(joined(tmp_path))
    start = time.monotonic()
    # So large that it is not on its way before the other rank asks for it.
    with pytest.raises(RuntimeError, match=r"Timed out|timeout"):
        OPERATIONS[operation](group, torch.zeros(1 << 20))
    assert time.monotonic() - start > timeout / 2
    assert other.size == 2


def test_a_rank_that_takes_part_in_no_step_ends_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives signs of life. Users wait 10 seconds for that, not this test's time."""
    assert first_rank.COLLECTIVE_TIMEOUT + first_rank._LAST_WORDS < 10
    assert MOST_MISSED * BEAT + first_rank._LAST_WORDS < 10
    released = threading.Event()
    with ExitStack() as stack:
        llm = next(started(world, stack, monkeypatch, {"ranks": 2}))
        stack.callback(released.set)
        act, first = LLMEngine.act, llm.engine

        def stuck(self: LLMEngine, command: Any) -> Any:
            return act(self, command) if self is first else released.wait(600)

        monkeypatch.setattr(LLMEngine, "act", stuck)
        with pytest.raises(RankDeadError, match=r"rank 0 of 2 could not go on: .*; the engine must"):
            # Several steps: the rank takes the first one up as before.
            llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert not released.is_set()


HANGING = """
import os, sys, threading
from specdec.engine.engine import LLMEngine

act = LLMEngine.act

def hang(self, command):
    if "specdec.building.rank_process" in " ".join(sys.orig_argv) and os.path.exists({mark!r}):
        threading.Event().wait()
    return act(self, command)

LLMEngine.act = hang
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_rank_that_hangs_ends_the_engine_soon(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """Stages wait for each other for minutes, for they may be at work as long; a rank that is not says so."""
    assert (MOST_IDLE + 1) * BEAT + first_rank._LAST_WORDS < 10
    mark = tmp_path / "hangs"
    (tmp_path / "hanging.py").write_text(HANGING.format(mark=str(mark)))
    monkeypatch.syspath_prepend(tmp_path)
    # Of the processes that it starts.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("specdec.llm.ranks_of", lambda config: ranks_of(config, 600.0))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    # The plug-in replaces it in this process too.
    monkeypatch.setattr(LLMEngine, "act", LLMEngine.act)
    with LLM(world.folder / "target", None, plugins=["hanging"], threads=1, **{size: 2}) as llm:
        llm.generate([PROMPT], params, use_tqdm=False)
        mark.touch()
        with pytest.raises(RankDeadError, match=r"^rank 1 of 2 hangs: it has done nothing for 7 seconds; the engine"):
            llm.generate([PROMPT], params, use_tqdm=False)


def started(world: World, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> Iterator[LLM]:
    """Yield an engine whose ranks have found each other within their timeout."""
    for timeout in TIMEOUTS:
        monkeypatch.setattr("specdec.llm.ranks_of", lambda config, seconds=2 * timeout: ranks_of(config, seconds))
        with suppress(RankDeadError):
            yield stack.enter_context(engine(world, "none", **settings))
