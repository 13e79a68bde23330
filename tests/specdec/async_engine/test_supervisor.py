"""The supervisor over processes that live and die as the test says."""

import asyncio
from collections.abc import Callable

import pytest

from specdec.async_engine import supervisor as module
from specdec.async_engine.errors import EngineDeadError
from specdec.async_engine.exchange import Exchange, PendingReplies
from specdec.async_engine.messages import Call, Failed, FromEngine, Heartbeat, Ready, Setup, ToEngine, decode_command
from specdec.async_engine.supervisor import MOST_RESTARTS, Supervisor
from specdec.core.commands import GetStats, Stop

pytestmark = pytest.mark.slow

SETUP = Setup(None, None, {}, ".", 30)


class FakeProcess:
    """Sends the messages of its life, then dies when told to."""

    # One list of messages per process, in the order of their starts.
    lives: list[list[FromEngine]]
    started: list["FakeProcess"]

    def __init__(self, _: Setup) -> None:
        self.life = self.lives[min(len(self.started), len(self.lives) - 1)]
        self.pid = len(self.started)
        self.started.append(self)
        self.sent: list[ToEngine] = []
        self.died = asyncio.Event()
        self.killed = False

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, Call) and isinstance(decode_command(message.command), Stop):
            self.died.set()

    def kill(self) -> None:
        self.died.set()

    async def run(self, handle: Callable[[FromEngine], None]) -> int:
        self.handle = handle
        try:
            for message in self.life:
                handle(message)
            if any(isinstance(message, Ready) for message in self.life):
                await self.died.wait()
            return -9
        finally:
            self.killed = True


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> type[FakeProcess]:
    FakeProcess.started, FakeProcess.lives = [], [[Ready()]]
    monkeypatch.setattr(module, "EngineProcess", FakeProcess)
    monkeypatch.setattr(module, "FIRST_DELAY", 0.001)
    return FakeProcess


