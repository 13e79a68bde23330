"""A rank beside the first: it loads its part of the model and follows the messages of the first rank.

    python -m specdec.building.follower DESCRIPTOR STORE

DESCRIPTOR is the number of an inherited socket to the first rank, and STORE the file through which the ranks find each
other. The process ends when the socket is closed, however that happens.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from specdec.building.draft_loader import load_drafts
from specdec.building.memory_profile import cache_bytes
from specdec.building.rank_loader import kernels_of, layout_of, load_target, rank_config
from specdec.building.rank_messages import (
    BEAT,
    Alive,
    Allocate,
    Answer,
    BeginSaveKV,
    Connect,
    Disconnect,
    Failure,
    Fit,
    LoadAdapter,
    LoadDrafts,
    LoadUpdate,
    Message,
    ReadKV,
    Refusal,
    Rehearsed,
    SaveKV,
    Tap,
    Transferred,
    UseAdapter,
    UseUpdate,
)
from specdec.building.rank_transfers import RankTransfers
from specdec.building.worker_builder import WorkerBuilder
from specdec.core.device import on_device
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.draft_heads.llama.checkpoint_files import first_line
from specdec.execution.step_codec import OrderReader, SentOrder
from specdec.execution.step_order import DraftOrder, EntryMoves, PassOrder
from specdec.execution.worker import Worker
from specdec.models.lora_adapter import AdapterWeights
from specdec.parallel.rank_group import LOOPBACK, Store, file_store
from specdec.parallel.rank_layout import join_groups


class Follower:
    """One rank. It does every step on its own part of the weights.

    In the last pipeline stage it comes to the same outcome as the first rank.

    Args:
        connection: to the first rank.
        store: through which the ranks find each other.
        host: address of this machine that the other ranks reach.
    """

    def __init__(self, connection: Connection, store: Store, host: str = LOOPBACK) -> None:
        self._connection, self._store, self._host = connection, store, host
        self._is_sending, self._has_ended = threading.Lock(), threading.Event()
        self._reader = OrderReader()
        self._worker: Worker | None = None
        self._builder: WorkerBuilder
        self._update: DraftModel | AdapterWeights | None = None
        self._transfers: RankTransfers | None = None

    def run(self) -> None:
        """Do what the first rank says until it closes the connection, or until something fails."""
        try:
            self._join()
            threading.Thread(target=self._beat, name="signs of life", daemon=True).start()
            while True:
                self._follow(self._connection.recv())
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            # The first rank may be gone.
            try:
                self._answer(Failure(f"{type(error).__name__}: {first_line(error)}"))
            except OSError:
                return
        finally:
            self._has_ended.set()
            if self._transfers is not None:
                # Others may wait for the end of this rank in an operation, so nothing is written any more, and nothing
                # keeps its groups.
                self._transfers.stop()
                self._transfers = None

    def _beat(self) -> None:
        """Give signs of life to the end of this rank."""
        with suppress(OSError):
            while not self._has_ended.wait(BEAT):
                self._answer(Alive())

    def _join(self) -> None:
        config, self._rank, timeout = self._connection.recv()
        rank, layout = self._rank, layout_of(config)
        self._config = config = rank_config(config, rank)
        self._device = torch.device(config.device)
        self._kernels = kernels_of(config)
        self._answer(0)
        groups = join_groups(rank, layout, self._store, self._device, timeout, self._host)
        with on_device(self._device):
            self._model = load_target(config, self._kernels, groups)
        self._answer(0)

    def _answer(self, answer: Answer) -> None:
        with self._is_sending:
            self._connection.send(answer)

    @torch.inference_mode()
    def _follow(self, message: Message) -> None:
        with on_device(self._device), self._kernels.limited_threads():
            match message:
                case LoadDrafts():
                    drafts = load_drafts(self._config, self._model, self._kernels)
                    self._builder = WorkerBuilder(self._config, self._model, drafts, self._kernels)
                    self._answer(self._builder.block_bytes)
                case Tap(layers):
                    self._builder = WorkerBuilder(self._config, self._model, None, self._kernels)
                    self._builder.taps = layers
                    self._answer(self._builder.block_bytes)
                case Fit():
                    self._answer(cache_bytes(self._config, self._rehearse) // self._builder.block_bytes)
                case Allocate(num_blocks, num_host_blocks):
                    # The memory of an earlier one is free for this one.
                    self._worker = None
                    self._worker = self._builder.build(num_blocks, num_host_blocks)
                    self._answer(0)
                case LoadUpdate(folder):
                    self._answer(self._load(lambda: self._builder.load_draft(folder)))
                case UseUpdate():
                    assert self._worker is not None
                    assert isinstance(self._update, DraftModel)
                    self._worker, self._update = self._builder.with_draft(self._worker, self._update), None
                    self._answer(0)
                case LoadAdapter(files):
                    self._answer(self._load(lambda: self._builder.read_adapter(files)))
                case UseAdapter(place):
                    assert isinstance(self._update, AdapterWeights)
                    self._builder.put_adapter(place, self._update)
                    self._update = None
                    self._answer(0)
                case Connect(block_bytes):
                    self._answer(self._connect(block_bytes))
                case ReadKV() | BeginSaveKV() | SaveKV():
                    assert self._transfers is not None
                    self._transfers.follow(message)
                case Disconnect():
                    assert self._transfers is not None
                    self._transfers.shutdown()
                    self._answer(0)
                case EntryMoves() as accepted:
                    assert self._worker is not None
                    self._worker.move(accepted)
                case PassOrder() as order:
                    assert self._worker is not None
                    self._worker.run(order)
                    self._report()
                case DraftOrder(rows):
                    assert self._worker is not None
                    self._worker.run_dummy_drafts(rows)
                case SentOrder() as sent:
                    assert self._worker is not None
                    self._worker.begin(self._reader.read(sent))
                    self._worker.finish()
                    self._report()
                case _:
                    raise TypeError(f"a rank that has joined is told {message!r:.100}")

    def _rehearse(self) -> int:
        """Run the largest steps, give up the worker that they were run on, and return the bytes of its cache."""
        while not isinstance(message := self._connection.recv(), Rehearsed):
            self._follow(message)
        assert self._worker is not None
        own, self._worker = self._worker.cache.num_blocks * self._builder.block_bytes, None
        return own

    def _connect(self, block_bytes: int) -> Answer:
        assert self._worker is not None
        try:
            connector = self._builder.connect(self._worker, block_bytes, self._rank)
        except ValueError as error:
            return Refusal(str(error))
        self._transfers = RankTransfers(connector, lambda output: self._answer(Transferred(output)))
        return 0

    def _report(self) -> None:
        if self._transfers is not None:
            self._transfers.report()

    def _load(self, load: Callable[[], DraftModel | AdapterWeights]) -> Answer:
        try:
            self._update = load()
        except ValueError as error:
            self._update = None
            return Refusal(str(error))
        return 0


def main() -> None:
    """Run the process."""
    Follower(Connection(int(sys.argv[1])), file_store(sys.argv[2])).run()
    # Nothing is worth taking down in order, and a group whose ranks are gone may wait for them.
    os._exit(0)


if __name__ == "__main__":
    main()
