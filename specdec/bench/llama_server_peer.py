"""llama.cpp's own server as a peer: plain, with its n-gram drafts, or with a draft model or EAGLE-3 head as GGUF.

The server listens on this machine's loopback interface while the
benchmark runs.
"""

import atexit
import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specdec.bench.peers import LLAMA_SERVER, PeerSetup
from specdec.bench.timed_run import TimedRun, TimedSample
from specdec.core.outputs import SpeculationStats

HOST = "127.0.0.1"
# Seconds in which the server must have loaded its models.
PATIENCE = 600
# Tokens that must have occurred before; the server's default of 12 seldom finds any in a short text.
NGRAM_SIZE = 3


class CompletionPeer:
    """Answers of a llama.cpp server, wherever it runs.

    Args:
        seats: requests that run at once.
        name: of the server, for messages.
    """

    def __init__(self, setup: PeerSetup, seats: int, port: int, name: str) -> None:
        self._setup, self._seats, self._port, self._name = setup, seats, port, name

    def run(self, prompts: Sequence[list[int]], arrivals: Sequence[float] | None = None) -> TimedRun:  # noqa: ARG002
        """Answer prompts that arrive at once."""
        start = time.perf_counter()
        with ThreadPoolExecutor(self._seats) as pool:
            samples = list(pool.map(partial(self._answer, start), prompts))
        return TimedRun(samples, time.perf_counter() - start)

    def _answer(self, start: float, prompt: list[int]) -> TimedSample:
        body = {
            "prompt": prompt,
            "n_predict": self._setup.max_tokens,
            "temperature": 0,
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
            "ignore_eos": not self._setup.end_tokens,
        }
        status, answer = self._request("POST", "/completion", json.dumps(body))
        if status != http.client.OK:
            raise self._setup.error(f"{self._name} answered {status}: {answer}")
        seconds = time.perf_counter() - start
        timings, tokens = answer["timings"], self._setup.cut(answer["tokens"])
        # The first token comes from the pass over the prompt, and every later step adds one token of the target's own.
        accepted, later = timings.get("draft_n_accepted", 0), max(timings["predicted_n"] - 1, 0)
        stats = SpeculationStats(later - accepted, later, [], timings.get("draft_n", 0))
        return TimedSample(tokens, max(seconds - timings["predicted_ms"] / 1000, 0.0), seconds, stats)

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(HOST, self._port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


class LlamaServerPeer(CompletionPeer):
    """A server with as many slots as requests may run at once."""

    def __init__(self, setup: PeerSetup) -> None:
        super().__init__(setup, setup.number("batch", 8), free_port(), LLAMA_SERVER)
        executable = shutil.which(LLAMA_SERVER)
        assert executable is not None
        threads = str(torch.get_num_threads())
        command = [executable, "--host", HOST, "--port", str(self._port), "--offline", "-m", str(setup.gguf())]
        command += ["-np", str(self._seats), "-c", str(self._seats * setup.longest), "-t", threads, "-tb", threads]
        command += _drafting(setup)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.close)
        self._wait()

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def _wait(self) -> None:
        """Wait until the server has loaded its models."""
        patience = time.monotonic() + PATIENCE
        while time.monotonic() < patience:
            if self._process.poll() is not None:
                raise self._setup.error(
                    f"{LLAMA_SERVER} ended with code {self._process.returncode}; "
                    "see whether it loads these files by itself"
                )
            try:
                if self._request("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise self._setup.error(f"{LLAMA_SERVER} was not ready after {PATIENCE} s")


load = LlamaServerPeer


def _drafting(setup: PeerSetup) -> list[str]:
    if setup.draft is None:
        return []
    if setup.draft == "ngram":
        simple = "--spec-ngram-simple-size"
        tokens = str(setup.number("tokens", 10))
        return ["--spec-type", "ngram-simple", f"{simple}-n", str(NGRAM_SIZE), f"{simple}-m", tokens]
    if not Path(setup.draft).is_file():
        raise setup.error(f"{setup.draft}: no such file; drafts are ngram or a GGUF file")
    kind = setup.settings.get("type", "draft-eagle3")
    return ["-md", setup.draft, "--spec-type", kind, "--spec-draft-n-max", str(setup.number("tokens", 3))]


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as one:
        one.bind((HOST, 0))
        port: int = one.getsockname()[1]
        return port
