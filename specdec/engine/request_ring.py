"""Ended requests on disk, from which a draft head is trained further: prepared data in a folder of bounded size."""

import fcntl
import json
import logging
import os
import queue
import random
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from specdec.config import EngineConfig
from specdec.core.request import Request
from specdec.kernels.types.settings import one_line
from specdec.models.head_fit import VOCABULARY
from specdec.models.hub import shown_name
from specdec.models.tokenizer import vocabulary_digest

logger = logging.getLogger(__name__)

INDEX, LOCK = "index.json", ".lock"
SOURCE = "served requests"
# Most tokens that are kept of a request, its last ones. Training holds a conversation in one batch.
LONGEST = 4096
# Tokens of a file, unless these are more than a part of the limit; and seconds after which a file has fewer.
FILE_TOKENS, PART, SECONDS = 1 << 16, 16, 60.0
TOKEN_BYTES = 5
# Requests that may wait to be written; further ones are not kept.
MOST_WAITING = 1024
# Seconds that `RequestRing.close` waits for the last file.
_END = 10.0
_NAME = re.compile(r"requests-(\d{8})\.safetensors(\.tmp)?")


class Kept(NamedTuple):
    """A request's last tokens, and how many of them are its output."""

    token_ids: list[int]
    num_output: int


class RingFolder:
    """Files of kept requests in the form of `specdec prepare`, which `specdec train --data` reads; the oldest go first.

    Each file is written whole under another name and renamed, and then named by the index. So a killed process leaves
    data that can be read. One engine at a time may write to a folder.

    Args:
        limit: most bytes of all files but the index.
        model: name of the target.
        vocabulary: its `vocabulary_digest`.

    Raises:
        ValueError: a folder that cannot be written, that another engine writes, or that holds other data.
    """

    def __init__(self, folder: Path, limit: int, model: str, vocabulary: str | None = None) -> None:
        self.folder, self.limit = folder, limit
        self.file_tokens = max(1, min(FILE_TOKENS, limit // (PART * TOKEN_BYTES)))
        self._settings = {"format": 1, "model": model, VOCABULARY: vocabulary, "source": SOURCE}
        try:
            # Other users of the machine are not to read requests.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (folder / LOCK).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._shards = self._read()
            self._sizes = {shard["file"]: (folder / shard["file"]).stat().st_size for shard in self._shards}
            for file in folder.iterdir():
                if _NAME.fullmatch(file.name) and file.name not in self._sizes:
                    file.unlink()
            self._write_index()
        except BlockingIOError:
            raise ValueError(
                f"collect_drafts {folder}: another engine writes there; give a folder of its own"
            ) from None
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"collect_drafts {folder}: {reason}; give a folder that can be written") from None

    def _read(self) -> list[dict[str, Any]]:
        file = self.folder / INDEX
        if not file.exists():
            return []
        try:
            index = json.loads(file.read_text(encoding="utf-8"))
            settings, shards = index["settings"], list(index["shards"])
        except (ValueError, LookupError, TypeError):
            settings, shards = None, []
        if settings != self._settings:
            found = f"holds other data ({settings}; here vocabulary {self._settings[VOCABULARY]})"
            raise ValueError(
                f"collect_drafts {self.folder}: {found}, not requests of {self._settings['model']}; give another folder"
            )
        return [shard for shard in shards if (self.folder / shard["file"]).is_file()]

    def add(self, requests: Sequence[Kept]) -> None:
        """Write requests as one file, after the oldest files have made room for it."""
        tokens = [token for request in requests for token in request.token_ids]
        mask = [
            place >= len(request.token_ids) - request.num_output
            for request in requests
            for place in range(len(request.token_ids))
        ]
        data = save(
            {
                "tokens": torch.tensor(tokens, dtype=torch.int32),
                "mask": torch.tensor(mask, dtype=torch.bool),
                "lengths": torch.tensor([len(request.token_ids) for request in requests], dtype=torch.int32),
            }
        )
        number = 1 + int(self._shards[-1]["file"][len("requests-") :][:8]) if self._shards else 0
        old: list[str] = []
        while self._shards and sum(self._sizes.values()) + len(data) > self.limit:
            old.append(self._shards.pop(0)["file"])
            del self._sizes[old[-1]]
        if old:
            self._write_index()
            for name in old:
                (self.folder / name).unlink(missing_ok=True)
        name = f"requests-{number:08d}.safetensors"
        self._write(name, data)
        counts = {"conversations": len(requests), "tokens": len(tokens), "assistant_tokens": sum(mask)}
        self._shards.append({"file": name, **counts})
        self._sizes[name] = len(data)
        self._write_index()

    def close(self) -> None:
        """Let another engine write here."""
        self._lock.close()

    def _write_index(self) -> None:
        index = {
            "settings": self._settings,
            "sources": [SOURCE],
            "shards": self._shards,
            "read": sum(shard["conversations"] for shard in self._shards),
            "complete": True,
            "bad": {"counts": {}, "first": {}},
        }
        self._write(INDEX, json.dumps(index, indent=1).encode())

    def _write(self, name: str, data: bytes) -> None:
        new = self.folder / f"{name}.tmp"
        new.write_bytes(data)
        os.replace(new, self.folder / name)


class RequestRing:
    """Keeps a share of the requests that end. A thread writes them, so that no step waits for the disk.

    A folder that cannot be written any more ends the collection with one line in the log, and harms no request.

    Args:
        share: probability with which a request is kept.
    """

    def __init__(self, folder: RingFolder, share: float) -> None:
        self._folder, self._share = folder.folder, share
        self._random = random.Random()
        self._waiting: queue.SimpleQueue[Kept | None] = queue.SimpleQueue()
        self._problems: list[str] = []
        self._ended = False
        arguments = (folder, self._waiting, self._problems)
        thread = threading.Thread(target=_write_all, args=arguments, name="collected requests", daemon=True)
        thread.start()
        # Also where the engine is given up without `close`.
        self._end = weakref.finalize(self, _finish, self._waiting, thread)

    @classmethod
    @contextmanager
    def of(cls, config: EngineConfig) -> Iterator["RequestRing | None"]:
        """Open the ring that the settings ask for, None if they ask for none; close it if the context fails.

        Raises:
            ValueError: see `RingFolder`.
        """
        if config.collect_drafts is None:
            yield None
            return
        folder, share = config.collect_drafts, config.collect_drafts_share
        vocabulary = vocabulary_digest(config.tokenizer or config.model)
        limit = int(config.collect_drafts_limit * (1 << 30))
        ring = cls(RingFolder(folder, limit, shown_name(config.model), vocabulary), share)
        logger.info("collect_drafts %s: prompts and outputs of %g %% of the requests are kept", folder, 100 * share)
        try:
            yield ring
        except BaseException:
            ring.close()
            raise

    def keep(self, request: Request) -> None:
        """Keep a request if it has ended well and is one of the share."""
        if self._problems and not self._ended:
            self._ended = True
            logger.warning("collect_drafts %s: no further requests are kept: %s", self._folder, self._problems[0])
        if self._ended or request.num_output == 0 or request.finish_reason not in ("stop", "length"):
            return
        if self._random.random() < self._share and self._waiting.qsize() < MOST_WAITING:
            tokens = request.token_ids[-LONGEST:]
            self._waiting.put(Kept(tokens, min(request.num_output, len(tokens))))

    def close(self) -> None:
        """Write what waits, and give up the folder."""
        self._end()


def _finish(waiting: "queue.SimpleQueue[Kept | None]", thread: threading.Thread) -> None:
    waiting.put(None)
    thread.join(_END)


def _write_all(folder: RingFolder, waiting: "queue.SimpleQueue[Kept | None]", problems: list[str]) -> None:
    """Write requests until None comes, or writing fails."""
    held: list[Kept] = []
    due = 0.0
    while True:
        try:
            found = waiting.get(timeout=max(0.0, due - time.monotonic()) if held else None)
            is_last, is_due = found is None, False
        except queue.Empty:
            found, is_last, is_due = None, False, True
        if found is not None:
            due = due if held else time.monotonic() + SECONDS
            held.append(found)
        is_full = sum(len(request.token_ids) for request in held) >= folder.file_tokens
        if held and (is_last or is_due or is_full):
            try:
                folder.add(held)
            except Exception as error:  # torch and safetensors raise many kinds
                problems.append(one_line(error))
                is_last = True
            held = []
        if is_last:
            folder.close()
            return
