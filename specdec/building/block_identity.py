"""Identity of an engine's blocks: what must be equal for another engine, or a later one, to use them."""

from specdec.building.ranks import layout_of
from specdec.cache.kv_cache import KVCache
from specdec.config import EngineConfig
from specdec.draft_heads.heads.draft_head import CachedHead
from specdec.kv_transfer.cache_identity import BlockKeys, checkpoint_identity, identity, shape_of
from specdec.parallel.rank_layout import RankLayout


def block_keys(
    config: EngineConfig, cache: KVCache, head: CachedHead | None, rank: int = 0, prefix: str = ""
) -> BlockKeys:
    """Return the keys of a rank's part of the engine's blocks.

    Kernel sets and devices count, since their results may differ in the last bit.

    Args:
        prefix: separates deployments that share a store.
    """
    common = {
        "dtype": config.dtype,
        "device": cache.target.device.type,
        "kernels": cache.kernels.name,
        "quantization": config.quantization,
        "block_size": cache.block_size,
    }
    target = {
        **common,
        "kv": str(cache.target.dtype),
        "model": checkpoint_identity(config.model),
        "shape": shape_of(cache.parts, ["target"]),
    }
    place = place_of(layout_of(config), rank)
    if head is None or config.draft is None:
        return BlockKeys(identity(target), None, prefix, place)
    shape = shape_of(cache.parts, ["features", "head"])
    assert cache.draft is not None
    own = {
        **common,
        "kv": str(cache.draft.dtype),
        "head": checkpoint_identity(config.draft),
        "taps": head.taps,
        "windows": head.windows,
        "shape": shape,
    }
    if config.draft_tensor_parallel_size > 1:
        # Copied heads give a rank's part the shape that it has of a whole draft model.
        own["split"] = config.draft_tensor_parallel_size
    return BlockKeys(identity(target), identity(own), prefix, place)


def place_of(layout: RankLayout, rank: int) -> str:
    """Return the place of a rank as keys name it."""
    parts = [f"tp_size:{layout.tensor}"] if layout.tensor > 1 else []
    parts.append(f"tp_rank:{rank % layout.tensor}")
    if layout.stages > 1:
        parts += [f"pp_size:{layout.stages}", f"pp_rank:{layout.stage_of(rank)}"]
    return "@".join(parts)
