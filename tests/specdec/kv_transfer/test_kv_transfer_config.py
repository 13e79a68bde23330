"""The setting `kv_transfer_config`: strict, and every mistake in one line."""

from typing import Any

import pytest

from specdec.building.llm_settings import engine_config
from specdec.kv_transfer.kv_transfer_config import MooncakeSettings, Tiers, parse_kv_transfer_config, tiers_of

POOL = {"master_server_address": "127.0.0.1:50051", "metadata_server": "http://127.0.0.1:8080/metadata"}


def tiers(connector: str, **extra: Any) -> Tiers:
    return tiers_of(parse_kv_transfer_config({"kv_connector": connector, "kv_connector_extra_config": extra}))


def test_json_and_objects_are_read_alike() -> None:
    text = '{"kv_connector": "OffloadingConnector", "kv_role": "kv_consumer", "kv_load_failure_policy": "recompute"}'
    config = parse_kv_transfer_config(text)
    assert config == parse_kv_transfer_config({"kv_connector": "OffloadingConnector", "kv_role": "kv_consumer"})
    assert (config.loads, config.stores) == (True, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "must be a JSON object"),
        ([], "must be a JSON object"),
        ({}, "kv_connector None"),
        ({"kv_connector": "OffloadingConnector", "kv_port": 1}, "unknown key 'kv_port'; known are kv_connector,"),
        ({"kv_connector": "OffloadingConnector", "kv_role": "both"}, "kv_role 'both'"),
        ({"kv_connector": "OffloadingConnector", "kv_load_failure_policy": "fail"}, "must be 'recompute'"),
        ({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": 3}, "extra_config 3"),
        ({"kv_connector": "x", "kv_connector_module_path": 3}, "module_path 3"),
    ],
)
def test_mistakes_are_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_kv_transfer_config(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("connector", "extra", "message"),
    [
        ("Nixl", {}, "kv_connector 'Nixl'; it must be one of OffloadingConnector, MooncakeStoreConnector,"),
        ("OffloadingConnector", {"cpu_bytes": 1}, "unknown key 'cpu_bytes'"),
        ("OffloadingConnector", {"cpu_bytes_to_use": 0}, "cpu_bytes_to_use 0"),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1.5}, "whole number"),
        ("OffloadingConnector", {"secondary_tiers": {}}, "must be a list"),
        ("OffloadingConnector", {"secondary_tiers": [{"type": "tape"}]}, "type 'tape'"),
        ("OffloadingConnector", {"secondary_tiers": [{"type": "fs"}]}, "without root_dir"),
        ("OffloadingConnector", {"secondary_tiers": [{"type": "fs", "root_dir": 3}]}, "root_dir 3"),
        ("MooncakeStoreConnector", {}, "lacks master_server_address"),
        ("MooncakeStoreConnector", {**POOL, "global_segment_size": "1"}, "global_segment_size '1'"),
        ("MooncakeStoreConnector", {**POOL, "master_server_address": "pool"}, "'pool'; it must be HOST:PORT"),
        ("MultiConnector", {}, "connectors None"),
        (
            "MultiConnector",
            {"connectors": [{"kv_connector": "OffloadingConnector", "kv_role": "kv_consumer"}]},
            "connectors has kv_role 'kv_consumer' beside 'kv_both' of MultiConnector",
        ),
        (
            "MultiConnector",
            {"connectors": [{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"load_timeout": 2}}]},
            "connectors has load_timeout 2 in OffloadingConnector; it is one for all parts: give it beside connectors",
        ),
        (
            "MultiConnector",
            {
                "connectors": [
                    {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": most}}
                    for most in (5, 6)
                ]
            },
            "connectors has cpu_bytes_to_use 6 in OffloadingConnector; it is one for all parts",
        ),
        ("MultiConnector", {"connectors": [{"kv_connector": "MultiConnector"}]}, "must be OffloadingConnector or"),
    ],
)
def test_mistakes_in_settings_of_connectors_are_named(connector: str, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiers(connector, **extra)


def test_tiers_are_stacked_in_the_order_given() -> None:
    disk = {"type": "fs", "root_dir": "/a", "max_bytes": 5}
    offloading = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"secondary_tiers": [disk]}}
    mooncake = {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": POOL}
    both = tiers("MultiConnector", connectors=[offloading, mooncake], load_timeout=0.5)
    assert [(str(root), most) for root, most in both.disks] == [("/a", 5)]
    assert both.pools == [MooncakeSettings(**POOL)]
    assert both.load_timeout == 0.5
    inside = tiers("OffloadingConnector", secondary_tiers=[disk, {"type": "mooncake", **POOL}])
    assert (inside.disks, inside.pools) == (both.disks, both.pools)


def test_parts_may_say_what_holds_for_all() -> None:
    """As vLLM's do, each of which has a role, and one the host memory."""
    parts = [
        {"kv_role": "kv_consumer", "kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
        for extra in ({"cpu_bytes_to_use": 5e9}, {"secondary_tiers": [{"type": "fs", "root_dir": "/a"}]})
    ]
    given = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"}
    found = tiers_of(parse_kv_transfer_config({**given, "kv_connector_extra_config": {"connectors": parts}}))
    assert (found.cpu_bytes_to_use, len(found.disks)) == (5_000_000_000, 1)


def test_sizes_are_whole_numbers_however_json_writes_them() -> None:
    (pool,) = tiers("MooncakeStoreConnector", **POOL, global_segment_size=1e9).pools
    assert (pool.global_segment_size, type(pool.global_segment_size)) == (10**9, int)


def test_each_rank_has_a_port_of_its_own() -> None:
    given = MooncakeSettings(**POOL, local_hostname="10.0.0.1:7000")
    assert [given.of_rank(rank).local_hostname for rank in (0, 2)] == ["10.0.0.1:7000", "10.0.0.1:7002"]
    assert MooncakeSettings(**POOL).of_rank(1) == MooncakeSettings(**POOL)


def test_an_engine_checks_it_before_it_loads_anything() -> None:
    connector = {"kv_connector": "OffloadingConnector"}
    with pytest.raises(ValueError, match="leave enable_prefix_caching on"):
        engine_config({"kv_transfer_config": connector, "enable_prefix_caching": False})
    with pytest.raises(ValueError, match="kv_connector 'x'"):
        engine_config({"kv_transfer_config": {"kv_connector": "x"}})
