"""Log lines of threads, which the engine's thread writes. Pure Python."""

import logging
import threading
import time
from collections import deque

# Seconds in which a repeated line is written once.
QUIET = 30.0


class Notes:
    """Warnings for the log, from any thread.

    The engine process sends only the log of its main thread to the front end, so other threads leave their lines here.

    Args:
        logger: where `flush` writes them.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lines: deque[str] = deque()
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def warn(self, line: str, topic: str | None = None) -> None:
        """Leave a line.

        Args:
            topic: of lines of one topic, one is written in `QUIET` seconds; None for the line itself.
        """
        now, name = time.monotonic(), line if topic is None else topic
        with self._lock:
            if now - self._last.get(name, -QUIET) >= QUIET:
                self._last[name] = now
                self._lines.append(line)
            if len(self._last) > 1000:
                self._last.clear()

    def take(self) -> list[str]:
        """Hand over the lines."""
        return [self._lines.popleft() for _ in range(len(self._lines))]

    def flush(self) -> None:
        """Write the lines."""
        for line in self.take():
            self._logger.warning(line)
