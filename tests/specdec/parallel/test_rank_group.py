"""Operations between ranks, none of which waits for ever for a rank that is there and does not take part."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import SamplingParams
from specdec.engine import ranks
from specdec.engine.follower import Follower
from specdec.engine.followers import Followers
from specdec.execution.executor import ExecutorDeadError
from specdec.models.rank_group import RankGroup, file_store
from tests.specdec.parallel.ranked_engine import PROMPT, engine
from tests.specdec.world import World

# Seconds after which an operation of these tests gives up.
TIMEOUT = 0.5


def send(group: RankGroup, x: Tensor) -> None:
    group.send(x, 1)
    group.flush()


OPERATIONS: dict[str, Callable[[RankGroup, Tensor], Any]] = {
    "all_reduce": RankGroup.all_reduce,
    "all_gather": RankGroup.all_gather,
    "receive": lambda group, x: group.receive(x, 1),
    "send": send,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_ends_by_its_timeout(tmp_path: Path, operation: str) -> None:
    """The other rank has joined, and lives."""
    file = str(tmp_path / "store")
    with ThreadPoolExecutor(2) as threads:
        cpu = torch.device("cpu")
        joined = [threads.submit(RankGroup, rank, 2, file_store(file), cpu, TIMEOUT) for rank in range(2)]
        group, other = (one.result() for one in joined)
    start = time.monotonic()
    # So large that it is not on its way before the other rank asks for it.
    with pytest.raises(RuntimeError, match=r"Timed out|timeout"):
        OPERATIONS[operation](group, torch.zeros(1 << 20))
    assert TIMEOUT / 2 < time.monotonic() - start < 20
    assert other.size == 2


@pytest.mark.parametrize("settings", [{"ranks": 2}, {"pipeline_parallel_size": 2}], ids=["tensor", "stages"])
def test_a_rank_that_is_stuck_ends_the_engine(
    world: World, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """It gives signs of life, and takes part in no step."""
    monkeypatch.setattr("specdec.models.rank_layout.STAGE_PATIENCE", 1)
    monkeypatch.setattr(ranks, "Followers", lambda config: Followers(config, 2 * TIMEOUT))
    with engine(world, "none", **settings) as llm:
        monkeypatch.setattr(Follower, "_follow", lambda *_: time.sleep(6 * TIMEOUT))
        start = time.monotonic()
        with pytest.raises(ExecutorDeadError, match=r"rank 0 of 2 could not go on: .*; the engine must"):
            # Several steps: the rank takes the first one up as before.
            llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() - start < 20
