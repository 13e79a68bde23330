"""Host memory of connectors on a GPU: they pin what was asked for, and give it back."""

import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specdec import LLM
from specdec.cache.kv_cache import KVCache, KVDtypes, entry_bytes
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.kv_transfer.connector_factory import ConnectorContext, make_connector
from specdec.kv_transfer.kv_connector import KVCaches
from specdec.kv_transfer.kv_transfer_config import KVTransferConfig
from specdec.kv_transfer.transfers import Save
from tests.fakes import save_random_head, save_random_llama
from tests.kernel_sets import TORCH
from tests.simulated_gpu import GPU, SimulatedGPU, simulated_gpu

GIB = 1 << 30
# Keys and values, a head's, and features, each rounded up to whole pages.
WASTE = 3 * (mmap.PAGESIZE - 1)


class Geometry(NamedTuple):
    """Sizes of a cache; `feature_size` is that of a head of one layer, None without one."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    feature_size: int | None
    dtype: torch.dtype
    kv_dtype: torch.dtype


geometries = st.builds(
    Geometry,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([16, 24, 64]),
    st.sampled_from([8, 16]),
    st.sampled_from([None, 0, 48, 100]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.int8]),
)
# Just above a power of two.
LARGE = Geometry(2, 2, 64, 16, 100, torch.float32, torch.bfloat16)


def llama(geometry: Geometry, num_layers: int) -> LlamaConfig:
    heads = geometry.num_kv_heads
    size = heads * geometry.head_dim
    return LlamaConfig(50, size, size, num_layers, heads, heads, geometry.head_dim, 64, 1e-5, RopeConfig())


def cache_of(geometry: Geometry, num_blocks: int) -> tuple[KVCache, int]:
    """Return a cache on the GPU, and the bytes of a block."""
    target, head = llama(geometry, geometry.num_layers), None
    if geometry.feature_size is not None:
        head: Any = SimpleNamespace(llama=llama(geometry, 1), feature_size=geometry.feature_size)  # type: ignore[no-redef]
    kv_dtypes = KVDtypes(geometry.kv_dtype, geometry.dtype)
    sizes = (target, head, geometry.dtype)
    cache = KVCache(num_blocks, geometry.block_size, *sizes, GPU, kernels=TORCH, kv_dtypes=kv_dtypes)
    return cache, geometry.block_size * entry_bytes(*sizes, kv_dtypes)


def no_keys(_: str) -> Callable[[str, bytes], str]:
    return lambda part, block_hash: f"{part}/{block_hash.hex()}"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGPU]:
    with simulated_gpu(monkeypatch) as gpu:
        yield gpu
        gc.collect()
        gpu.pinned.check()
        assert gpu.pinned.taken == 0


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(geometries, st.integers(2, 70), st.integers(0, 1 << 20))
@example(LARGE, 33, 0)
def test_a_connector_takes_what_was_asked(gpu: SimulatedGPU, geometry: Geometry, num_blocks: int, rest: int) -> None:
    cache, block_bytes = cache_of(geometry, 2)
    asked = num_blocks * block_bytes + rest % block_bytes
    config = KVTransferConfig("OffloadingConnector", kv_connector_extra_config={"cpu_bytes_to_use": asked})
    caches = KVCaches(cache.parts, TORCH)
    connector = make_connector(config, ConnectorContext(caches, geometry.block_size, no_keys, block_bytes))
    assert num_blocks * block_bytes <= gpu.pinned.taken <= asked + WASTE
    connector.shutdown()
    del connector
    assert gpu.pinned.taken == 0


@pytest.mark.parametrize("loads", [False, True])
def test_copies_are_done_before_host_memory_is_freed(gpu: SimulatedGPU, loads: bool) -> None:
    cache, block_bytes = cache_of(LARGE, 2)
    config = KVTransferConfig("OffloadingConnector", kv_connector_extra_config={"cpu_bytes_to_use": 4 * block_bytes})
    context = ConnectorContext(KVCaches(cache.parts, TORCH), LARGE.block_size, no_keys, block_bytes)
    connector = make_connector(config, context)
    with torch.cuda.device(GPU):
        if loads:
            connector.start_load_kv([1], [0])
        else:
            connector.wait_for_save([Save(0, 1, b"", frozenset(cache.parts), False)])
    gpu.waits.clear()
    connector.shutdown()
    assert gpu.waits == ["specdec.kv_transfer.host_blocks: synchronize of an event"]


@pytest.mark.long
def test_an_engine_takes_what_was_asked(gpu: SimulatedGPU, tmp_path: Path) -> None:
    save_random_llama(tmp_path / "target", head_dim=16)
    save_random_head(tmp_path / "head", head_dim=16)
    asked = 500_000
    transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": asked}}
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 8, "max_model_len": 48, "kv_cache_memory": 1 << 18}
    with LLM(
        tmp_path / "target", tmp_path / "head", device="cuda", kv_transfer_config=transfer,
        kernels="torch", adaptive_drafts=False, **settings,
    ):  # fmt: skip
        gc.collect()
        assert 0.95 * asked < gpu.pinned.taken <= asked + WASTE
