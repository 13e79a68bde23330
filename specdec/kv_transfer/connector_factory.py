"""From the setting `kv_transfer_config` to a connector."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.kv_transfer.block_store import HEADER_SIZE, BlockStore
from specdec.kv_transfer.disk_store import DiskStore, rank_folder
from specdec.kv_transfer.kv_connector import KVCaches, KVConnector
from specdec.kv_transfer.kv_transfer_config import KVTransferConfig, tiers_of
from specdec.kv_transfer.mooncake_store import MooncakeStore
from specdec.kv_transfer.notes import Notes
from specdec.kv_transfer.offloading_connector import OffloadingConnector
from specdec.kv_transfer.transfers import MOST_AT_ONCE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectorContext:
    """Facts of an engine that its connector needs.

    Attributes:
        caches: the device's cache, in this rank.
        block_size: tokens of a block.
        keys: returns the function that makes keys of a part and a block hash. Its argument is the prefix of the keys.
        block_bytes: size of a block in the rank where it is largest.
        rank: number of this process among those of `caches.num_ranks`.
    """

    caches: KVCaches
    block_size: int
    keys: Callable[[str], Callable[[str, bytes], str]]
    block_bytes: int
    rank: int = 0


def make_connector(config: KVTransferConfig, context: ConnectorContext) -> KVConnector:
    """Return a connector that has the device's cache.

    A class of `kv_connector_module_path` is called with the configuration and the context.

    Raises:
        ValueError: an unknown connector, one that does not support several ranks, or one of its settings.
    """
    if config.kv_connector_module_path is not None:
        connector: KVConnector = _plug_in(config)(config, context)
    else:
        connector = _built_in(config, context)
    if context.caches.num_ranks > 1 and not connector.supports_ranks:
        raise ValueError(
            f"kv_connector {config.kv_connector!r} serves one rank (supports_ranks), and the model is split over "
            f"{context.caches.num_ranks}; use one rank, or another connector"
        )
    connector.register_kv_caches(context.caches)
    return connector


def _plug_in(config: KVTransferConfig) -> Any:
    path, name = config.kv_connector_module_path, config.kv_connector
    try:
        found = getattr(importlib.import_module(str(path)), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"kv_transfer_config has kv_connector {name!r} of module {path!r}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, KVConnector)):
        raise ValueError(f"kv_transfer_config has kv_connector {name!r} of module {path!r}; it must be a KVConnector")
    return found


def _built_in(config: KVTransferConfig, context: ConnectorContext) -> KVConnector:
    tiers, notes = tiers_of(config), Notes(logger)
    rank, ranks = context.rank, context.caches.num_ranks
    sizes = [part[0].numel() * part.element_size() for part in context.caches.parts.values()]
    # All ranks hold as many blocks.
    block_bytes = ranks * context.block_bytes
    num_blocks = tiers.cpu_bytes_to_use // block_bytes
    if num_blocks < 2:
        raise ValueError(
            f"cpu_bytes_to_use is {tiers.cpu_bytes_to_use}; it must hold two blocks of {block_bytes} bytes at least"
        )
    stores: list[BlockStore] = [
        DiskStore(rank_folder(root, rank, ranks), most // ranks, notes) for root, most in tiers.disks
    ]
    record = HEADER_SIZE + max(sizes)
    stores += [MooncakeStore(pool.of_rank(rank), record, MOST_AT_ONCE, notes) for pool in tiers.pools]
    names = ", ".join(["host memory", *(store.name for store in stores)])
    logger.info("%s: %s; %d blocks in host memory", config.kv_connector, names, num_blocks)
    return OffloadingConnector(
        num_blocks,
        context.block_size,
        stores,
        context.keys(tiers.cache_prefix) if stores else _no_key,
        notes,
        loads=config.loads,
        stores_blocks=config.stores,
        timeout=tiers.load_timeout,
    )


def _no_key(part: str, block_hash: bytes) -> str:
    """Stand for the keys of a connector without stores, so that no checkpoint is hashed for it."""
    raise AssertionError(f"no store is asked for {part} of {block_hash.hex()}")
