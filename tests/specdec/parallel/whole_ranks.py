"""Two ranks that hold the whole model each: what one of them decides, the other has to come to by itself.

    python -m tests.specdec.parallel.whole_ranks ADDRESS

serves second ranks, one after another, in a process with clocks that jump; its hash seed is another one as well.
"""

import os
import random
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch

from specdec.building import draft_corpus, rank_process, ranks
from specdec.core.request import RequestGroup
from specdec.engine.engine import LLMEngine
from specdec.kernels.reference.text_store import PythonTextStore
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from specdec.parallel.first_rank import FirstRank
from specdec.parallel.other_ranks import Process
from specdec.parallel.rank_group import file_store
from specdec.parallel.ranks import OtherRank


class Compare(NamedTuple):
    """Have the ranks share what they have come to."""


def state_of(engine: LLMEngine, groups: list[RequestGroup]) -> dict[str, Any]:
    """Return all that a plan depends on, and what requests have come to."""
    scheduler = engine.scheduler
    pools = {"device": scheduler.manager.pool}
    if isinstance(engine.connector, OffloadingConnector):
        pools["tier"] = engine.connector.tier.pool
    sizer = scheduler.draft_budget.tree_sizer
    return {
        "outputs": [
            (request.request_id, request.token_ids, request.finish_reason, request.stop_reason, request.error)
            for group in groups
            for request in group.requests
        ],
        "drafts": [plain(request.stored) for group in groups for request in group.requests],
        "stats": repr(scheduler.stats()),
        "queues": [(request.request_id, request.block_table, request.rank) for request in scheduler.queues],
        "blocks": {name: (pool.num_free, list(pool._hashes)) for name, pool in pools.items()},
        "costs": plain(scheduler.step_cost),
        "values": None if sizer is None else plain(sizer.ranks),
        "adapters": engine.adapters.loaded(),
        "seed": None if engine.requests is None else engine.requests.seeds.getstate(),
    }


def plain(value: Any) -> Any:
    """Return an object's fields, and those of its fields, as they can be compared."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(each) for each in value]
    return plain(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, FunctionType) else repr(value)


class WholeRanks:
    """The process of second ranks; see `OtherRanks`."""

    host = "127.0.0.1"

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "ranks")
        modules = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": modules, "PYTHONHASHSEED": str(secrets.randbelow(1 << 32))}
        command = [sys.executable, "-P", "-m", "tests.specdec.parallel.whole_ranks", self._address]
        # It ends with this process, whose end closes the pipe.
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE)
        self.processes: list[Process] = [_Kept()]
        self.store = file_store(str(folder / "store"))
        self.connections: list[Connection] = []

    def begin(self) -> None:
        """Have the process serve another engine."""
        while not Path(self._address).exists():
            assert self._process.poll() is None
            time.sleep(0.01)
        self.connections = [Client(self._address)]

    def close(self) -> None: ...

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class _Kept:
    """The process outlives the ranks of one engine."""

    def poll(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002
        return 0

    def kill(self) -> None: ...


@contextmanager
def whole_ranks(others: WholeRanks) -> Iterator[None]:
    """Build engines of two ranks with this process's second rank meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_other_ranks", lambda *_: others)
        patch.setattr(FirstRank, "groups", _none)
        # Its content can be compared.
        patch.setattr(draft_corpus, "_texts", PythonTextStore)
        others.begin()
        yield


def _none(self: FirstRank | OtherRank, device: torch.device) -> None: ...


def _serve(address: str) -> None:
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    chance, groups, act = random.Random(), list[RequestGroup](), LLMEngine.act

    def compared(self: LLMEngine, command: Any) -> Any:
        if isinstance(command, Compare):
            self.ranks.share(state_of(self, groups))
            return None
        done = act(self, command)
        if isinstance(done, RequestGroup):
            groups.append(done)
        return done

    with pytest.MonkeyPatch.context() as patch, Listener(address) as listener:
        patch.setattr(LLMEngine, "act", compared)
        patch.setattr(OtherRank, "groups", _none)
        patch.setattr(draft_corpus, "_texts", PythonTextStore)
        for clock in ("time", "monotonic", "perf_counter"):
            patch.setattr(time, clock, lambda: 1e6 * chance.random())
        while True:
            groups.clear()
            rank_process.serve(OtherRank(listener.accept(), None, 1))


if __name__ == "__main__":
    # The records name classes of the module, which this one is not.
    from tests.specdec.parallel import whole_ranks as module

    module._serve(sys.argv[1])
