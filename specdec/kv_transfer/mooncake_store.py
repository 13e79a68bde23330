"""Blocks in a Mooncake store: a pool of several machines' memory, shared by engines."""

import ctypes
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import numpy as np

from specdec.kv_transfer.block_store import HEADER_SIZE, NO_KEY, StoreError, flaw_of, header_of
from specdec.kv_transfer.kv_transfer_config import MooncakeSettings
from specdec.kv_transfer.notes import Notes

# Seconds in which a master answers before it is connected to.
CONNECT_TIMEOUT = 2.0
# Results of Mooncake's calls. A record is absent while another engine writes it, and where its place has been reused
# during the transfer.
_NO_SPACE, _WRITES, _NOT_FOUND, _THERE, _LEASE_OVER, _GONE = -200, -703, -704, -705, -707, -712
_ABSENT = (_WRITES, _NOT_FOUND, _LEASE_OVER, _GONE)


class MooncakeStore:
    """Records in a Mooncake store. It connects at once, and where that fails, with a later call.

    Args:
        record_size: bytes of the largest record, header included.
        most_at_once: records read or written in one call.

    Raises:
        ValueError: Mooncake, or a library that it needs, is not installed.
    """

    def __init__(self, settings: MooncakeSettings, record_size: int, most_at_once: int, notes: Notes) -> None:
        try:
            # Late: it brings its own libraries.
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ValueError(
                "the Mooncake store needs specdec[mooncake] (with CUDA: the package mooncake-transfer-engine) and "
                f"Debian's libibverbs1, librdmacm1 and libnuma1; install them: {error}"
            ) from None
        self.name = f"Mooncake store at {settings.master_server_address}"
        self._settings, self._notes, self._new = settings, notes, MooncakeDistributedStore
        self._store: Any = None
        self._connecting, self._is_lost = threading.Lock(), False
        # One buffer for the thread that reads, and one for the thread that writes.
        self._buffers = [np.zeros((most_at_once, record_size), np.uint8) for _ in range(2)]
        # Now, since connecting stops every thread of the process for a moment.
        try:
            self._connected()
        except StoreError as error:
            notes.warn(f"{self.name}: {error}; tokens are computed until it answers")

    def count_held(self, keys: Sequence[str]) -> int:
        """Return how many of the keys are there before the first that is not.

        Raises:
            StoreError: the server does not answer.
        """
        codes = self._connected().batch_is_exist(list(keys))
        if any(code < 0 for code in codes):
            raise self._failure("querying", codes)
        self._is_lost = False
        return next((place for place, code in enumerate(codes) if not code), len(keys))

    def read(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> list[bool]:
        """Fill the payloads; return which of them are whole.

        Raises:
            StoreError: the server does not answer.
        """
        store, buffer = self._connected(), self._buffers[0]
        sizes = [HEADER_SIZE + len(payload) for payload in payloads]
        codes = store.batch_get_into(list(keys), self._places(buffer, len(keys)), sizes)
        came = []
        for key, payload, row, size, code in zip(keys, payloads, buffer, sizes, codes, strict=False):
            flaw = None
            if code >= 0:
                record = row.data
                payload[:] = record[HEADER_SIZE:size]
                flaw = flaw_of(key, record[:HEADER_SIZE], payload) if code == size else f"{code} bytes, not {size}"
            if flaw is not None:
                self._notes.warn(f"{self.name}: {key} is ignored: {flaw}")
                store.batch_remove([key], True)
            came.append(code >= 0 and flaw is None)
        if not any(came) and any(code < 0 and code not in _ABSENT for code in codes):
            raise self._failure("reading", codes)
        return came

    def write(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Keep the payloads, as far as there is room.

        Raises:
            StoreError: the pool is full, or the server does not answer.
        """
        store, buffer = self._connected(), self._buffers[1]
        there = store.batch_is_exist(list(keys))
        lacking = [pair for pair, code in zip(zip(keys, payloads, strict=True), there, strict=True) if code != 1]
        for row, (key, payload) in zip(buffer, lacking, strict=False):
            record = row.data
            record[:HEADER_SIZE], record[HEADER_SIZE : HEADER_SIZE + len(payload)] = header_of(key, payload), payload
        if not lacking:
            return
        sizes = [HEADER_SIZE + len(payload) for _, payload in lacking]
        codes = store.batch_put_from([key for key, _ in lacking], self._places(buffer, len(lacking)), sizes)
        if _NO_SPACE in codes:
            raise StoreError("the pool is full")
        if any(code not in (0, _WRITES, _THERE) for code in codes):
            raise self._failure("writing", codes)

    def close(self) -> None:
        """Leave the pool; what this process has kept of it is lost."""
        store = self._store
        if store is None:
            return
        with suppress(StoreError):
            self.count_held([NO_KEY])
        self._store = None
        if not self._is_lost:
            store.close()
            for kept in (store, self._buffers):
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(kept))

    def _failure(self, doing: str, codes: Sequence[int]) -> StoreError:
        self._is_lost = True
        return StoreError(f"{doing} failed with code {min(codes)}")

    def _places(self, buffer: "np.ndarray[Any, Any]", count: int) -> list[int]:
        return [buffer.ctypes.data + row * buffer.shape[1] for row in range(count)]

    def _connected(self) -> Any:
        with self._connecting:
            if self._store is None:
                store, given = self._new(), self._settings
                _check_answers(given)
                host = given.local_hostname
                if ":" not in host:
                    host = f"{host}:{_free_port()}"
                code = store.setup(
                    host,
                    given.metadata_server,
                    given.global_segment_size,
                    given.local_buffer_size,
                    given.protocol,
                    given.device_name,
                    given.master_server_address,
                )
                for buffer in self._buffers if code == 0 else ():
                    code = code or store.register_buffer(buffer.ctypes.data, buffer.nbytes)
                if code:
                    raise StoreError(f"connecting failed with code {code}")
                # Closing and freeing a client wait some ten seconds for a master that is gone, and stop every thread
                # meanwhile; and a transfer that failed may still use its buffer. So but for `close`, both stay until
                # the process ends.
                for kept in (store, self._buffers):
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
                self._store = store
        return self._store


def _check_answers(settings: MooncakeSettings) -> None:
    """Raise a `StoreError` unless master and metadata server answer.

    `setup` would wait for them for half a minute, and stop every thread meanwhile.
    """
    host, _, port = settings.master_server_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        if settings.metadata_server.startswith("http"):
            # A master that hangs takes connections all the same; its metadata server is in the same process.
            url = f"{settings.metadata_server}?key={NO_KEY}"
            with suppress(HTTPError):
                build_opener(ProxyHandler({})).open(url, timeout=CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        raise StoreError(f"no master answers: {error}") from None


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])
