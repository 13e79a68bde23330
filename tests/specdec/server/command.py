"""`specdec serve` as a process."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.specdec.server.running import PATIENCE, Served

CHILDREN = "/proc/{0}/task/{0}/children"


class Command:
    """A running `specdec serve`."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process = process
        unused: Any = None
        self._served = Served(port, unused, unused, unused)

    @property
    def port(self) -> int:
        return self._served.port

    @property
    def engine_pid(self) -> int:
        """Process id of the engine process, a child of the server. Linux alone tells it."""
        (child,) = Path(CHILDREN.format(self.process.pid)).read_text().split()
        return int(child)

    def send(self, method: str, path: str, body: object = None, key: str = "k1") -> tuple[int, dict[str, str], Any]:
        return self._served.send(method, path, body, {"Authorization": f"Bearer {key}", "X-Request-Id": "r"})

    def send_in_thread(self, body: object, into: list[Any]) -> threading.Thread:
        thread = threading.Thread(target=lambda: into.append(self.send("POST", "/v1/completions", body)))
        thread.start()
        return thread

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def metric(self, name: str) -> float:
        text = self.send("GET", "/metrics")[2].decode()
        (line,) = re.findall(rf"^{name}{{.*}} (.*)$", text, re.MULTILINE)
        return float(line)


@contextmanager
def started(*arguments: object, **environment: str) -> Iterator[Command]:
    command = [sys.executable, "-m", "specdec", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended"
            found = re.fullmatch(r"specdec: serving (.*) at http://127\.0\.0\.1:(\d+)\n", line)
        yield Command(process, int(found[2]))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
