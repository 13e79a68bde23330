"""A connector over `FakeMemory`: the scheduler side is the real one, stores answer late, in part, or never."""

import logging
import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from specdec.cache.block_moves import BlockSource, PublishedBlock
from specdec.cache.kv_cache_manager import KVCacheManager
from specdec.core.request import Request
from specdec.kv_transfer.host_tier import HEAD, HostTier
from specdec.kv_transfer.kv_connector import KVCaches, KVConnector
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.transfers import TARGET, Fetched, Found, Result, Save, Saved
from tests.specdec.fake_memory import FakeMemory

PARTS = (TARGET, HEAD)


class FakeConnector(KVConnector):
    """Host memory and one store behind it, which forgets blocks and loses the head's part at random.

    Args:
        num_blocks: blocks of host memory; 0 of a store alone makes no sense.
        seed: of when transfers end and what they lose.
        timeout: seconds until a request gives up; 0: at once.
    """

    has_stores = may_find = True

    def __init__(self, manager: KVCacheManager, num_blocks: int, seed: int, timeout: float) -> None:
        self.memory: FakeMemory | None = None
        self.host = [[[None] * manager.block_size for _ in PARTS] for _ in range(num_blocks)]
        self.store: dict[bytes, dict[str, list[Any]]] = {}
        self.chance = random.Random(seed)
        self.pending: list[tuple[Any, ...]] = []
        notes = Notes(logging.getLogger("tests"))
        self.tier = HostTier(num_blocks, manager.block_size, PARTS, self, timeout, notes)

    def is_stalled(self, seconds: float) -> bool:  # noqa: ARG002
        return self.chance.random() < 0.1

    def look_up(self, job: int, hashes: Sequence[bytes]) -> None:
        self.pending.append(("look_up", job, list(hashes)))

    def fetch(self, job: int, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        self.pending.append(("fetch", job, list(zip(hashes, blocks, strict=True))))

    def register_kv_caches(self, caches: KVCaches) -> None:  # noqa: ARG002
        raise AssertionError("there are none")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self.tier.match(request, num_computed_tokens)
        return found, found is None

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> Sequence[BlockSource]:
        assert len(block_ids) == -(-num_external_tokens // self.tier.block_size)
        return self.tier.take(request, request.num_cached // self.tier.block_size, len(block_ids))

    def build_connector_meta(self, published: Sequence[PublishedBlock]) -> list[Save]:
        return self.tier.save(published)

    def update_connector_output(self, output: list[Result], rank: int = 0) -> None:  # noqa: ARG002
        self.tier.update(output)
        self.tier.loaded()

    def request_finished(self, request: Request) -> None:
        self.tier.forget(request)

    def start_load_kv(self, sources: Sequence[int], block_ids: Sequence[int]) -> None:
        assert self.memory is not None
        for source, block in zip(sources, block_ids, strict=True):
            self.memory.device[block] = deepcopy(self.host[source])

    def wait_for_save(self, metadata: list[Save]) -> None:
        assert self.memory is not None
        for save in metadata:
            for place, part in enumerate(PARTS):
                if part in save.parts:
                    self.host[save.host_block][place] = deepcopy(self.memory.device[save.block][place])
            self.pending.append(("write", save))

    def get_finished(self) -> list[Result]:
        """End some of the transfers, in any order but for reads of one job."""
        done = [item for item in self.pending if self.chance.random() < 0.6]
        self.pending = [item for item in self.pending if not any(item is each for each in done)]
        return [self._done(*item) for item in done]

    def _done(self, kind: str, *rest: Any) -> Result:
        if kind == "write":
            (save,) = rest
            kept = self.store.setdefault(save.block_hash, {})
            for place, part in enumerate(PARTS):
                # A store keeps what the host block has now, so this fails if it was reused.
                if save.is_written and part in save.parts and self.chance.random() < 0.9:
                    kept[part] = deepcopy(self.host[save.host_block][place])
            return Saved(save.host_block, save.is_written)
        job, wanted = rest
        if kind == "look_up":
            if self.chance.random() < 0.03:
                self.store.clear()
            held = next((i for i, each in enumerate(wanted) if TARGET not in self.store.get(each, {})), len(wanted))
            return Found(job, held)
        # Evicted between the query and the read, or damaged.
        count = self.chance.choice([len(wanted), self.chance.randint(0, len(wanted))])
        parts = []
        for place, (block_hash, block) in enumerate(wanted):
            kept = self.store.get(block_hash, {}) if place < count else {}
            if TARGET not in kept:
                count = place
                kept = {}
            for index, part in enumerate(PARTS):
                self.host[block][index] = deepcopy(kept.get(part, [None] * self.tier.block_size))
            parts.append(dict.fromkeys(kept, b""))
        return Fetched(job, parts)

    def wait(self, seconds: float) -> None:  # noqa: ARG002
        raise AssertionError("no engine waits")
