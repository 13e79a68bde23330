"""Ranks beside the first in Ray actors, which Ray places on the machines of its cluster."""

from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specdec.kernels.types.extras import lacking
from specdec.parallel.other_ranks import MEETING_TIMEOUT, OtherRanks, meet
from specdec.parallel.started_ranks import RANK_PROCESS


def ray_ranks(size: int, device_type: str, timeout: float) -> OtherRanks:
    """Return actors of one rank each, with a GPU or a CPU of their own.

    They join the cluster that this process belongs to, or that `RAY_ADDRESS` names; without one, Ray is started on this
    machine.

    Args:
        size: number of all ranks; the first is this process.
        device_type: "cuda" for a GPU each, otherwise a CPU.
        timeout: seconds for a rank to take a message.

    Raises:
        ValueError: the package ray is not installed.
        TimeoutError: some did not come, as where the cluster has too few GPUs or CPUs.
        RankDeadError: an actor has ended.
    """
    if problem := lacking("distributed_executor_backend 'ray'", "ray", {"ray": "ray"}):
        raise ValueError(problem)
    import ray

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    needs = {"num_gpus": 1} if device_type == "cuda" else {"num_cpus": 1}
    host = ray.util.get_node_ip_address()
    store = TCPStore(host, 0, None, is_master=True, timeout=timedelta(seconds=MEETING_TIMEOUT))
    actors = [ray.remote(**needs)(_Rank).remote() for _ in range(1, size)]
    runs = [actor.follow.remote(host, store.port, rank) for rank, actor in enumerate(actors, 1)]
    processes = [_Actor(*pair) for pair in zip(actors, runs, strict=True)]

    def end() -> None:
        # The actors hold their processes.
        for process in processes:
            process.kill()

    return OtherRanks(store, [*processes], timeout, end)


class _Rank:
    """A rank beside the first, as an actor."""

    def follow(self, host: str, port: int, rank: int) -> None:
        """Serve as this rank until its connection to the first one is closed.

        Args:
            host: address of the first rank, which has the store at `port`.
        """
        store = TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=MEETING_TIMEOUT))
        import_module(RANK_PROCESS).serve(meet(store, rank, host))


class _Actor:
    """An actor as a `Process`. Ray tells whether its call has ended, and no exit code."""

    def __init__(self, actor: Any, run: Any) -> None:
        self._actor, self._run = actor, run

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        self._ended(timeout)
        return 0

    def kill(self) -> None:
        import ray

        # At the end of the process Ray may be gone before the engine.
        with suppress(Exception):
            ray.kill(self._actor)

    def _ended(self, timeout: float | None) -> int | None:
        import ray

        done, _ = ray.wait([self._run], timeout=timeout)
        return 0 if done else None
