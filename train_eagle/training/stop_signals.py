"""Ctrl-C and SIGTERM, noted so that a run ends at a good place."""

import os
import signal
import threading
from types import FrameType
from typing import Any

TOLD = "stopping after this step, and its evaluation if one is due; Ctrl-C again ends at once, without saving\n"


class StopSignals:
    """Notes the first SIGINT or SIGTERM inside a `with`; a further Ctrl-C raises KeyboardInterrupt.

    Signals of a process are handled in its main thread, and elsewhere nothing is noted.

    Attributes:
        received: number of the signal; None as long as there was none.

    Args:
        alone: whether no other process trains too. A launcher passes Ctrl-C on to processes that the terminal has
            already told, so a second one means nothing there.
    """

    def __init__(self, alone: bool = True) -> None:
        self.received: int | None = None
        self._alone = alone
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            # Python's own streams may be in the middle of a write.
            os.write(2, TOLD.encode())
        elif number == signal.SIGINT and self._alone:
            raise KeyboardInterrupt
