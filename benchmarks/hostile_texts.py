"""One client's longest texts and lists, and how long another client's small requests take meanwhile.

    python -m benchmarks.hostile_texts [--tree before=FOLDER --tree after=.]

A server of the demo model is started from each tree. One client sends a small completion after another; a second one
sends the worst requests of a kind, all at once, and the first goes on until they are answered. Reported are the small
requests' latencies before and during each attack, the attack's answers by status, and the resident memory of server
and engine before, at its highest, and three seconds after. Asked: no small request takes 0.5 s longer than the
longest before, and memory returns to within 20 %.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import write

MIB = 1 << 20
# Below the server's limit of a body.
BODY = (4 << 20) - 4096
LONGEST_WAIT = 180
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Request = tuple[str, dict[str, Any]]
WORDS = "I would like to book a table for four, and it should be cheap. "


def _text(size: int) -> str:
    return (WORDS * (size // len(WORDS) + 1))[:size]


def _talk(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8}


def long_prompts() -> list[Request]:
    """Return six bodies of 4 MB."""
    return [(COMPLETIONS, {"prompt": _text(BODY), "max_tokens": 8})] * 6


def long_conversations() -> list[Request]:
    return [(CHAT, _talk(_text(BODY)))] * 6


def truncated_prompts() -> list[Request]:
    """Return prompts of the longest text that is tokenized."""
    return [(COMPLETIONS, {"prompt": _text(1 << 20), "truncate_prompt_tokens": 16, "max_tokens": 8})] * 6


def texts_to_tokenize() -> list[Request]:
    return [("/tokenize", {"prompt": _text(1 << 20), "return_token_strs": True})] * 6


def predictions() -> list[Request]:
    return [(CHAT, {**_talk("hi"), "prediction": {"type": "content", "content": _text(BODY - 200)}})] * 3


def bad_words() -> list[Request]:
    words = [f"word{number}" for number in range(30_000)]
    return [(COMPLETIONS, {"prompt": "hi", "bad_words": words, "max_tokens": 64, "ignore_eos": True})] * 2


def most_bad_words() -> list[Request]:
    """Return requests of many prompts with the most bad words allowed."""
    words = [f"word{number}" for number in range(128)]
    return [(COMPLETIONS, {"prompt": ["hi"] * 16, "bad_words": words, "max_tokens": 16, "ignore_eos": True})] * 2


def stop_strings() -> list[Request]:
    stops = [f"no such text {number}" for number in range(100_000)]
    return [(COMPLETIONS, {"prompt": "hi", "stop": stops, "max_tokens": 64, "ignore_eos": True})] * 2


def most_stop_strings() -> list[Request]:
    stops = [f"{_text(110)} {number}" for number in range(64)]
    return [(COMPLETIONS, {"prompt": ["hi"] * 16, "stop": stops, "max_tokens": 16, "ignore_eos": True})] * 2


def wrong_lists() -> list[Request]:
    """Return lists of a million values of the wrong type."""
    return [(COMPLETIONS, {"prompt": "hi", "bad_words": [1] * 1_000_000})] * 2


def token_lists() -> list[Request]:
    allowed = list(range(4000)) * 80
    return [
        (COMPLETIONS, {"prompt": ["hi"] * 512, "allowed_token_ids": allowed, "max_tokens": 1}),
        (COMPLETIONS, {"prompt": "hi", "logit_bias": {str(token): 1 for token in range(200_000)}, "max_tokens": 1}),
        ("/detokenize", {"tokens": [5] * 1_000_000}),
        (COMPLETIONS, {"prompt": [5] * 1_200_000, "max_tokens": 1}),
    ]


ATTACKS: dict[str, Callable[[], list[Request]]] = {
    attack.__name__: attack
    for attack in (
        long_prompts,
        long_conversations,
        truncated_prompts,
        texts_to_tokenize,
        predictions,
        bad_words,
        most_bad_words,
        stop_strings,
        most_stop_strings,
        wrong_lists,
        token_lists,
    )
}


@dataclass
class Server:
    """A server in a process of its own.

    Attributes:
        address: host and port.
    """

    address: str
    process: "subprocess.Popen[str]"

    def send(self, path: str, raw: bytes) -> int:
        """Return the status of the answer to a request; 0 if none came."""
        connection = http.client.HTTPConnection(self.address, timeout=LONGEST_WAIT)
        try:
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            return answer.status
        except OSError:
            return 0
        finally:
            connection.close()

    def resident_mib(self) -> float:
        """Return the resident memory of the server and of its engine."""
        pids = [self.process.pid]
        for pid in pids:
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        return pages * os.sysconf("SC_PAGE_SIZE") / MIB


@contextmanager
def serving(tree: Path) -> Iterator[Server]:
    """Serve the demo model by the code of a tree."""
    command = [sys.executable, "-m", "specdec", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(command, cwd=tree, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if " at http://" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Server(line.rsplit("http://", 1)[1].strip(), process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            # It is busy with an attack. Its engine ends with it.
            process.kill()
            process.wait()


@dataclass
class SmallRequests:
    """A client that sends small requests, one after another, until it is told to stop.

    Attributes:
        latencies: seconds of each.
        num_failed: those without an answer.
    """

    server: Server
    latencies: list[float] = field(default_factory=list)
    num_failed: int = 0
    peak_mib: float = 0.0

    def run(self, is_over: Callable[[], bool]) -> None:
        raw = json.dumps({"prompt": "hi", "max_tokens": 4, "temperature": 0}).encode()
        while not is_over() or len(self.latencies) < 20:
            began = time.perf_counter()
            self.num_failed += self.server.send(COMPLETIONS, raw) != 200
            self.latencies.append(time.perf_counter() - began)
            self.peak_mib = max(self.peak_mib, self.server.resident_mib())
            time.sleep(0.02)

    def report(self) -> dict[str, float]:
        figures = {"median_s": round(median(self.latencies), 4), "longest_s": round(max(self.latencies), 4)}
        return figures | ({"failed": self.num_failed} if self.num_failed else {})


def attacked(server: Server, name: str) -> dict[str, Any]:
    """Return the figures of one attack."""
    requests = [(path, json.dumps(body).encode()) for path, body in ATTACKS[name]()]
    quiet, during = SmallRequests(server), SmallRequests(server)
    quiet.run(lambda: True)
    before, statuses = server.resident_mib(), list[int]()
    threads = [
        threading.Thread(target=lambda path=path, raw=raw: statuses.append(server.send(path, raw)))
        for path, raw in requests
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    during.run(lambda: not any(thread.is_alive() for thread in threads))
    seconds = time.perf_counter() - began
    time.sleep(3)
    after = server.resident_mib()
    return {
        "requests": len(requests),
        "statuses": dict(Counter(map(str, statuses))),
        "seconds": round(seconds, 2),
        "quiet": quiet.report(),
        "during": during.report(),
        "longer_s": round(max(during.latencies) - max(quiet.latencies), 3),
        "resident_mib": {"before": round(before), "highest": round(during.peak_mib), "after": round(after)},
        "memory_ratio": round(after / before, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", metavar="NAME=FOLDER", help="default: after=.")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    args = parser.parse_args()
    trees = dict(each.partition("=")[::2] for each in args.tree or ["after=."])
    figures: dict[str, dict[str, Any]] = {name: {} for name in args.attacks}
    for label, folder in trees.items():
        with serving(Path(folder).absolute()) as server:
            for name in args.attacks:
                figures[name][label] = attacked(server, name)
                print(label, name, json.dumps(figures[name][label]), file=sys.stderr, flush=True)
    write("hostile_texts", {"attacks": figures})


if __name__ == "__main__":
    main()
