"""The ranks of an engine while it is built: this process alone, or the first of several; and the settings of each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from specdec.config import EngineConfig
from specdec.core.launch import Launch, current_launch
from specdec.kernels.types.threads import usable_threads
from specdec.parallel.first_rank import COLLECTIVE_TIMEOUT, FirstRank
from specdec.parallel.other_ranks import OtherRanks
from specdec.parallel.rank_layout import RankLayout
from specdec.parallel.ranks import Ranks
from specdec.parallel.ray_ranks import ray_ranks
from specdec.parallel.started_ranks import launched_ranks, started_ranks


def layout_of(config: EngineConfig) -> RankLayout:
    """Return which part of the model each rank holds."""
    return RankLayout(config.tensor_parallel_size, config.pipeline_parallel_size)


def rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    """Return one rank's settings: its own device, and its share of the machine's threads.

    Raises:
        ValueError: fewer GPUs than ranks.
    """
    size = layout_of(config).size
    if size == 1:
        return config
    launch = current_launch()
    if launch is not None:
        rank, size = launch.local_rank, launch.local_size
    elif config.distributed_executor_backend == "ray":
        # Ray shows each actor its own GPU alone, and sets its number of threads.
        rank, size = 0, 1
    if config.device.startswith("cuda") and torch.cuda.device_count() < size:
        sizes = f"tensor_parallel_size is {config.tensor_parallel_size}"
        if config.pipeline_parallel_size > 1:
            sizes += f" and pipeline_parallel_size {config.pipeline_parallel_size}"
        raise ValueError(f"{sizes}; this machine has {torch.cuda.device_count()} GPUs")
    device = f"cuda:{rank}" if config.device.startswith("cuda") else config.device
    return replace(config, device=device, threads=config.threads or max(1, usable_threads() // size))


@contextmanager
def ranks_of(config: EngineConfig, timeout: float = COLLECTIVE_TIMEOUT) -> Iterator[Ranks]:
    """Start the ranks beside this one, or meet them, and end them if the engine is not built.

    Args:
        timeout: seconds of an operation between ranks.

    Raises:
        ValueError: a launcher has started another number of ranks, or this process is not the first.
    """
    layout, launch = layout_of(config), current_launch()
    if launch is not None:
        _check_launch(launch, layout.size)
    if layout.size == 1:
        yield Ranks()
        return
    ranks = FirstRank(layout, _other_ranks(config, layout.size, timeout), timeout)
    ranks.tell((config, timeout))
    try:
        yield ranks
    except (ValueError, OSError):
        # A mistake in settings and files, which the other ranks meet as well.
        ranks.kill()
        raise
    except Exception as error:
        raise ranks.failed(error) from error
    except BaseException:
        ranks.kill()
        raise


def _other_ranks(config: EngineConfig, size: int, timeout: float) -> OtherRanks:
    launch, by_ray = current_launch(), config.distributed_executor_backend == "ray"
    if launch is not None and by_ray:
        raise ValueError("distributed_executor_backend is 'ray', and a launcher has started the ranks; leave it out")
    if launch is not None:
        return launched_ranks(launch, timeout)
    return ray_ranks(size, torch.device(config.device).type, timeout) if by_ray else started_ranks(size, timeout)


def _check_launch(launch: Launch, size: int) -> None:
    if launch.rank:
        raise ValueError(f"this process is rank {launch.rank} of {launch.size}; only rank 0 makes an engine")
    if launch.size != size:
        raise ValueError(
            f"the launcher has started {launch.size} ranks (WORLD_SIZE), and tensor_parallel_size times "
            f"pipeline_parallel_size is {size}; make them equal"
        )