class Deaths(Exchange):
    """An exchange that only notes why its calls end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[EngineDeadError] = []

    def fail_all(self, error: EngineDeadError) -> None:
        self.seen.append(error)


def make(timeout: float = 0) -> tuple[Supervisor, list[EngineDeadError]]:
    exchange = Deaths()
    return Supervisor(SETUP, exchange, timeout), exchange.seen


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_process_that_always_dies_is_restarted_so_many_times(processes: type[FakeProcess]) -> None:
    async def work() -> None:
        supervisor, deaths = make()
        await supervisor.start()
        for life in range(MOST_RESTARTS + 1):
            await _until(lambda count=life + 1: len(processes.started) == count and supervisor.healthy)  # type: ignore[misc]
            processes.started[-1].died.set()
            await _until(lambda: not supervisor.healthy)
        await _until(lambda: len(deaths) == MOST_RESTARTS + 1)
        assert [death.restarting for death in deaths] == [True] * MOST_RESTARTS + [False]
        assert str(deaths[0]) == "the engine process died (exit code -9); it is being restarted, try again soon"
        with pytest.raises(EngineDeadError, match="it failed too often, start the program anew"):
            supervisor.send(1, GetStats())
        await asyncio.sleep(0.05)
        assert len(processes.started) == MOST_RESTARTS + 1
        await supervisor.close()

    asyncio.run(work())


def test_restarts_that_fail_while_loading_count_too(processes: type[FakeProcess]) -> None:
    """However long the first process had served."""
    processes.lives = [[Ready()], [Failed("no memory", False)]]

    async def work() -> None:
        supervisor, deaths = make()
        await supervisor.start()
        assert supervisor._ready_at is not None
        supervisor._ready_at -= 2 * module.STEADY
        processes.started[0].died.set()
        await _until(lambda: len(deaths) == MOST_RESTARTS + 1)
        assert "(no memory)" in str(deaths[-1])
        assert not deaths[-1].restarting
        await supervisor.close()

    asyncio.run(work())


def test_steady_service_forgives_earlier_deaths(processes: type[FakeProcess]) -> None:
    async def work() -> None:
        supervisor, deaths = make()
        await supervisor.start()
        for life in range(3 * MOST_RESTARTS):
            await _until(lambda count=life + 1: len(processes.started) == count and supervisor.healthy)  # type: ignore[misc]
            assert supervisor._ready_at is not None
            supervisor._ready_at -= 2 * module.STEADY
            processes.started[-1].died.set()
            await _until(lambda count=life + 1: len(deaths) == count)  # type: ignore[misc]
        assert all(death.restarting for death in deaths)
        await supervisor.close()

    asyncio.run(work())


@pytest.mark.parametrize("is_refusal", [True, False])
def test_a_first_start_that_fails_is_not_tried_again(processes: type[FakeProcess], is_refusal: bool) -> None:
    processes.lives = [[Failed("block_size is 9", is_refusal)]]

    async def work() -> None:
        supervisor, deaths = make()
        error, text = (
            (ValueError, "^block_size is 9$")
            if is_refusal
            else (EngineDeadError, r"^the engine process did not start \(block_size is 9\)$")
        )
        with pytest.raises(error, match=text):
            await supervisor.start()
        assert (len(processes.started), len(deaths), supervisor.healthy) == (1, 0, False)
        await supervisor.close()

    asyncio.run(work())


def test_a_process_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch, processes: type[FakeProcess]) -> None:
    """At the first start, and at a restart: then nothing is tried again."""

    async def work() -> None:
        supervisor, deaths = make()
        await supervisor.start()

        def refuse(_: Setup) -> None:
            raise OSError("too many processes")

        monkeypatch.setattr(module, "EngineProcess", refuse)
        processes.started[0].died.set()
        await _until(lambda: len(deaths) == 2)
        assert str(deaths[1]) == "the engine process cannot be started: too many processes"
        again, _ = make()
        with pytest.raises(EngineDeadError, match="cannot be started: too many processes"):
            await again.start()

    asyncio.run(work())


def test_cancelling_the_start_ends_the_process(processes: type[FakeProcess]) -> None:
    async def work() -> None:
        supervisor, _ = make()
        loading = asyncio.Event()
        FakeProcess.run = lambda self, _: _load(self, loading)  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(supervisor.start())
        await _until(lambda: len(processes.started) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert loading.is_set()

    async def _load(_: FakeProcess, cancelled: asyncio.Event) -> int:
        try:
            await asyncio.sleep(20)
        finally:
            cancelled.set()
        return 0

    real = FakeProcess.run
    try:
        asyncio.run(work())
    finally:
        FakeProcess.run = real  # type: ignore[method-assign]


def test_close_asks_first_and_is_final(processes: type[FakeProcess]) -> None:
    async def work() -> None:
        supervisor, deaths = make()
        await supervisor.start()
        await supervisor.close()
        await supervisor.close()
        (message,) = processes.started[0].sent
        assert isinstance(message, Call)
        assert decode_command(message.command) == Stop()
        assert (len(processes.started), deaths, supervisor.healthy) == (1, [], False)
        with pytest.raises(EngineDeadError, match="the engine is closed"):
            await supervisor.start()

    asyncio.run(work())


def test_a_silent_process_that_is_awaited_is_killed(processes: type[FakeProcess]) -> None:
    """Neither one that is idle, nor one that sends anything."""

    async def work() -> None:
        exchange = Deaths()
        supervisor, deaths = Supervisor(SETUP, exchange, 2.0), exchange.seen
        await supervisor.start()
        process = processes.started[0]
        # Much longer than a loaded machine lets an event loop wait between two heartbeats.
        await asyncio.sleep(2.5)
        exchange.open(PendingReplies())
        for _ in range(125):
            process.handle(Heartbeat())
            await asyncio.sleep(0.02)
        assert not deaths
        await _until(lambda: len(deaths) == 1)
        assert str(deaths[0]).startswith("the engine process died (no sign of life for 2 seconds); it is being restart")
        await _until(lambda: supervisor.healthy)
        await supervisor.close()

    asyncio.run(work())
