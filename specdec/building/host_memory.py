"""Checks of the memory that an engine allocates at start against the memory that is available."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from specdec.building.ranks import layout_of
from specdec.config import EngineConfig
from specdec.core.launch import current_launch
from specdec.kernels.types.text_store import BYTES_PER_TOKEN
from specdec.kv_transfer.kv_transfer_config import tiers_of

GIB = 1 << 30


def check_memory(config: EngineConfig) -> None:
    """Check that this machine has the memory that the settings ask for, of all its ranks together.

    That is host memory for `draft_store_tokens` and `cpu_bytes_to_use`, and on a CPU for
    `kv_cache_memory`, which on a GPU is the GPU's. With a GPU all host memory but the store is pinned when the engine
    starts: the system can take none of it back. Of ranks in Ray actors, whose machines are not known, the first alone
    is counted.

    Raises:
        ValueError: it has less.
    """
    size, launch = layout_of(config).size, current_launch()
    here = 1 if config.distributed_executor_backend == "ray" else size
    if launch is not None:
        here = min(size, launch.local_size)
    each = f" on each of {here} ranks" if here > 1 else ""
    taken, settings, cache = 0.0, list[str](), config.kv_cache_memory
    if cache is not None and config.device == "cpu":
        taken += here * cache
        settings.append(f"kv_cache_memory is {cache} ({cache / GIB:.3g} GiB){each}")
    elif cache is not None:
        _check_gpu_memory(config.device, cache)
    if config.drafts_from_store:
        store = int(config.draft_store_tokens * BYTES_PER_TOKEN)
        taken += here * store
        settings.append(f"draft_store_tokens is {config.draft_store_tokens} ({store / GIB:.3g} GiB){each}")
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector_module_path is None:
        of_all = tiers_of(transfer).cpu_bytes_to_use
        taken += of_all * here / size
        settings.append(f"cpu_bytes_to_use is {of_all} ({of_all / GIB:.3g} GiB)")
    if taken > (available := available_memory()):
        raise ValueError(
            f"{' and '.join(settings)}; this machine has {available / GIB:.3g} GiB of memory available; "
            f"lower {'it' if len(settings) == 1 else 'them'}"
        )


def check_cache(num_bytes: int, config: EngineConfig) -> None:
    """Check that a CPU's memory holds a cache beside the weights that are loaded by now.

    Memory that is not touched is not taken, so that without this a cache would be found too large while requests run.

    Raises:
        ValueError: it does not.
    """
    if config.device == "cpu" and num_bytes > (available := available_memory()):
        raise ValueError(
            f"the cache takes {num_bytes / GIB:.3g} GiB; beside the weights this machine has {available / GIB:.3g} GiB "
            "of memory available; lower kv_cache_memory, which is 1 GiB by default"
        )


def _check_gpu_memory(device: str, cache: int) -> None:
    if device.startswith("cuda") and cache > (total := torch.cuda.mem_get_info(torch.device(device))[1]):
        raise ValueError(
            f"kv_cache_memory is {cache} ({cache / GIB:.3g} GiB); {device} has {total / GIB:.3g} GiB of memory; "
            "lower it"
        )


def available_memory(root: Path = Path("/")) -> int:
    """Return how many bytes of memory this process can still take, of the machine's and of its container's limit.

    Limits are those of control groups (cgroup v2). What caches of files hold counts as available. A system without
    /proc/meminfo tells all the memory that it has.

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([available, *_left_in_groups(root)])


def _left_in_groups(root: Path) -> list[int]:
    """Return what this process's control group, and each one around it, has left of its limit."""
    top = root / "sys/fs/cgroup"
    try:
        own = next(line[3:] for line in (root / "proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    folder, left = top / own.lstrip("/"), []
    for group in [folder, *folder.parents]:
        # The outermost group of a machine has no such files.
        with suppress(OSError):
            most, used, stat = ((group / f"memory.{name}").read_text() for name in ("max", "current", "stat"))
            caches = next(int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file "))
            if most.strip() != "max":
                left.append(max(0, int(most) - int(used) + caches))
        if group == top:
            break
    return left
