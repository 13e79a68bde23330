"""Tokens per second through `specdec serve` with 16 clients, against `LLM` on the same requests.

    python -m benchmarks.serving [--model FOLDER --draft FOLDER --name NAME --before TREE]

Each client sends its next request when it has the answer to its last one, so as many requests run as there are clients.
`LLM` gets all requests at once, and both engines have as many seats as there are clients. Rounds are interleaved, with
plain decoding and with the EAGLE head, whole answers and streamed ones, all greedy, to the same number of new tokens,
without a prefix cache. Clients share the machine with the server. The figures to read are the ratios, medians over
rounds. Goal: at least 0.9 of `LLM`. The time to first token is what a client of the streamed answers sees.

With `--before`, the code of another tree serves the same requests in the same rounds; the ratio to it is a median over
rounds too. What an engine measures at its start decides how large its trees are, and two starts of one tree may differ
by several per cent: `--starts` begins anew so many times, and rounds of all of them count. Where the program `vllm` is
installed, vLLM's server (plain decoding) answers them as well.
"""

import argparse
import http.client
import json
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams
from specdec.bench.environment import shown_path
from specdec.config import DEMO

# Seconds without a byte of an answer after which a client gives up.
PATIENCE = 600


class Answer(NamedTuple):
    """Answer to one request.

    Attributes:
        token_ids: the generated tokens.
        first: seconds from the request to its first event; None of an answer that came whole.
    """

    token_ids: list[int]
    first: float | None = None


class Run(NamedTuple):
    """Answers in the order of the prompts, and the seconds until the last one ended."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(len(answer.token_ids) for answer in self.answers) / self.seconds


# By the server's name and the way of answering.
Runs = dict[tuple[str, str], list[Run]]


@contextmanager
def server(command: Sequence[str]) -> Iterator[int]:
    """Run a server in a process of its own; yields its port once it is healthy."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log) as process,
    ):
        try:
            while not is_healthy(port):
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(f"the server did not start: {log.read()}")
                time.sleep(0.5)
            yield port
        finally:
            process.terminate()


def is_healthy(port: int) -> bool:
    """Return whether a server answers at the port, and is well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except ConnectionError:
        return False
    finally:
        connection.close()


def server_commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the commands that start the servers, without their ports."""
    most = ["--max-num-seqs", str(args.clients), "--no-enable-prefix-caching"]
    own = ["-m", "specdec", "serve", "--threads", str(args.threads), *most]
    own += [] if args.model is None else ["--model", args.model]
    drafts = {"plain": "none", "eagle": args.draft}
    commands = {name: [sys.executable, *own, "--draft", draft] for name, draft in drafts.items()}
    if args.before is not None:
        before = ["env", f"PYTHONPATH={args.before.absolute()}", sys.executable, "-P", *own]
        commands |= {f"{name} before": [*before, "--draft", draft] for name, draft in drafts.items()}
    if vllm := shutil.which("vllm"):
        model = str(DEMO / "target" if args.model is None else args.model)
        commands["vllm"] = [vllm, "serve", model, "--served-model-name", "model", *most]
    return commands


class Received(NamedTuple):
    """An answer as it arrived, and `Answer.first`. It is read once the clock has stopped."""

    body: bytes
    first: float | None

    def read(self) -> Answer:
        """Return the answer."""
        if self.first is None:
            return Answer(json.loads(self.body)["choices"][0]["token_ids"])
        events = [line.removeprefix(b"data: ") for line in self.body.splitlines() if line.startswith(b"data: {")]
        tokens = [token for one in events for token in json.loads(one)["choices"][0].get("token_ids", ())]
        return Answer(tokens, self.first)


