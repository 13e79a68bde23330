"""Host memory of an engine is refused where the machine does not have it, before anything is loaded."""

import os
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM
from specdec.building import host_memory
from specdec.building.host_memory import available_memory, check_memory
from specdec.building.llm_settings import engine_config
from specdec.config import EngineConfig
from specdec.kv_transfer.kv_transfer_config import KVTransferConfig

GIB = 1 << 30
HAS = 10 * GIB


def host(size: int, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig("OffloadingConnector", kv_connector_extra_config={"cpu_bytes_to_use": size}, **extra)


@pytest.fixture
def ten_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: HAS)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (40 * GIB, 80 * GIB))


@pytest.mark.usefixtures("ten_gib")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kv_transfer_config": host(11 * GIB)},
            "cpu_bytes_to_use is 11811160064 (11 GiB); this machine has 10 GiB of memory available; lower it",
        ),
        (
            {"device": "cpu", "kv_cache_memory": 6 * GIB, "kv_transfer_config": host(5 * GIB)},
            "kv_cache_memory is 6442450944 (6 GiB) and cpu_bytes_to_use is 5368709120 (5 GiB); this machine has 10 GiB "
            "of memory available; lower them",
        ),
        (
            {"device": "cpu", "kv_cache_memory": 4 * GIB, "tensor_parallel_size": 3},
            "kv_cache_memory is 4294967296 (4 GiB) on each of 3 ranks; this machine has 10 GiB of memory available; "
            "lower it",
        ),
        (
            {
                "device": "cpu",
                "kv_cache_memory": 5 * GIB // 2,
                "pipeline_parallel_size": 2,
                "kv_transfer_config": host(6 * GIB),
            },
            "kv_cache_memory is 2684354560 (2.5 GiB) on each of 2 ranks and cpu_bytes_to_use is 6442450944 (6 GiB); "
            "this machine has 10 GiB of memory available; lower them",
        ),
        (
            {"device": "cpu", "kv_cache_memory": 100 * GIB},
            "kv_cache_memory is 107374182400 (100 GiB); this machine has 10 GiB of memory available; lower it",
        ),
        (
            {"device": "cpu", "kv_cache_memory": 6 * GIB, "tensor_parallel_size": 2},
            "kv_cache_memory is 6442450944 (6 GiB) on each of 2 ranks; this machine has 10 GiB of memory available; "
            "lower it",
        ),
        (
            {"device": "cuda:1", "kv_cache_memory": 100 * GIB},
            "kv_cache_memory is 107374182400 (100 GiB); cuda:1 has 80 GiB of memory; lower it",
        ),
    ],
)
def test_more_than_is_available_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_memory(EngineConfig(**settings))
    assert str(error.value) == message


@pytest.mark.usefixtures("ten_gib")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"device": "cpu", "kv_cache_memory": 10 * GIB},
        # The cache is the GPU's.
        {"device": "cuda:1", "kv_cache_memory": 80 * GIB, "kv_transfer_config": host(10 * GIB)},
        {"device": "cpu", "kv_cache_memory": 5 * GIB, "kv_transfer_config": host(5 * GIB)},
        # All ranks together have so much.
        {
            "device": "cpu",
            "kv_cache_memory": 2 * GIB,
            "tensor_parallel_size": 2,
            "kv_transfer_config": host(6 * GIB),
        },
        {
            "device": "cpu",
            "kv_cache_memory": 6 * GIB,
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "ray",
        },
        {"kv_transfer_config": host(11 * GIB, kv_connector_module_path="a.module")},
    ],
)
def test_settings_within_the_memory_are_taken(settings: dict[str, Any]) -> None:
    check_memory(EngineConfig(**settings))


@pytest.mark.usefixtures("ten_gib")
def test_ranks_of_a_launcher_are_counted_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    config = EngineConfig(device="cpu", kv_cache_memory=3 * GIB, tensor_parallel_size=8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_memory(config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"3221225472 \(3 GiB\) on each of 4 ranks; this machine has"):
        check_memory(config)


@pytest.mark.usefixtures("ten_gib")
def test_an_engine_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the target is loaded")

    monkeypatch.setattr("specdec.building.build.load_target", never)
    with pytest.raises(
        ValueError,
        match=r"kv_cache_memory is 11811160064 \(11 GiB\); this machine has 10 GiB",
    ):
        LLM(kv_cache_memory=11 * GIB)


@pytest.mark.long
def test_a_cache_that_does_not_fit_beside_the_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: GIB // 2)
    message = r"the cache takes \S+ GiB; beside the weights this machine has 0.5 GiB of memory available; lower kv_"
    with pytest.raises(ValueError, match=message):
        LLM(draft=None, device="cpu")
    LLM(draft=None, device="cpu", kv_cache_memory="100MiB").close()


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        *[("4GiB", 4 * GIB), ("4 gib", 4 * GIB), ("4G", 4 * GIB), ("1.5K", 1536), ("2MB", 2_000_000), ("77", 77)],
        *[(5, 5), ("0.5TiB", GIB << 9)],
    ],
)
def test_sizes_have_units(size: str | int, num_bytes: int) -> None:
    assert engine_config({"kv_cache_memory": size}).kv_cache_memory == num_bytes


@pytest.mark.parametrize("size", ["", "GiB", "4 gigs", "-4GiB", "1.5", "4e9", "9" * 30])
def test_other_sizes_are_refused(size: str) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_memory is '{size}'; it must be a number of bytes, or a size such"):
        engine_config({"kv_cache_memory": size})


def meminfo(root: Path, kibibytes: int) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   {kibibytes} kB\n")


def group(folder: Path, most: str, used: int, caches: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {caches}\nactive_file 9\n")


def test_a_machine_tells_what_is_available(tmp_path: Path) -> None:
    meminfo(tmp_path, 40)
    assert available_memory(tmp_path) == 40 << 10
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/v1\n")
    assert available_memory(tmp_path) == 40 << 10


def test_a_machine_that_tells_nothing_has_all_its_memory(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("path", ["/", "/outer", "/outer/inner", "/../outer"])
def test_the_tightest_limit_of_all_groups_counts(tmp_path: Path, path: str) -> None:
    meminfo(tmp_path, 40)
    (tmp_path / "proc/self/cgroup").write_text(f"4:memory:/v1\n0::{path}\n")
    top = tmp_path / "sys/fs/cgroup"
    group(top / "outer/inner", "max", 9000, 0)
    group(top / "outer", "20000", 9000, 1000)
    inside = path.startswith("/outer")
    assert available_memory(tmp_path) == (12_000 if inside else 40 << 10)
    # In a container its own group is the outermost one.
    group(top, "5000", 6000, 100)
    assert available_memory(tmp_path) == 0
