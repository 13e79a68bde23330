"""Stores that are left alone while they fail."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from specdec.kv_transfer.block_store import NO_KEY, BlockStore
from specdec.kv_transfer.notes import Notes

T = TypeVar("T")
# Seconds between questions whether a store that failed answers again.
RETRY_AFTER = 5.0


class GuardedStore:
    """One direction of a store, reading or writing, that is left alone after a failure until the store answers again.

    Args:
        notes: for failures.
        consequence: of a failure, for its log line.

    Attributes:
        busy: held during calls of the store.
    """

    def __init__(self, store: BlockStore, notes: Notes, consequence: str) -> None:
        self.store, self._notes, self._consequence, self.is_up = store, notes, consequence, True
        self.busy, self._has_ended = threading.Lock(), threading.Event()

    def call(self, default: T, operation: Callable[..., T], *arguments: object) -> T:
        """Return what a store's method returns, or `default` if it fails or has failed."""
        if not self.is_up:
            return default
        try:
            with self.busy:
                return operation(*arguments)
        except Exception as error:
            self.is_up = False
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            self._notes.warn(
                f"{self.store.name}: {reason}; {self._consequence}", f"{self.store.name} {self._consequence}"
            )
            # By a thread of its own, so that no request ever waits for a store that is known to be gone.
            threading.Thread(target=self._wait_for_answer, name="kv-retry", daemon=True).start()
            return default

    def end(self) -> None:
        """Ask a store that failed no more."""
        self._has_ended.set()

    def _wait_for_answer(self) -> None:
        while not self._has_ended.wait(RETRY_AFTER):
            with suppress(Exception), self.busy:
                self.store.count_held([NO_KEY])
                self.is_up = True
                return
