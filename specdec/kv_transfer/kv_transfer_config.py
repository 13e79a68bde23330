"""The setting `kv_transfer_config`: strict JSON by vLLM's and Mooncake's names, and its tiers. Pure Python."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
ROLES = get_args(KVRole)
# An engine's part of a split of prefill and decoding.
Role = Literal["both", "prefill", "decode"]
ROLES_OF_A_SPLIT: tuple[Role, Role] = ("decode", "prefill")
_ROLE_OF: Mapping[KVRole, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
OFFLOADING, MOONCAKE, MULTI = "OffloadingConnector", "MooncakeStoreConnector", "MultiConnector"
# Host memory where none is given, which blocks pass on the way to and from stores; a folder's limit.
_HOST_BYTES, _DISK_BYTES = 1 << 30, 10 << 30
_OPTION = "kv_transfer_config"
_LOOPBACK = "127.0.0.1"
# Settings of the host memory that all tiers share.
_COMMON = ("cpu_bytes_to_use", "load_timeout", "cache_prefix")


@dataclass(frozen=True)
class KVTransferConfig:
    """The connector of an engine.

    Attributes:
        kv_connector: its name; see `connector_factory.py`.
        kv_role: "kv_producer" only stores blocks, "kv_consumer" only loads them, "kv_both" does both.
        kv_load_failure_policy: "recompute": the tokens of blocks that cannot be loaded are computed.
        kv_connector_extra_config: settings of the connector.
        kv_connector_module_path: Python module of a connector that is not built in.
    """

    kv_connector: str
    kv_role: KVRole = "kv_both"
    kv_load_failure_policy: Literal["recompute"] = "recompute"
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_connector_module_path: str | None = None

    @property
    def stores(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def role(self) -> Role:
        """The engine's role that `kv_role` implies."""
        return _ROLE_OF[self.kv_role]


KEYS = tuple(each.name for each in fields(KVTransferConfig))


def parse_kv_transfer_config(
    given: KVTransferConfig | str | Mapping[str, Any], option: str = _OPTION
) -> KVTransferConfig:
    """Read vLLM's object, or its JSON, strictly.

    Args:
        option: what the messages call it.

    Raises:
        ValueError: no JSON object, an unknown key, or a value that is not supported.
    """
    if isinstance(given, KVTransferConfig):
        return given
    config = read_object(given, option)
    check_keys(config, KEYS, option)
    connector, role = config.get("kv_connector"), config.get("kv_role", "kv_both")
    if not isinstance(connector, str) or not connector:
        raise ValueError(f"{option} has kv_connector {connector!r}; it must be the name of a connector")
    if role not in ROLES:
        raise ValueError(f"{option} has kv_role {role!r}; it must be one of {', '.join(ROLES)}")
    policy = config.get("kv_load_failure_policy", "recompute")
    if policy != "recompute":
        raise ValueError(
            f"{option} has kv_load_failure_policy {policy!r}; it must be 'recompute': a failed load never fails a "
            "request"
        )
    extra, module = config.get("kv_connector_extra_config"), config.get("kv_connector_module_path")
    if not isinstance(extra, Mapping | None):
        raise ValueError(f"{option} has kv_connector_extra_config {extra!r}; it must be a JSON object")
    if module is not None and not isinstance(module, str):
        raise ValueError(f"{option} has kv_connector_module_path {module!r}; it must be the name of a Python module")
    return KVTransferConfig(connector, role, "recompute", dict(extra or {}), module)


def read_object(given: Any, option: str) -> Mapping[str, Any]:
    """Return a JSON object, given as text or as a mapping.

    Raises:
        ValueError: it is anything else.
    """
    config = given
    if isinstance(given, str):
        try:
            config = json.loads(given)
        except ValueError as error:
            raise ValueError(f"{option} is {given!r}; it must be a JSON object: {error}") from None
    if not isinstance(config, Mapping):
        raise ValueError(f"{option} is {given!r}; it must be a JSON object")
    return config


def check_keys(config: Mapping[str, Any], known: tuple[str, ...], option: str) -> None:
    """Refuse unknown keys.

    Raises:
        ValueError: names the first unknown key and the known ones.
    """
    for key in config:
        if key not in known:
            raise ValueError(f"{option} has the unknown key {key!r}; known are {', '.join(known)}")


@dataclass(frozen=True)
class MooncakeSettings:
    """Settings by the names of Mooncake's own configuration.

    Attributes:
        master_server_address: host:port of `mooncake_master`.
        metadata_server: URL of its metadata server, or "P2PHANDSHAKE".
        local_hostname: this machine's name for the others, with a port or without. Rank r uses the port plus r.
        protocol: "tcp" or "rdma".
        device_name: devices of RDMA, "" for none.
        global_segment_size: bytes of memory for the pool, of each rank's process.
        local_buffer_size: bytes of Mooncake's own transfer buffer.
    """

    master_server_address: str
    metadata_server: str
    local_hostname: str = _LOOPBACK
    protocol: str = "tcp"
    device_name: str = ""
    global_segment_size: int = 1 << 30
    local_buffer_size: int = 64 << 20

    def of_rank(self, rank: int) -> "MooncakeSettings":
        """Return the settings of a rank's client, which needs a port of its own."""
        host, _, port = self.local_hostname.rpartition(":")
        if not rank or not host:
            return self
        return replace(self, local_hostname=f"{host}:{int(port) + rank}")


@dataclass
class Tiers:
    """Tiers that a configuration asks for.

    Attributes:
        cpu_bytes_to_use: bytes of host memory.
        load_timeout: seconds after which a request no longer waits for its blocks.
        cache_prefix: separates deployments that share a store.
        disks: folders and their limits in bytes.
        pools: Mooncake stores.
    """

    cpu_bytes_to_use: int = _HOST_BYTES
    load_timeout: float = 5.0
    cache_prefix: str = ""
    disks: list[tuple[Path, int]] = field(default_factory=list)
    pools: list[MooncakeSettings] = field(default_factory=list)


