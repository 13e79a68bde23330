"""One client's worst requests against another client's small ones, through `specdec serve`.

    python -m benchmarks.hostile_clients [--tree NAME=FOLDER ...] [--attacks NAME ...]

For each attack of `benchmarks.hostile_requests` a server of the demo model is started from each tree. A hostile client
sends its requests at once and waits for their answers, for `--seconds` at most; then it goes away. From another address
small requests are sent one after another, by turns plain and with a regular expression that is new each time. Reported
are their latencies before and during the attack, the attack's answers by status, the processor time that the server
takes in the second after it, and the private memory of its processes before and after. Before means: after ordinary
conversations in all seats, which fill the cache of 64 MiB; what a full batch needs is no attack's. Goal: no small
request takes 0.5 s longer than the longest before, and memory returns to within 20 %.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hostile_requests import ATTACKS, CHAT, COMPLETIONS, Attack
from benchmarks.report import write

# Of kB, as /proc has them.
MIB = 1 << 10
# Small requests of each kind before an attack, and seconds without an answer after which a client gives up.
QUIET, PATIENCE = 20, 120
# Seats of the server, and tokens of each conversation: those in all seats together fill the cache.
SEATS, TOKENS = 64, 200
# Addresses of the two clients, all of which are this machine.
SMALL, HOSTILE = "127.0.0.1", "127.0.0.2"
PLAIN = {"prompt": "I would like to find a restaurant.", "max_tokens": 4, "temperature": 0}


class Server:
    """A server in a process of its own.

    Args:
        address: host and port.
    """

    def __init__(self, address: str, pid: int) -> None:
        self._address, self._pid = address, pid
        self._connections = dict[str, set[http.client.HTTPConnection]]()

    def send(self, path: str, raw: bytes, source: str, is_cut: bool = False) -> int:
        """Return the status of the answer to a request; 0 if none came.

        Args:
            source: the client's own address.
            is_cut: close the connection as soon as the answer begins.
        """
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE, source_address=(source, 0))
        self._connections.setdefault(source, set()).add(connection)
        try:
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if not is_cut:
                answer.read()
            return answer.status
        except (OSError, ValueError, http.client.HTTPException):
            return 0
        finally:
            connection.close()
            self._connections[source].discard(connection)

    def cut(self, source: str) -> None:
        """Close all connections of a client."""
        for connection in list(self._connections.get(source, ())):
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)

    def usage(self) -> tuple[float, dict[int, float]]:
        """Return the private memory of the server's processes in MiB, and the processor seconds of each."""
        memory, seconds = 0.0, dict[int, float]()
        for pid in self._processes():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                memory += sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / MIB
                seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return memory, seconds

    def _processes(self) -> list[int]:
        pids = [self._pid]
        for pid in pids:
            with suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return pids


@contextmanager
def serving(tree: Path) -> Iterator[Server]:
    """Serve the demo model by the code of a tree."""
    command = [sys.executable, "-P", "-m", "specdec", "serve", "--port", "0", "--kv-cache-memory", "64MiB"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if " at http://" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Server(line.rsplit("http://", 1)[1].strip(), process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            # It is busy with an attack. Its engine ends with it.
            process.kill()
            process.wait()


def small_requests(server: Server, patterns: Iterator[int], stop: Callable[[], bool]) -> dict[str, list[float]]:
    """Send small requests until `stop` says so; return their latencies by kind. One that fails is endless."""
    found: dict[str, list[float]] = {"plain": [], "structured": []}
    while not (stop() and all(found.values())):
        for kind, latencies in found.items():
            form = {} if kind == "plain" else {"structured_outputs": {"regex": f"[ab]{{{next(patterns)}}}"}}
            raw, began = json.dumps({**PLAIN, **form}).encode(), time.perf_counter()
            status = server.send(COMPLETIONS, raw, SMALL)
            latencies.append(time.perf_counter() - began if status == 200 else float("inf"))
    return found


def work_fully(server: Server) -> None:
    """Answer as many conversations at once as there are seats, which fill the cache: no attack is needed for that."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "ignore_eos": True}
    raw = json.dumps(body).encode()
    with ThreadPoolExecutor(SEATS) as clients:
        statuses = list(clients.map(lambda _: server.send(CHAT, raw, SMALL), range(SEATS)))
    assert set(statuses) == {200}, statuses


def attacked(server: Server, attack: Attack, seconds: float) -> dict[str, Any]:
    """Return the figures of one attack."""
    patterns, counts = iter(range(10, 100_000)), iter(range(QUIET))
    # The first form starts the process that tries forms out.
    first = small_requests(server, patterns, lambda: True)
    work_fully(server)
    quiet = small_requests(server, patterns, lambda: next(counts, None) is None)
    before, _ = server.usage()
    statuses = list[int]()

    def send(path: str, body: dict[str, Any]) -> None:
        statuses.append(server.send(path, json.dumps(body).encode(), HOSTILE, attack.is_cut))

    threads = [threading.Thread(target=send, args=request, daemon=True) for request in attack.requests]
    end = time.perf_counter() + seconds
    for thread in threads:
        thread.start()
    during = small_requests(
        server, patterns, lambda: not any(each.is_alive() for each in threads) or time.perf_counter() > end
    )
    unanswered = sum(each.is_alive() for each in threads)
    server.cut(HOSTILE)
    time.sleep(2)
    _, spent = server.usage()
    time.sleep(1)
    after, now = server.usage()
    return {
        "statuses": dict(Counter(map(str, statuses[: len(threads) - unanswered]))),
        "unanswered": unanswered,
        "first_form_s": round(first["structured"][0], 3),
        "small": {kind: _latencies(quiet[kind], during[kind]) for kind in quiet},
        "processor_s_after": round(sum(each - spent.get(pid, 0.0) for pid, each in now.items()), 2),
        "private_mib": {"before": round(before), "after": round(after)},
    }


def _latencies(quiet: Sequence[float], during: Sequence[float]) -> dict[str, float | None]:
    """Return figures in seconds; None where a request failed."""
    figures = {
        "median_before": median(quiet),
        "longest_before": max(quiet),
        "median": median(during),
        "longest": max(during),
        "longer": max(during) - max(quiet),
    }
    return {name: None if value == float("inf") else round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", metavar="NAME=FOLDER", help="default: after=.")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--seconds", type=float, default=30.0, help="longest time of an attack")
    args = parser.parse_args()
    trees = dict(each.partition("=")[::2] for each in args.tree or ["after=."])
    figures: dict[str, dict[str, Any]] = {name: {} for name in args.attacks}
    # The trees by turns, and a new server each time: what an attack leaves behind is none of the next one's.
    for name in args.attacks:
        for label, folder in trees.items():
            with serving(Path(folder).absolute()) as server:
                figures[name][label] = attacked(server, ATTACKS[name](), args.seconds)
            print(name, label, json.dumps(figures[name][label]), file=sys.stderr, flush=True)
    write("hostile_clients", {"attacks": figures})


if __name__ == "__main__":
    main()
