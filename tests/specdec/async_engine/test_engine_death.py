"""Ends of the engine process and of the front end, expected and not."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec import LLM, AsyncLLM, EngineDeadError, RequestOutput
from tests.fakes import edit_json
from tests.profiles import by_day
from tests.specdec.async_engine.served import (
    ENDLESS,
    LIMIT,
    SETTINGS,
    SHORT,
    Served,
    assert_idle,
    is_alive,
    long_world,
    states_of,
)
from tests.specdec.world import World

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, os, signal, sys, time
from specdec import AsyncLLM
from tests.specdec.async_engine.served import ENDLESS, SETTINGS

async def main():
    async with AsyncLLM(sys.argv[1] + "/target", **SETTINGS) as llm:
        async for state in llm.generate([3], ENDLESS):
            if len(state.token_ids) == 1:
                child = os.fork() if sys.argv[2:] else None
                if child == 0:
                    # It holds the pipe to the engine process open.
                    os.setsid()
                    os.close(1)
                    os.close(2)
                    time.sleep(600)
                    os._exit(0)
                print(llm.engine_pid, child, flush=True)

# A shell starts background jobs with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_world(world, tmp_path_factory.mktemp("long"))


class Grace:
    """The time of grace of `close`, which ends when the test says so."""

    SECONDS = 77.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._timeout, self._taken = asyncio.timeout, list[asyncio.Timeout]()
        monkeypatch.setattr(asyncio, "timeout", self._made)

    def _made(self, delay: float | None) -> asyncio.Timeout:
        if delay != self.SECONDS:
            return self._timeout(delay)
        self._taken.append(self._timeout(None))
        return self._taken[-1]

    def end(self) -> None:
        (taken,) = self._taken
        taken.reschedule(asyncio.get_running_loop().time())


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.long
def test_death_under_load_then_service_then_an_end_with_grace(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine for both, since starting one takes seconds."""
    grace = Grace(monkeypatch)
    expected = LLM(folder / "target", folder / "head", **SETTINGS).generate([3, 4], SHORT, use_tqdm=False)[0]

    async def update(llm: AsyncLLM) -> None:
        """The head of the start is no longer there when the process is started again."""
        with pytest.raises(ValueError, match="head3: its kind is Eagle3, not Eagle"):
            await llm.update_draft(folder / "head3")
        running = asyncio.create_task(states_of(llm, [3, 4], SHORT))
        await llm.update_draft(folder / "other-head")
        assert (await running)[-1].token_ids == expected.token_ids
        assert llm.config.draft == folder / "other-head"
        (folder / "head").rename(folder / "old")

    async def die(llm: AsyncLLM) -> None:
        first = llm.engine_pid
        assert first is not None
        running = [llm.generate([3 + index], ENDLESS) for index in range(20)]
        await asyncio.gather(*(anext(stream) for stream in running[:16]))
        waiting = [asyncio.ensure_future(anext(stream)) for stream in running[16:]]
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        for stream in running[:16]:
            with pytest.raises(EngineDeadError, match=r"died \(exit code -9\); it is being restarted") as caught:
                async for _ in stream:
                    pass
            assert caught.value.restarting
        assert not llm.healthy
        for one in asyncio.as_completed(waiting):
            with pytest.raises(EngineDeadError):
                await one
        with pytest.raises(EngineDeadError, match="it is being restarted, try again soon"):
            await states_of(llm, [3], SHORT)
        with pytest.raises(EngineDeadError):
            await llm.stats()
        await _until(lambda: llm.healthy)
        assert llm.engine_pid != first
        assert (await states_of(llm, [3, 4], SHORT))[-1].token_ids == expected.token_ids
        await assert_idle(llm)

    async def close(llm: AsyncLLM) -> None:
        pid = llm.engine_pid
        assert pid is not None
        endless, left = llm.generate([3], ENDLESS), llm.generate([4], ENDLESS)
        await anext(endless)
        await anext(left)
        short = asyncio.create_task(states_of(llm, [3, 4], SHORT))
        await asyncio.sleep(0)
        closing = asyncio.create_task(llm.close(Grace.SECONDS))
        # As systemd does, which sends it to all processes of a service.
        os.kill(pid, signal.SIGTERM)
        # It has finished within the time of grace, in which nothing new is taken.
        states: list[RequestOutput] = await short
        assert states[-1].token_ids == expected.token_ids
        assert not closing.done()
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            await states_of(llm, [3], SHORT)
        await left.aclose()
        grace.end()
        await closing
        rest = [state async for state in endless]
        assert rest[-1].finish_reason == "abort"
        assert 1 < len(rest[-1].token_ids) < 8000
        assert not is_alive(pid)
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            await states_of(llm, [3], SHORT)

    with Served(folder) as served:
        served.run(update(served.llm))
        served.run(die(served.llm))
        (folder / "old").rename(folder / "head")
        served.run(close(served.llm))
    # The log of the process is the program's: of two starts, and of two heads that were to replace the first.
    warnings = [record for record in caplog.records if record.name == "specdec.building.draft_loader"]
    assert (
        sum("engine process: " in record.message and "has 256 positions" in record.message for record in warnings) == 4
    )


