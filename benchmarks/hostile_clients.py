"""One client's worst request against another client's small ones, through `specdec serve`.

    python -m benchmarks.hostile_clients [--checkout FOLDER] [--case NAME]

For each case a hostile client sends its request, and waits. Beside it small requests are sent one after another, for
`--seconds` or until there is an answer to the hostile one: plain ones, and ones with a regular expression that is new
each time. Measured are their latencies, against those of the idle server; what the hostile client gets; and, once it is
gone, the processor time that the server's processes take in the next second, and their memory beside that of before.
Goal: a small request is delayed by at most 0.5 s, and memory returns to within 20 %. Compared are medians and maxima.

`--checkout` measures the server of another work tree, which the results name by its folder. Further cases are entries
of `CASES`.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import write
from benchmarks.serving import server

PROMPT = "I would like to find a restaurant."
# Seconds without an answer after which a client gives up.
PATIENCE = 60
IDLE_REQUESTS = 20


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"prop_{i}": {"type": "string"} for i in range(count)}}


def _chain(count: int) -> str:
    rules = [f'r{i} ::= r{i + 1} | "property {i}" r{i + 1}' for i in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "."'])


def _structured(**form: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "structured_outputs": form}


# Bodies of `/v1/completions` by the names of the cases.
CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "2,000 optional properties": lambda: _structured(json=_optional(2000)),
    "choice of 100,000 texts": lambda: _structured(choice=[f"choice number {i}" for i in range(100_000)]),
    "grammar of 3,500 rules": lambda: _structured(grammar=_chain(3500)),
    "pattern without end": lambda: _structured(json={"enum": ["a" * 40 + "!"], "pattern": "^(a+)+$"}),
}


def post(port: int, body: dict[str, Any]) -> tuple[int, str]:
    """Send a request; return status and answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def small_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield small requests of both kinds by turns."""
    plain = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    for number in range(10, 10_000):
        yield "plain", plain
        yield "structured", {**plain, "structured_outputs": {"regex": f"[ab]{{{number}}}"}}


def latencies(port: int, requests: Iterator[tuple[str, dict[str, Any]]], stop: Callable[[], bool]) -> dict[str, Any]:
    """Return median and maximum in seconds by kind, until `stop` says so. One that fails counts as endless."""
    found: dict[str, list[float]] = {"plain": [], "structured": []}
    while not (stop() and all(found.values())):
        kind, body = next(requests)
        begin = time.perf_counter()
        try:
            status, _ = post(port, body)
        except OSError:
            status = 0
        found[kind].append(time.perf_counter() - begin if status == 200 else float("inf"))
    return {
        kind: {"count": len(times), "median": _shown(statistics.median(times)), "max": _shown(max(times))}
        for kind, times in found.items()
    }


def _shown(seconds: float) -> float | None:
    """Return a latency as it is written, None for a request that failed."""
    return None if seconds == float("inf") else round(seconds, 3)


def processes(root: int) -> list[int]:
    """Return a process and all that it has started, directly or not."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def usage(root: int) -> tuple[float, dict[int, float]]:
    """Return MiB of memory of their own, and seconds of processor time, of a process and all that it has started."""
    memory, seconds = 0.0, {}
    for pid in processes(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        memory += sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return memory, seconds


def measure(port: int, pid: int, body: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run one case."""
    requests = small_requests()
    count = iter(range(IDLE_REQUESTS))
    idle = latencies(port, requests, lambda: next(count, None) is None)
    memory, _ = usage(pid)
    outcome: dict[str, Any] = {"status": None}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    begin = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})

    def read() -> None:
        try:
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException):
            return
        problem = json.loads(text).get("error", {}).get("message") if answer.status != 200 else None
        outcome.update(status=answer.status, seconds=round(time.perf_counter() - begin, 2), problem=problem)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    beside = latencies(port, requests, lambda: not reader.is_alive() or time.perf_counter() - begin > seconds)
    # The client goes, if it has no answer.
    if connection.sock is not None:
        connection.sock.close()
    time.sleep(1)
    before = usage(pid)[1]
    time.sleep(1)
    after = usage(pid)
    return {
        "idle": idle,
        "beside": beside,
        "hostile": dict(outcome),
        "processor_seconds_once_gone": round(
            sum(seconds - before.get(pid, 0.0) for pid, seconds in after[1].items()), 2
        ),
        "memory_mib": {"before": round(memory, 1), "after": round(after[0], 1)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="work tree of the server")
    parser.add_argument("--case", choices=CASES, action="append", help="one of some cases")
    parser.add_argument("--seconds", type=float, default=15.0, help="longest time of a case")
    parser.add_argument("--name", default="hostile_clients", help="of the file of results")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str((given.checkout or Path.cwd()).absolute())
    command = [sys.executable, "-P", "-m", "specdec", "serve", "--served-model-name", "demo"]
    results = {}
    for name, body in CASES.items():
        if given.case is None or name in given.case:
            # A new server each time: what one case leaves behind is none of the next one's.
            with server(command) as port:
                (pid,) = [child for child in processes(os.getpid()) if _serves(child, port)]
                results[name] = measure(port, pid, body(), given.seconds)
                print(name, json.dumps(results[name]), flush=True)
    write(given.name, {"checkout": given.checkout.name if given.checkout else None, "cases": results})


def _serves(pid: int, port: int) -> bool:
    return f"--port\0{port}" in Path(f"/proc/{pid}/cmdline").read_text()


if __name__ == "__main__":
    main()
