"""Ends of a rank's process, under an engine in a process of its own."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from specdec import LLM, EngineDeadError
from tests.specdec.async_engine.served import ENDLESS, SHORT, Served, is_alive, long_world, states_of
from tests.specdec.kv_transfer.engines import disk
from tests.specdec.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc for the ranks' processes"),
]
PROMPT = [3, 4, 5]


def children(pid: int) -> list[int]:
    """Return the ids of a process's children."""
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


@pytest.mark.long
def test_a_killed_rank_ends_requests_soon_and_the_group_is_restarted(
    world: World, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are those of one process before and after, and no process is left, though blocks were being stored.

    Nor is a folder, where the first rank is killed.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    temporary = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(temporary))
    expected = world_tokens(world)
    connector = disk(tmp_path / "blocks")
    own = {"tensor_parallel_size": 2, "kv_transfer_config": connector, "block_size": 8}
    with Served(long_world(world, tmp_path), **own) as served:
        llm = served.llm

        async def tokens() -> list[int]:
            return list((await states_of(llm, PROMPT, SHORT))[-1].outputs[0].token_ids)

        async def killed() -> None:
            async for state in llm.generate(PROMPT, ENDLESS):
                (rank,) = children(llm.engine_pid or 0)
                if len(state.outputs[0].token_ids) < 32:
                    # The first rank decides when it ends.
                    os.kill(rank, signal.SIGTERM)
                    continue
                os.kill(rank, signal.SIGKILL)
                break
            # By its end, and not by its silence, which would be named.
            with pytest.raises(EngineDeadError, match=r"rank 1 of 2 has ended with exit code -9.* is being restarted"):
                await states_of(llm, PROMPT, ENDLESS)

        async def restarted() -> list[int]:
            while not llm.healthy:
                await asyncio.sleep(0.02)
            return await tokens()

        assert served.run(tokens()) == expected
        served.run(killed())
        assert served.run(restarted()) == expected
        assert llm.engine_pid is not None
        left = [llm.engine_pid, *children(llm.engine_pid)]
        assert len(left) == 2
        (meeting,) = temporary.glob("specdec-ranks-*")
        os.kill(llm.engine_pid, signal.SIGKILL)
    assert {file.parent.parent.name for file in tmp_path.rglob("*.kv")} == {"rank-0-of-2", "rank-1-of-2"}
    end = time.monotonic() + 60
    while any(is_alive(pid) for pid in left) or meeting.exists():
        assert time.monotonic() < end, "a process or its folder is left"
        time.sleep(0.02)


def world_tokens(world: World) -> list[int]:
    """Return what one process says."""
    with LLM(world.folder / "target", None, dtype="float64", prefill_stretch=0, adaptive_drafts=False) as llm:
        return list(llm.generate([PROMPT], SHORT, use_tqdm=False)[0].outputs[0].token_ids)
