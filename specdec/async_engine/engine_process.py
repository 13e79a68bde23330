"""A started engine process and the connection to it, as the front end sees them."""

import asyncio
import logging
import os
import pickle
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryDirectory

import zmq
import zmq.asyncio

from specdec.async_engine.messages import MOST_MESSAGES, FromEngine, Setup, ToEngine, decode_from_engine, encode
from specdec.core.started_module import start_module

logger = logging.getLogger(__name__)

# How long the last messages of a process that has ended may be on their way.
_DRAIN_MS = 50


class EngineProcess:
    """One engine process, from start to end. It belongs to the running event loop.

    It has its own session, so that Ctrl-C in a terminal reaches the front end alone. It ends when the front end's
    process ends, however that happens: its standard input ends then.
    """

    def __init__(self, setup: Setup) -> None:
        self._folder = TemporaryDirectory(prefix="specdec-")
        path = f"{self._folder.name}/engine"
        if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            self._folder.cleanup()
            raise ValueError(f"{path} is too long for a socket; set TMPDIR to a shorter folder")
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm, self._socket.rcvhwm, self._socket.linger = 0, MOST_MESSAGES, 0
        address = f"ipc://{path}"
        self._socket.bind(address)
        loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = loop.create_future()
        try:
            self._popen = start_module("specdec.async_engine.worker", address, stdin=subprocess.PIPE, cwd=setup.folder)
        except OSError:
            self._close_connection()
            raise
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            pickle.dump(setup, self._popen.stdin)
            self._popen.stdin.flush()
        threading.Thread(target=self._wait, args=(loop,), daemon=True).start()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._popen.wait()
        # The loop may be closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._note_exit, code)

    def _note_exit(self, code: int) -> None:
        if not self._exited.done():
            self._exited.set_result(code)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, message: ToEngine) -> None:
        """Send a message without waiting."""
        self._socket.send(encode(message))

    async def run(self, handle: Callable[[FromEngine], None]) -> int:
        """Hand over messages until the process has ended, and return its exit code. Cancelling kills it."""
        reader = asyncio.create_task(self._read(handle))
        try:
            await asyncio.wait([self._exited])
            reader.cancel()
            await asyncio.wait([reader])
            while await self._socket.poll(_DRAIN_MS):
                _deliver(await self._socket.recv(), handle)
            return self._exited.result()
        finally:
            reader.cancel()
            self._close()

    async def _read(self, handle: Callable[[FromEngine], None]) -> None:
        while True:
            _deliver(await self._socket.recv(), handle)
            # The next message may be there already; those who wait for this one come first.
            await asyncio.sleep(0)

    def kill(self) -> None:
        """End the process at once."""
        self._popen.kill()

    def _close(self) -> None:
        self._popen.kill()
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._close_connection()

    def _close_connection(self) -> None:
        self._context.destroy(linger=0)
        self._folder.cleanup()


def _deliver(data: bytes, handle: Callable[[FromEngine], None]) -> None:
    """Pass a message to `handle`. An error is logged, so that later messages are still handled."""
    try:
        handle(decode_from_engine(data))
    except Exception:
        logger.exception("a message of the engine process was ignored")