@pytest.mark.long
@pytest.mark.parametrize("number", by_day([signal.SIGKILL, signal.SIGINT], 1), ids=["killed", "ctrl-c"])
def test_the_engine_ends_with_the_front_end(
    folder: Path, number: signal.Signals, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ctrl-C reaches all processes of the terminal's foreground group. Nothing is left in the temporary folder."""
    temporary = tmp_path_factory.mktemp("t")
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=Path(__file__).parents[3],
    )
    assert program.stdout is not None
    pid = int(program.stdout.readline().split()[0])
    assert is_alive(pid)
    assert len([*temporary.glob("specdec-*/engine")]) == 1
    os.killpg(program.pid, number)
    _, errors = program.communicate(timeout=LIMIT)
    assert program.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert errors == ""
    asyncio.run(_until(lambda: not is_alive(pid)))
    assert not [*temporary.glob("specdec-*")]


@pytest.mark.long
def test_the_engine_ends_with_a_front_end_whose_child_lives_on(folder: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), "forks"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert program.stdout is not None
    pid, child = map(int, program.stdout.readline().split())
    try:
        program.kill()
        program.communicate(timeout=LIMIT)
        asyncio.run(_until(lambda: not is_alive(pid)))
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.long
def test_a_folder_that_cannot_be_loaded_is_told_in_one_line(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder / "target", tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", intermediate_size=24)
    llm = AsyncLLM(tmp_path, draft=None, **SETTINGS)

    async def work() -> None:
        with pytest.raises(ValueError, match=r"has shape .* config.json says") as caught:
            await llm.start()
        assert "\n" not in str(caught.value)
        assert not llm.healthy
        assert llm.engine_pid is None

    asyncio.run(work())


def test_a_long_temporary_folder_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(EngineDeadError, match="is too long for a socket; set TMPDIR to a shorter folder"):
        asyncio.run(AsyncLLM(folder / "target", draft=None, **SETTINGS).start())
    assert not [*long.iterdir()]


def test_a_working_folder_that_is_gone_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process cannot be started in it; nothing is left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = tmp_path / "gone"
    gone.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(gone)
        llm = AsyncLLM(folder / "target", draft=None, **SETTINGS)
    gone.rmdir()
    with pytest.raises(EngineDeadError, match=r"the engine process cannot be started: .*No such file"):
        asyncio.run(llm.start())
    assert not [*tmp_path.iterdir()]


def test_files_are_checked_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        AsyncLLM(tmp_path / "absent")
    with pytest.raises(ValueError, match="block_size is 9; it must be a multiple of 8"):
        AsyncLLM(block_size=9)
    with pytest.raises(ValueError, match="LLM has no 'block_sizes'; the nearest it has is 'block_size'"):
        AsyncLLM(block_sizes=16)  # type: ignore[call-arg]
