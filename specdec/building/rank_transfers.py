"""The worker side of a connector on a rank beside the first."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from specdec.building.rank_messages import BeginSaveKV, ReadKV, SaveKV
from specdec.kv_transfer.kv_connector import KVConnector

# Seconds after which copies of a device, which end without a sign, are looked at.
POLL = 0.1


class RankTransfers:
    """Runner of a rank's connector: carries out the first rank's messages and reports finished transfers.

    A thread reports what ends beside the steps, such as reads of stores.

    Args:
        send: sends an output of `KVConnector.get_finished` to the first rank; may raise an OSError once that is gone.
    """

    def __init__(self, connector: KVConnector, send: Callable[[Any], None]) -> None:
        self._connector, self._send = connector, send
        self._is_reporting, self._has_ended = threading.Lock(), threading.Event()
        self._reporter = threading.Thread(target=self._report_all, name="kv-reports", daemon=True)
        self._reporter.start()

    def follow(self, message: ReadKV | BeginSaveKV | SaveKV) -> None:
        """Do what the first rank says, between two steps."""
        match message:
            case ReadKV(metadata):
                self._connector.start_read_kv(metadata)
            case BeginSaveKV(metadata):
                self._connector.start_save_kv(metadata)
            case SaveKV(metadata):
                self._connector.wait_for_save(metadata)
                self.report()

    def report(self) -> None:
        """Say what the connector has done since the last report, if anything."""
        with self._is_reporting:
            if output := self._connector.get_finished():
                self._send(output)

    def stop(self) -> None:
        """Report nothing more."""
        self._has_ended.set()

    def shutdown(self) -> None:
        """See `KVConnector.shutdown`."""
        self.stop()
        self._reporter.join()
        self._connector.shutdown()

    def _report_all(self) -> None:
        with suppress(OSError):
            while not self._has_ended.is_set():
                self._connector.wait(POLL)
                self.report()
