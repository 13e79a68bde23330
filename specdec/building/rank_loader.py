"""Loading of what every rank has: kernels, and its part of the target."""

from dataclasses import replace

import torch

from specdec.config import EngineConfig
from specdec.core.device import DTYPES
from specdec.core.launch import current_launch
from specdec.kernels.kernel_set import KernelSet, choose_kernels
from specdec.models.adapter_layout import attach_adapters
from specdec.models.llama import LlamaModel, load_llama
from specdec.models.sharded_llama import load_shard
from specdec.parallel.rank_layout import RankGroups, RankLayout


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
    return replace(config, device=device, threads=config.threads or max(1, torch.get_num_threads() // size))


def kernels_of(config: EngineConfig) -> KernelSet:
    """Return the kernels that the settings ask for.

    Raises:
        ValueError: see `choose_kernels`.
    """
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    return choose_kernels(config.kernels, device, dtype, config.threads, config.quantization)


def load_target(config: EngineConfig, kernels: KernelSet, groups: RankGroups | None) -> LlamaModel:
    """Load the target, or this rank's part of it, with a bank for adapters if it is to have any.

    Raises:
        CheckpointError: see `load_llama`.
        ValueError: the model cannot be split over the ranks.
    """
    where = DTYPES[config.dtype], torch.device(config.device)
    if groups is None:
        model = load_llama(config.model, *where, kernels)
    else:
        model = load_shard(config.model, *where, kernels, groups)
    if config.enable_lora:
        attach_adapters(model, kernels, config.max_loras, config.max_lora_rank)
    return model
