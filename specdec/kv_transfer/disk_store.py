"""Blocks as files of a folder: limited in bytes, evicted in least-recently-used order, safe against crashes."""

import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from specdec.kv_transfer.block_store import HEADER_SIZE, StoreError, flaw_of, header_of
from specdec.kv_transfer.notes import Notes

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_OF_RANK = re.compile(r"rank-\d+-of-\d+")
_PARTIAL = ".part"
# Seconds after which an unfinished file belongs to no living process.
_STALE = 600.0


class _File(NamedTuple):
    """A file that this engine knows of.

    Attributes:
        size: in bytes.
        used: when it was last written or read, as far as this engine knows, in seconds since 1970.
    """

    size: int
    used: float


class DiskStore:
    """One file per record, named after its key's hash.

    A file is written under another name, synchronised and renamed, so that a crash leaves whole files. Several engines
    may use one folder: it is the index, so each finds what the others have written, and a file that another one has
    removed is absent.

    Args:
        root: the folder, made if it is not there.
        max_bytes: limit of the files that this engine knows of: those there when it started, and those that it has
            written or read.
        notes: for lines about files that are ignored.

    Raises:
        ValueError: a folder that cannot be made or written to.
    """

    def __init__(self, root: Path, max_bytes: int, notes: Notes) -> None:
        self.name, self.root, self.max_bytes, self._notes = f"disk {root}", root, max_bytes, notes
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()
        try:
            root.mkdir(parents=True, exist_ok=True)
            if not os.access(root, os.W_OK | os.X_OK):
                raise PermissionError(13, "no permission to write")
            self._scan()
        except OSError as error:
            raise ValueError(f"root_dir {root}: {error.strerror or error}; give a folder that can be written") from None

    def count_held(self, keys: Sequence[str]) -> int:
        return next((place for place, key in enumerate(keys) if not self._path(_name_of(key)).exists()), len(keys))

    def read(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> list[bool]:
        return [self._read(key, payload) for key, payload in zip(keys, payloads, strict=True)]

    def write(self, keys: Sequence[str], payloads: Sequence[memoryview]) -> None:
        """Keep the payloads.

        Raises:
            StoreError: the disk is full or fails.
        """
        for key, payload in zip(keys, payloads, strict=True):
            if not self._path(_name_of(key)).exists():
                self._write(key, payload)

    def close(self) -> None:
        """Do nothing: files are closed."""

    def _scan(self) -> None:
        """Find the files that are there, the least recently used first."""
        found, foreign = [], 0
        for folder, folders, names in os.walk(self.root):
            # Those of engines over several ranks are theirs.
            folders[:] = [each for each in folders if not _OF_RANK.fullmatch(each)]
            for name in names:
                file = Path(folder, name)
                with suppress(FileNotFoundError):
                    facts = file.stat()
                    if not S_ISREG(facts.st_mode):
                        foreign += 1
                    elif _NAME.fullmatch(name) and Path(folder).name == name[:2]:
                        found.append((facts.st_mtime, name, facts.st_size))
                    elif not name.endswith(_PARTIAL):
                        foreign += 1
                    elif time.time() - facts.st_mtime > _STALE:
                        file.unlink()
        if foreign:
            logger.warning("%s: %d files that are no blocks are ignored", self.name, foreign)
        for used, name, size in sorted(found):
            self._files[name] = _File(size, used)
            self._total += size
        self._make_room(0)
        if found:
            logger.info("%s: %d files, %.1f MiB", self.name, len(self._files), self._total / (1 << 20))

    def _path(self, name: str) -> Path:
        return self.root / name[:2] / name

    def _read(self, key: str, payload: memoryview) -> bool:
        name = _name_of(key)
        path = self._path(name)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = file.read(HEADER_SIZE)
                flaw = None
                if size != HEADER_SIZE + len(payload):
                    flaw = f"{size} bytes where {HEADER_SIZE + len(payload)} are expected"
                elif file.readinto(payload) == len(payload):
                    flaw = flaw_of(key, header, payload)
                else:
                    flaw = "it ends early"
            if flaw is None:
                # Of a file that another user has written, the time stays.
                with suppress(OSError):
                    os.utime(path)
                self._note(name, size)
                return True
            self._notes.warn(f"{path} is ignored: {flaw}")
            # So that the block can be written again.
            self._unlink(name)
        except FileNotFoundError:
            logger.debug("%s has been removed", path)
        except OSError as error:
            self._notes.warn(f"{path} is ignored: {error}")
        with self._lock:
            self._forget(name)
        return False

    def _write(self, key: str, payload: memoryview) -> None:
        name, size = _name_of(key), HEADER_SIZE + len(payload)
        if size > self.max_bytes:
            raise StoreError(f"max_bytes {self.max_bytes} is less than one block of {size} bytes")
        with self._lock:
            self._make_room(size)
        path = self._path(name)
        partial = path.with_name(f"{name}.{os.getpid()}.{threading.get_ident()}{_PARTIAL}")
        try:
            path.parent.mkdir(exist_ok=True)
            with partial.open("wb") as file:
                file.write(header_of(key, payload))
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise StoreError(f"writing {path} failed: {error.strerror or error}") from None
        self._note(name, size)

    def _note(self, name: str, size: int) -> None:
        """Count a file as the one that was used last."""
        with self._lock:
            self._forget(name)
            self._files[name] = _File(size, time.time())
            self._total += size

    def _make_room(self, size: int) -> None:
        while self._files and self._total + size > self.max_bytes:
            name, file = next(iter(self._files.items()))
            with suppress(OSError):
                used = self._path(name).stat().st_mtime
                if used > file.used:
                    # Another engine has read it meanwhile.
                    self._files[name] = file._replace(used=used)
                    self._files.move_to_end(name)
                    continue
                self._path(name).unlink()
            self._forget(name)

    def _unlink(self, name: str) -> None:
        with self._lock:
            self._forget(name)
        with suppress(OSError):
            self._path(name).unlink()

    def _forget(self, name: str) -> None:
        if file := self._files.pop(name, None):
            self._total -= file.size


def rank_folder(root: Path, rank: int, num_ranks: int) -> Path:
    """Return the folder for a rank's files: the root for a single rank, else a part of it, in which it alone evicts."""
    return root if num_ranks == 1 else root / f"rank-{rank}-of-{num_ranks}"


def _name_of(key: str) -> str:
    return f"{sha256(key.encode()).hexdigest()}.kv"
