"""The setting `kv_transfer_config`: vLLM's keys as strict JSON. Pure Python."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
ROLES = get_args(KVRole)
# An engine's part of a split of prefill and decoding.
Role = Literal["both", "prefill", "decode"]
ROLES_OF_A_SPLIT: tuple[Role, Role] = ("decode", "prefill")
_ROLE_OF: Mapping[KVRole, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


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
    given: KVTransferConfig | str | Mapping[str, Any], option: str = "kv_transfer_config"
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
