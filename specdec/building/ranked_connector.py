"""The connector of an engine over several ranks, as its first rank sees it."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from specdec.building.followers import Followers
from specdec.building.rank_messages import BeginSaveKV, Disconnect, ReadKV, SaveKV
from specdec.cache.block_moves import BlockSource, PublishedBlock
from specdec.core.request import Request
from specdec.execution.executor import ExecutorDeadError
from specdec.kv_transfer.kv_connector import KVCaches, KVConnector, TransferStats

# Seconds in which the other ranks must have stored what is still to be stored.
DISCONNECT_TIMEOUT = 15.0


class RankedConnector(KVConnector):
    """One connector per rank. The first rank's serves the scheduler and decides for all.

    What a worker side is told goes to the others by the connection that their orders of steps take, so that it comes
    before or behind the same step on every rank. Loads are moves of these orders. What the others have done comes back
    by their links, with the rank that has done it.

    Args:
        own: the first rank's connector.
        followers: the other ranks, whose connectors are made.
        settle: brings the entries of the step before into place on all ranks.
    """

    supports_ranks = True

    def __init__(self, own: KVConnector, followers: Followers, settle: Callable[[], None]) -> None:
        self.own, self._followers, self._settle = own, followers, settle
        self._has_begun = False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.own.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, block_ids: Sequence[int], num_external_tokens: int
    ) -> Sequence[BlockSource]:
        return self.own.update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_read_meta(self) -> Any:
        return self.own.build_read_meta()

    def build_layer_meta(self, upcoming: Sequence[PublishedBlock]) -> Any:
        return self.own.build_layer_meta(upcoming)

    def build_connector_meta(self, published: Sequence[PublishedBlock]) -> Any:
        return self.own.build_connector_meta(published)

    def update_connector_output(self, output: Sequence[tuple[int, Any]], rank: int = 0) -> None:
        assert rank == 0, "each output comes with its rank"
        for each, done in output:
            self.own.update_connector_output(done, each)

    def request_finished(self, request: Request) -> None:
        self.own.request_finished(request)

    def is_sending(self, request: Request) -> bool:
        return self.own.is_sending(request)

    def register_kv_caches(self, caches: KVCaches) -> None:
        raise AssertionError(f"each rank's connector has its own cache, not {list(caches.parts)}")

    def start_read_kv(self, metadata: Any) -> None:
        if metadata:
            self._followers.tell(ReadKV(metadata))
        self.own.start_read_kv(metadata)

    def start_save_kv(self, metadata: Any) -> None:
        # Others too must give up what a step that failed has begun.
        if metadata or self._has_begun:
            self._followers.tell(BeginSaveKV(metadata))
        self._has_begun = bool(metadata)
        self.own.start_save_kv(metadata)

    def start_load_kv(self, sources: Sequence[int], block_ids: Sequence[int]) -> None:
        raise AssertionError(f"each rank's cache loads {len(sources)} blocks by its own connector, not {block_ids}")

    def wait_for_save(self, metadata: Any) -> None:
        # Others may have copies to wait for that were begun in vain.
        if metadata or self._has_begun:
            self._settle()
            self._followers.tell(SaveKV(metadata))
        self._has_begun = False
        self.own.wait_for_save(metadata)

    def get_finished(self) -> list[tuple[int, Any]]:
        return [(0, self.own.get_finished()), *self._followers.transferred()]

    def wait(self, seconds: float) -> None:
        """See `KVConnector.wait`. What other ranks have done is seen after `seconds` at the latest."""
        self.own.wait(seconds)

    def get_kv_connector_stats(self) -> TransferStats:
        return self.own.get_kv_connector_stats()

    def shutdown(self) -> None:
        end = time.monotonic() + DISCONNECT_TIMEOUT
        with suppress(ExecutorDeadError):
            self._followers.tell(Disconnect())
        self.own.shutdown()
        self._followers.wait(max(0.0, end - time.monotonic()))
