"""Engines over several ranks, which are threads of the test process, with a connector."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from specdec import LLM
from specdec.building.worker_builder import WorkerBuilder
from specdec.execution.worker import Worker
from specdec.kv_transfer.kv_connector import KVConnector
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from specdec.scheduling.integrity import check_pool, check_scheduler
from tests.specdec.kv_transfer.engines import engine
from tests.specdec.parallel.thread_ranks import thread_ranks
from tests.specdec.world import World


class Ranks(NamedTuple):
    """An engine, and what its ranks have, by their numbers."""

    llm: LLM
    connectors: dict[int, OffloadingConnector]
    workers: dict[int, Worker]

    def check_alike(self) -> None:
        """Check that all ranks read the same features, and entries of a draft model that each of them has whole."""
        pool = self.llm.engine.scheduler.manager.pool
        blocks = [block for block in range(pool.num_blocks) if pool._hashes[block] is not None]
        assert blocks
        # Those of earlier pipeline stages have no draft model.
        drafting = range(self.llm.config.tensor_parallel_size)
        first, *others = (self.workers[rank].cache.parts for rank in drafting)
        for part in self.connectors[0].transfers._common_parts & first.keys():
            for other in others:
                own, its = first[part][blocks], other[part][blocks]
                assert torch.equal(own.nan_to_num(), its.nan_to_num()), part


@contextmanager
def connected_ranks(world: World, drafter: str, config: dict[str, Any], **settings: Any) -> Iterator[Ranks]:
    """An engine, of two tensor-parallel ranks if nothing else is said. At its end all blocks are accounted for."""
    connectors: dict[int, OffloadingConnector] = {}
    workers: dict[int, Worker] = {}
    connect = WorkerBuilder.connect

    def kept(self: WorkerBuilder, worker: Worker, block_bytes: int, rank: int, parts: Sequence[str]) -> KVConnector:
        made = connect(self, worker, block_bytes, rank, parts)
        assert isinstance(made, OffloadingConnector)
        connectors[rank], workers[rank] = made, worker
        return made

    with pytest.MonkeyPatch.context() as patch, thread_ranks():
        patch.setattr(WorkerBuilder, "connect", kept)
        with engine(world, drafter, config, **{"tensor_parallel_size": 2, **settings}) as llm:
            assert len(connectors) > 1
            yield Ranks(llm, connectors, workers)
            check_scheduler(llm.engine.scheduler)
            check_pool(connectors[0].tier.pool, connectors[0].tier.holders())
