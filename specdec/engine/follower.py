"""A rank beside the first: it loads its part of the model and does what it is told.

    python -m specdec.engine.follower DESCRIPTOR

DESCRIPTOR is the number of an inherited socket to the first rank. The process ends when the socket is closed, however
that happens.
"""

import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from specdec.core.device import on_device
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.draft_heads.llama.checkpoint_files import first_line
from specdec.engine.draft_loader import load_drafts
from specdec.engine.rank_loader import kernels_of, load_target, rank_config
from specdec.engine.rank_messages import (
    DONE,
    Allocate,
    Failure,
    LoadDrafts,
    LoadUpdate,
    Message,
    Refusal,
    RunDummy,
    UseUpdate,
)
from specdec.engine.worker_builder import WorkerBuilder
from specdec.execution.step_codec import OrderReader, SentOrder
from specdec.execution.worker import Worker
from specdec.models.rank_group import RankGroup, file_store


class Follower:
    """One rank. It does every step on its own part of the weights, and comes to the same outcome as all ranks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._reader = OrderReader()
        self._worker: Worker | None = None
        self._builder: WorkerBuilder
        self._update: DraftModel | None = None

    def run(self) -> None:
        """Do what the first rank says until it closes the connection, or until something fails."""
        try:
            self._join()
            while True:
                self._follow(self._connection.recv())
        except (EOFError, ConnectionError):
            return
        except Exception as error:
            # The first rank may be gone.
            try:
                self._connection.send(Failure(f"{type(error).__name__}: {first_line(error)}"))
            except OSError:
                return

    def _join(self) -> None:
        config, rank, store, timeout = self._connection.recv()
        size = config.tensor_parallel_size
        self._config = config = rank_config(config, rank)
        self._device = torch.device(config.device)
        self._kernels = kernels_of(config)
        self._connection.send(DONE)
        group = RankGroup(rank, size, file_store(store, size), self._device, timeout)
        with on_device(self._device):
            self._model = load_target(config, self._kernels, group)
        self._connection.send(DONE)

    @torch.inference_mode()
    def _follow(self, message: Message) -> None:
        with on_device(self._device), self._kernels.limited_threads():
            match message:
                case LoadDrafts(kept):
                    drafts = load_drafts(self._config, self._model, self._kernels, kept)
                    self._builder = WorkerBuilder(self._config, self._model, drafts, self._kernels)
                case Allocate(num_blocks, num_host_blocks):
                    # The memory of an earlier one is free for this one.
                    self._worker = None
                    self._worker = self._builder.build(num_blocks, num_host_blocks)
                    self._connection.send(DONE)
                case LoadUpdate(folder, kept):
                    self._connection.send(self._load(folder, kept))
                case UseUpdate():
                    assert self._worker is not None
                    assert self._update is not None
                    self._worker, self._update = self._builder.with_draft(self._worker, self._update), None
                    self._connection.send(DONE)
                case RunDummy(rows, trees):
                    assert self._worker is not None
                    self._worker.runner.run_dummy(rows, trees)
                case SentOrder() as sent:
                    assert self._worker is not None
                    self._worker.begin(self._reader.read(sent))
                    self._worker.finish()
                case _:
                    raise TypeError(f"a rank that has joined is told {message!r:.100}")

    def _load(self, folder: Path, kept: frozenset[int]) -> Refusal | str:
        try:
            self._update = self._builder.load_draft(folder, kept)
        except ValueError as error:
            self._update = None
            return Refusal(str(error))
        return DONE


def main() -> None:
    """Run the process."""
    Follower(Connection(int(sys.argv[1]))).run()
    # Nothing is worth taking down in order, and a group whose ranks are gone may wait for them.
    os._exit(0)


if __name__ == "__main__":
    main()
