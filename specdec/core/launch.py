"""Processes that a launcher such as torchrun has started together, by its environment. Pure Python."""

import os
from collections.abc import Mapping
from typing import NamedTuple


class Launch(NamedTuple):
    """Place of this process among those of a launcher.

    Attributes:
        rank, size: number of the process, and of processes.
        local_rank, local_size: the same on this machine.
        address: of the machine of rank 0.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str


def current_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the place of this process; None without a launcher, or if it has started no other process.

    Raises:
        ValueError: variables that are missing or are no such numbers.
    """
    if environment.get("WORLD_SIZE", "1") == "1" or "RANK" not in environment:
        return None
    size = _number(environment, "WORLD_SIZE", 1, None)
    rank = _number(environment, "RANK", 0, size - 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size, size)
    local_rank = _number(environment, "LOCAL_RANK", 0, local_size - 1, rank)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environment.get(name):
            raise ValueError(f"WORLD_SIZE is {size} and {name} is not set; start the ranks with torchrun")
    return Launch(rank, size, local_rank, local_size, environment["MASTER_ADDR"])


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None, default: int | None = None) -> int:
    value = environment.get(name, str(default))
    if not value.isdecimal() or int(value) < least or (most is not None and int(value) > most):
        wanted = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"the environment variable {name} is {value!r}; it must be {wanted}")
    return int(value)
