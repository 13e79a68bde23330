"""Ranks on simulated GPUs: each process has one, and what NCCL does between GPUs, gloo does between their processes.

    python -m tests.specdec.parallel.simulated_rank STORE RANK

is `specdec.building.rank_process` on a simulated GPU.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, cast

# As in `tests/conftest.py`, before anything imports torch or a kernel.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import torch.distributed as dist

from tests import simulated_gpu
from tests.simulated_gpu import SimulatedGPU, SimulatedTensor
from tests.triton_interpreter import prepare_interpreter

SIZE = 2


class SimulatedNCCL:
    """A process group on GPUs. Its collectives are launches: they do not make the host wait, and graphs repeat them.

    Attributes:
        num_captured: collectives that graphs repeat.
        timeouts: of collectives one after another.
    """

    num_captured = 0
    timeouts: ClassVar[list[timedelta]] = []

    class Options:
        """As much of NCCL's as is set."""

        _timeout: timedelta

    def __init__(self, gpu: SimulatedGPU, store: Any, rank: int, size: int, options: Options) -> None:
        self.gpu, self._timeout = gpu, options._timeout
        gloo = cast(Any, dist.ProcessGroupGloo)._Options()
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        gloo._timeout = options._timeout
        self._group = dist.ProcessGroupGloo(store, rank, size, gloo)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        raw = [_raw(tensor) for tensor in tensors]
        return self._launch(lambda: self._group.allreduce(raw).wait())

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        into, raw = [[_raw(part) for part in parts] for parts in outputs], [_raw(tensor) for tensor in inputs]
        return self._launch(lambda: self._group.allgather(into, raw).wait())

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raw = [_raw(tensor) for tensor in tensors]
        return self._launch(lambda: self._group.send(raw, rank, tag).wait())

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raw = [_raw(tensor) for tensor in tensors]
        return self._launch(lambda: self._group.recv(raw, rank, tag).wait())

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def _launch(self, work: Any) -> Any:
        self.timeouts.append(self._timeout)
        SimulatedNCCL.num_captured += self.gpu.is_capturing
        self.gpu.launch(work, (), {})
        return SimpleNamespace(wait=lambda: None)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, SimulatedTensor), "NCCL takes tensors of the GPU"
    return tensor.raw


@contextmanager
def simulated_rank(patch: pytest.MonkeyPatch, rank: int) -> Iterator[SimulatedGPU]:
    """Make this process rank `rank` of two, with the GPU of that number, and the processes that it starts ranks too."""
    patch.setattr(simulated_gpu, "GPU", torch.device("cuda", rank))
    with simulated_gpu.simulated_gpu(patch) as gpu:

        class Group(SimulatedNCCL):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(gpu, *arguments)

        patch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
        patch.setattr("specdec.parallel.started_ranks.started", _started)
        yield gpu


def _started(store: str, rank: int) -> "subprocess.Popen[bytes]":
    modules = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-P", "-m", "tests.specdec.parallel.simulated_rank", store, str(rank)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": modules})


def main() -> None:
    """Run the process of rank 1."""
    from specdec.building.rank_process import serve
    from specdec.parallel.other_ranks import meet
    from specdec.parallel.rank_group import LOOPBACK, file_store

    prepare_interpreter()
    with pytest.MonkeyPatch.context() as patch, simulated_rank(patch, 1):
        serve(meet(file_store(sys.argv[1]), int(sys.argv[2]), LOOPBACK))
    os._exit(0)


if __name__ == "__main__":
    main()