def tiers_of(config: KVTransferConfig) -> Tiers:
    """Return the tiers of a connector that is built in.

    Raises:
        ValueError: an unknown connector, or a setting that it does not have or that is outside its range.
    """
    tiers = Tiers()
    _add(config, tiers)
    return tiers


def may_share(config: KVTransferConfig) -> bool:
    """Return whether other engines can find what the connector stores; of one that is not built in this is assumed."""
    if config.kv_connector_module_path is not None:
        return True
    tiers = tiers_of(config)
    return bool(tiers.disks or tiers.pools)


def _add(config: KVTransferConfig, tiers: Tiers) -> None:
    """Add the tiers of a configuration."""
    name, extra = config.kv_connector, dict(config.kv_connector_extra_config)
    what = f"kv_connector_extra_config of {name}"
    if name not in (OFFLOADING, MOONCAKE, MULTI):
        raise ValueError(f"{_OPTION} has kv_connector {name!r}; it must be one of {OFFLOADING}, {MOONCAKE}, {MULTI}")
    if name == MULTI:
        check_keys(extra, ("connectors", *_COMMON), what)
        extra |= _of_parts(config, extra.get("connectors"), what, tiers)
    for key, least in (("cpu_bytes_to_use", 1), ("load_timeout", 0)):
        if key in extra:
            setattr(tiers, key, _number(what, key, extra.pop(key), least))
    if "cache_prefix" in extra:
        tiers.cache_prefix = _text(what, "cache_prefix", extra.pop("cache_prefix"))
    if name == MULTI:
        return
    if name == MOONCAKE:
        tiers.pools.append(_pool(extra, what, _COMMON))
        return
    check_keys(extra, ("secondary_tiers", *_COMMON), what)
    seconds = extra.get("secondary_tiers", [])
    if not isinstance(seconds, list) or not all(isinstance(each, Mapping) for each in seconds):
        raise ValueError(f"{what} has secondary_tiers {seconds!r}; it must be a list of objects")
    for second in seconds:
        _add_secondary(second, tiers)


def _of_parts(config: KVTransferConfig, parts: Any, what: str, tiers: Tiers) -> dict[str, Any]:
    """Add the tiers of a `MultiConnector`'s parts; return what they set for all.

    Each of vLLM's parts has its role, and one its host memory. All parts here share both, so one may give them, and
    others no other ones.
    """
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"{what} has connectors {parts!r}; it must be a list of configurations")
    shared = {key: value for key, value in config.kv_connector_extra_config.items() if key == "cpu_bytes_to_use"}
    for part in parts:
        own = parse_kv_transfer_config({"kv_role": config.kv_role, **read_object(part, "connectors")}, "connectors")
        if own.kv_connector_module_path is not None or own.kv_connector == MULTI:
            raise ValueError(f"{what} has {own.kv_connector!r}; it must be {OFFLOADING} or {MOONCAKE}")
        if own.kv_role != config.kv_role:
            raise ValueError(
                f"connectors has kv_role {own.kv_role!r} beside {config.kv_role!r} of {MULTI}; all parts have one role"
            )
        extra = dict(own.kv_connector_extra_config)
        for key in filter(extra.__contains__, _COMMON):
            value = extra.pop(key)
            if key != "cpu_bytes_to_use" or shared.setdefault(key, value) != value:
                raise ValueError(
                    f"connectors has {key} {value!r} in {own.kv_connector}; it is one for all parts: give it beside "
                    f"connectors, in {what}"
                )
        _add(replace(own, kv_connector_extra_config=extra), tiers)
    return shared


def _add_secondary(second: Mapping[str, Any], tiers: Tiers) -> None:
    what, kind = "secondary_tiers", second.get("type")
    rest = {key: value for key, value in second.items() if key != "type"}
    if kind == "fs":
        check_keys(rest, ("root_dir", "max_bytes"), what)
        if "root_dir" not in rest:
            raise ValueError(f"{what} has a tier 'fs' without root_dir; give a folder")
        most = _number(what, "max_bytes", rest.get("max_bytes", _DISK_BYTES), 1)
        tiers.disks.append((Path(_text(what, "root_dir", rest["root_dir"])), int(most)))
    elif kind == "mooncake":
        tiers.pools.append(_pool(rest, what, ()))
    else:
        raise ValueError(f"{what} has type {kind!r}; it must be 'fs' or 'mooncake'")


def _pool(extra: Mapping[str, Any], what: str, others: tuple[str, ...]) -> MooncakeSettings:
    known = fields(MooncakeSettings)
    check_keys(extra, (*(each.name for each in known), *others), what)
    given: dict[str, Any] = {}
    for each in known:
        if each.name not in extra:
            if each.default is MISSING:
                raise ValueError(f"{what} lacks {each.name}; give it")
        elif each.type is int or each.type == "int":
            given[each.name] = _number(what, each.name, extra[each.name], 1)
        else:
            given[each.name] = _text(what, each.name, extra[each.name])
    address = given["master_server_address"]
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{what} has master_server_address {address!r}; it must be HOST:PORT")
    return MooncakeSettings(**given)


def _number(what: str, key: str, value: Any, least: int) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        raise ValueError(f"{what} has {key} {value!r}; it must be a number of at least {least}")
    if key != "load_timeout" and value != int(value):
        raise ValueError(f"{what} has {key} {value!r}; it must be a whole number")
    return value if key == "load_timeout" else int(value)


def _text(what: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} has {key} {value!r}; it must be text")
    return value