def ask(
    connection: http.client.HTTPConnection, model: str | None, prompt: list[int], max_tokens: int, stream: bool
) -> Received:
    """Send one request, and wait for its answer."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    sent = json.dumps({**body, "return_token_ids": True, "stream": stream})
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"the server answered {reply.status}: {reply.read()!r}")
    if not stream:
        return Received(reply.read(), None)
    parts = [reply.read1()]
    first = time.perf_counter() - began
    while part := reply.read1():
        parts.append(part)
    return Received(b"".join(parts), first)


def through_server(
    port: int, model: str | None, prompts: Sequence[list[int]], args: argparse.Namespace, stream: bool
) -> Run:
    """Answer prompts through a server, each client one after another over a connection that it keeps."""
    free = SimpleQueue[http.client.HTTPConnection]()
    for _ in range(args.clients):
        free.put(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE))

    def answer(prompt: list[int]) -> Received:
        connection = free.get()
        try:
            return ask(connection, model, prompt, args.max_tokens, stream)
        finally:
            free.put(connection)

    with ThreadPoolExecutor(args.clients) as clients:
        began = time.perf_counter()
        received = list(clients.map(answer, prompts))
        seconds = time.perf_counter() - began
    while not free.empty():
        free.get().close()
    return Run([each.read() for each in received], seconds)


def offline(llm: LLM, prompts: Sequence[list[int]], args: argparse.Namespace) -> Run:
    """Answer prompts in this process."""
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return Run([Answer(output.token_ids) for output in outputs], time.perf_counter() - began)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: the demo")
    parser.add_argument("--draft", default="eagle")
    parser.add_argument("--before", type=Path, help="a tree of an earlier commit, with its library built")
    parser.add_argument("--name", default="serving", help="of the results")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=32, help="of each kind of text")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1, help="of all engines, each with so many rounds")
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    runs: Runs = {}
    for start in range(args.starts):
        with ExitStack() as stack:
            ports = {name: stack.enter_context(server(command)) for name, command in server_commands(args).items()}
            engines = {
                name: stack.enter_context(
                    LLM(
                        args.model,
                        draft=None if draft == "none" else draft,
                        threads=args.threads,
                        max_num_seqs=args.clients,
                        enable_prefix_caching=False,
                    )
                )
                for name, draft in (("plain", "none"), ("eagle", args.draft))
            }
            prompts = [
                engines["plain"].chat_prompt(messages)
                for name in ("gsm8k-eval", "sgd-eval")
                for messages in read_prompts(name)[: args.prompts]
            ]
            random.Random(0).shuffle(prompts)
            answer_in_rounds(runs, ports, engines, prompts, args)
        print(f"start {start + 1} of {args.starts}: measured", file=sys.stderr)
    report(runs, args, len(prompts), engines["plain"].config.dtype)


def answer_in_rounds(
    runs: Runs, ports: dict[str, int], engines: dict[str, LLM], prompts: Sequence[list[int]], args: argparse.Namespace
) -> None:
    """Answer the prompts in every way, in rounds, and add them to the runs but for the first round, which warms up."""
    ways = [
        (name, way) for name in ports for way in ("offline", "whole", "streamed") if name in engines or way != "offline"
    ]
    for number in range(args.rounds + 1):
        # Forwards and backwards by turns: a processor that slows down within a round favours neither end.
        for name, way in ways[:: 1 if number % 2 else -1]:
            if way == "offline":
                run = offline(engines[name], prompts, args)
            else:
                model = "model" if name == "vllm" else None
                run = through_server(ports[name], model, prompts, args, way == "streamed")
            if number:
                runs.setdefault((name, way), []).append(run)


def _ratio(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """Return the median over rounds of how many times as fast they were."""
    pairs = zip(runs, others, strict=True)
    return round(statistics.median(one.tokens_per_second / other.tokens_per_second for one, other in pairs), 3)


def report(runs: Runs, args: argparse.Namespace, requests: int, dtype: str) -> None:
    """Print a table, and write the results."""
    expected = [answer.token_ids for answer in runs["plain", "offline"][0].answers]
    columns = ("server", "way", "tok_per_s_median", "of_offline", "first_token_ms_median", "first_token_ms_nine_in_ten")
    rows, table = [], Table("server", "way", "tok/s, median", "of offline", "first token, ms", "9 in 10, ms")
    for (name, way), every in runs.items():
        speeds = [run.tokens_per_second for run in every]
        base = runs["plain" if name == "vllm" else name.split()[0], "offline"]
        before = runs.get((f"{name} before", way))
        firsts = sorted(1e3 * answer.first for run in every for answer in run.answers if answer.first is not None)
        row: dict[str, Any] = {
            "server": name,
            "way": way,
            "tok_per_s_median": round(statistics.median(speeds), 1),
            "of_offline": _ratio(every, base),
            **({} if before is None else {"of_before": _ratio(every, before)}),
            "first_token_ms_median": round(statistics.median(firsts), 1) if firsts else None,
            "first_token_ms_nine_in_ten": round(firsts[int(0.9 * len(firsts))], 1) if firsts else None,
            "answers_with_equal_tokens": sum(
                answer.token_ids == tokens
                for run in every
                for answer, tokens in zip(run.answers, expected, strict=True)
            ),
        }
        rows.append(row)
        table.add_row(*("" if row[key] is None else str(row[key]) for key in columns))
        if before is not None:
            print(f"{name}, {way}: {row['of_before']} of before")
    Console().print(table)
    figures = {"dtype": dtype, "clients": args.clients, "requests": requests, "max_tokens": args.max_tokens}
    target = {} if args.model is None else {"model": shown_path(args.model)}
    write(args.name, {**target, **figures, "starts": args.starts, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
