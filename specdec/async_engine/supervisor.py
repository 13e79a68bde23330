"""Keeps an engine process running: start, restart with growing delays, end of a process that hangs."""

import asyncio
import logging

import msgspec

from specdec.async_engine.engine_process import EngineProcess
from specdec.async_engine.errors import CLOSED, EngineDeadError
from specdec.async_engine.exchange import Exchange
from specdec.async_engine.messages import (
    Call,
    Cancel,
    Failed,
    FromEngine,
    Heartbeat,
    Log,
    Ready,
    Replies,
    Setup,
    encode_command,
)
from specdec.core.commands import AnyCommand, Stop
from specdec.kernels.types.settings import one_line

# Restarts one after another, and seconds before the first of them; each further one waits twice as long.
MOST_RESTARTS = 5
FIRST_DELAY = 0.25
# Seconds of service after which a failure counts as the first one again.
STEADY = 60.0
# Seconds for the running step and the last messages when the process is asked to end.
STOP_TIMEOUT = 5.0
# Number of a call whose reply is dropped.
_NO_CALL = -1
# Looks at the process within the time after which it counts as hung.
NUM_LOOKS = 8

logger = logging.getLogger(__name__)


class Supervisor:
    """One engine process after another.

    Args:
        exchange: takes replies of the process, and its death.
        timeout: seconds without a message of a process that owes replies, after which it is killed; 0 for no limit.

    Attributes:
        healthy: whether a process is ready.
        num_restarts: how often a process was started after one that had been ready.
    """

    def __init__(self, setup: Setup, exchange: Exchange, timeout: float) -> None:
        self._setup, self._exchange, self._timeout = setup, exchange, timeout
        self._is_silent = False
        self.healthy = False
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._closing = False
        self._error = EngineDeadError("the engine is not started; use 'async with AsyncLLM(...)', or await start()")
        self._failure: Failed | None = None
        self._ready_at: float | None = None
        # Restarts one after another, without a time of service between them.
        self._num_attempts = 0
        self.num_restarts = 0
        self._has_failed = asyncio.Event()

    async def start(self) -> None:
        """Start the process and wait until it is ready. Cancelling ends it.

        Raises:
            ValueError: a setting or a file that it refuses.
            EngineDeadError: it failed for another reason, or is closed.
        """
        if self._closing:
            raise self._error.fresh()
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._started))
        try:
            await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the engine process, None if there is none."""
        return None if self._process is None else self._process.pid

    def check(self) -> None:
        """Check that requests are taken, or will be soon, once started.

        Raises:
            EngineDeadError: the process failed too often, or is closed.
        """
        if self._closing or self._task is None or self._task.done():
            raise self._error.fresh()

    def send(self, number: int, command: AnyCommand) -> None:
        """Send a command without waiting.

        Raises:
            EngineDeadError: no process is ready.
        """
        if not self.healthy or self._process is None:
            raise self._error.fresh()
        self._process.send(Call(number, msgspec.Raw(encode_command(command))))

    def cancel(self, number: int) -> None:
        """End a call, if a process is ready; one that is ending ends all."""
        if self.healthy and self._process is not None:
            self._process.send(Cancel(number))

    def use_draft(self, draft: str | None) -> None:
        """Start further processes with other draft sources."""
        self._setup = self._setup._replace(draft=draft)

    async def failure(self) -> EngineDeadError:
        """Wait until no process will be started again, and return why."""
        await self._has_failed.wait()
        return self._error.fresh()

    async def close(self) -> None:
        """End the process; it sends the last states of aborted requests."""
        self._closing = True
        self._error = EngineDeadError(CLOSED)
        if self._task is None:
            return
        if self.healthy and self._process is not None:
            self.healthy = False
            self._process.send(Call(_NO_CALL, msgspec.Raw(encode_command(Stop()))))
            await asyncio.wait([self._task], timeout=STOP_TIMEOUT)
        # Cancelling kills the process.
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self, started: "asyncio.Future[None]") -> None:
        try:
            await self._keep_running(started)
        except Exception as error:
            # A mistake of ours, or a machine without room for another process.
            self._die(EngineDeadError(f"the engine process cannot be started: {one_line(error)}"))
        finally:
            if not self._closing:
                self._has_failed.set()
            if not started.done():
                started.set_exception(self._error.fresh())
            # A cancelled `start` does not look at it.
            started.exception()

    async def _keep_running(self, started: "asyncio.Future[None]") -> None:
        while True:
            code = await self._run_once()
            if self._closing:
                return
            reason = self._failure.reason if self._failure else f"exit code {code}"
            if not started.done():
                started.set_exception(self._start_error(reason))
                return
            if self._ready_at is not None and asyncio.get_running_loop().time() - self._ready_at > STEADY:
                self._num_attempts = 0
            again = self._num_attempts < MOST_RESTARTS
            remedy = "it is being restarted, try again soon" if again else "it failed too often, start the program anew"
            self._die(EngineDeadError(f"the engine process died ({reason}); {remedy}", restarting=again))
            if not again:
                return
            await asyncio.sleep(FIRST_DELAY * 2**self._num_attempts)
            self._num_attempts += 1
            self.num_restarts += 1

    async def _run_once(self) -> int:
        """Run a process to its end, and return its exit code."""
        self._failure, self._ready_at = None, None
        self._process = EngineProcess(self._setup)
        watch = asyncio.create_task(self._watch(self._process))
        try:
            return await self._process.run(self._receive)
        finally:
            watch.cancel()
            self.healthy = False
            self._process = None

    async def _watch(self, process: EngineProcess) -> None:
        """Kill the process once it hangs: it is ready and awaited, and sends nothing.

        Looks are counted rather than seconds, because this process may have been stopped itself.
        """
        num_silent = 0
        while self._timeout:
            self._is_silent = True
            await asyncio.sleep(self._timeout / NUM_LOOKS)
            num_silent = num_silent + 1 if self._is_silent and self.healthy and self._exchange else 0
            if num_silent == NUM_LOOKS:
                self._failure = Failed(f"no sign of life for {self._timeout:g} seconds", is_refusal=False)
                process.kill()
                return

    def _die(self, error: EngineDeadError) -> None:
        logger.error("%s", error)
        self._error = error
        self._exchange.fail_all(error)

    def _start_error(self, reason: str) -> Exception:
        if self._failure is not None and self._failure.is_refusal:
            return ValueError(reason)
        return EngineDeadError(f"the engine process did not start ({reason})")

    def _receive(self, message: FromEngine) -> None:
        self._is_silent = False
        match message:
            case Heartbeat():
                pass
            case Ready():
                self.healthy = True
                self._ready_at = asyncio.get_running_loop().time()
                if self._started is not None and not self._started.done():
                    self._started.set_result(None)
            case Failed():
                self._failure = message
            case Log(name, level, text):
                logging.getLogger(name).log(level, "engine process: %s", text)
            case Replies(replies):
                for reply in replies:
                    self._exchange.receive(reply)
            case _:
                raise TypeError(f"no message of an engine process: {message!r:.60}")
