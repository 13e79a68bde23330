"""A Mooncake master of a test's own, on loopback."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

IS_INSTALLED = find_spec("mooncake") is not None and shutil.which("mooncake_master") is not None
HAS_LIBRARIES = all(map(find_library, ("ibverbs", "rdmacm", "numa")))
needs_mooncake = pytest.mark.skipif(
    not (IS_INSTALLED and HAS_LIBRARIES), reason="Mooncake, libibverbs1, librdmacm1 or libnuma1 is not installed"
)


class Master:
    """A running `mooncake_master` with its metadata server.

    Args:
        log: file of its messages.
    """

    def __init__(self, log: Path) -> None:
        # Loopback alone; read by Mooncake's library when it is first used.
        os.environ |= {"MC_LEGACY_RPC_PORT_BINDING": "1", "MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "FATAL"}
        os.environ.setdefault("GLOG_minloglevel", "3")
        self._rpc, self._http, metrics = (_free_port() for _ in range(3))
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._rpc,
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": self._http,
            "metrics_port": metrics,
            "default_kv_lease_ttl": 500,
        }
        with log.open("w") as out:
            command = ["mooncake_master", *(f"--{name}={value}" for name, value in options.items())]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        for port in (self._rpc, self._http):
            _wait_for(port)

    def config(self, **extra: Any) -> dict[str, Any]:
        """Return the `kv_transfer_config` of an engine that shares the pool."""
        own = {
            "master_server_address": f"127.0.0.1:{self._rpc}",
            "metadata_server": f"http://127.0.0.1:{self._http}/metadata",
            "global_segment_size": 32 << 20,
            "local_buffer_size": 16 << 20,
            "cpu_bytes_to_use": 16 << 20,
            "load_timeout": 20,
            **extra,
        }
        return {"kv_connector": "MooncakeStoreConnector", "kv_connector_extra_config": own}

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def mooncake_master(folder: Path) -> Iterator[Master]:
    """Run a master."""
    master = Master(folder / "master.log")
    try:
        yield master
    finally:
        master.kill()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise TimeoutError(f"nothing listens at port {port}")
