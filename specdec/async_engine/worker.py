"""The engine process: `python -m specdec.async_engine.worker ADDRESS`, with a pickled `Setup` on standard input."""

import logging
import os
import pickle
import select
import shutil
import signal
import sys
import threading
from contextlib import suppress

import zmq

from specdec.async_engine.messages import MOST_MESSAGES, Failed, FromEngine, Log, Ready, Setup, encode
from specdec.core.garbage import loading
from specdec.kernels.types.settings import one_line

# The end of standard input says that the front end's process has ended.
_STDIN = 0
# Seconds between looks whether it is still the parent, whose children may hold that input open.
_LOOK = 1.0
# Time for the last messages on the way out.
_LINGER_MS = 2000


class _LogSender(logging.Handler):
    """Sends log records to the front end's log. Records that the connection does not take now are dropped."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        super().__init__()
        self._socket, self._thread = socket, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record of the thread to which the socket belongs."""
        if threading.get_ident() != self._thread:
            return
        try:
            _send_now(self._socket, Log(record.name, record.levelno, self.format(record)))
        except Exception:
            self.handleError(record)


def _send_now(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    with suppress(zmq.Again):
        socket.send(encode(message), zmq.NOBLOCK)


def _exit_with_front_end(folder: str) -> None:
    """Wait for the front end's end, at which the whole process ends, whatever it is doing.

    Args:
        folder: the connection's folder, which a killed front end leaves behind.
    """
    parent, has_ended = os.getppid(), False
    while not has_ended and os.getppid() == parent:
        readable, _, _ = select.select([_STDIN], [], [], _LOOK)
        has_ended = bool(readable) and not os.read(_STDIN, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def serve(setup: Setup, socket: zmq.Socket[bytes]) -> int:
    """Load the model and serve; return the exit code."""
    # The model's own imports take seconds, and errors in them are told as well.
    is_loaded = False
    try:
        with loading():
            from specdec.async_engine.engine_loop import EngineLoop
            from specdec.llm import LLM

            llm = LLM(setup.model, setup.draft, **setup.settings)
        is_loaded = True
        _send_now(socket, Ready())
        EngineLoop(llm.engine, socket).run()
        llm.close()
    except Exception as error:
        logging.getLogger(__name__).debug("the engine process fails", exc_info=True)
        # ValueError and OSError are mistakes in settings and files, as on the command line.
        is_refusal = not is_loaded and isinstance(error, ValueError | OSError)
        reason = one_line(error) if is_refusal else f"{type(error).__name__}: {one_line(error)}"
        _send_now(socket, Failed(reason, is_refusal))
        return 1
    return 0


def main() -> None:
    """Run the engine process."""
    # A service manager sends it to all processes of a service, and requests may have time left; see `AsyncLLM.close`.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup = pickle.load(sys.stdin.buffer)
    address = sys.argv[1]
    folder = os.path.dirname(address.removeprefix("ipc://"))
    threading.Thread(target=_exit_with_front_end, args=(folder,), daemon=True).start()
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = context.socket(zmq.DEALER)
    socket.sndhwm, socket.rcvhwm, socket.linger = MOST_MESSAGES, 0, _LINGER_MS
    socket.connect(address)
    logger = logging.getLogger("specdec")
    logger.addHandler(_LogSender(socket))
    logger.setLevel(setup.log_level)
    code = serve(setup, socket)
    context.destroy()
    # Nothing of the model is worth taking down in order.
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
