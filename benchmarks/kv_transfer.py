"""Time to the first token of a prompt that has been computed before, by where its blocks lie; and what copies cost.

    python -m benchmarks.kv_transfer
    python -m benchmarks.kv_transfer --model WIDENED --draft WIDENED_HEAD --name kv_transfer_wide

A first engine computes prompts of 1,024 tokens and an ending, and stores their blocks on a disk and, with `--pool`, in
a Mooncake store. A second engine that has computed nothing gets the same prompts. "host memory" is one engine whose own
cache has lost them meanwhile. Each round has its own `cache_salt`, so it finds nothing of an earlier round. Files come
from the page cache. Counted: prompt tokens that passed the target. Tokens and tau must be those of recomputation.

Copies: milliseconds for the blocks of one prompt from the cache to host memory and back, as at the end of a step,
and their share of the prompt's computation, by the fastest of the rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import torch

from benchmarks.report import finish, read_prompts
from specdec import LLM, SamplingParams
from specdec.bench.environment import shown_path
from specdec.config import DEMO, DEMO_HEAD
from specdec.kernels.types.integers import ceil_div
from specdec.kv_transfer.offloading_connector import OffloadingConnector

SHARED, ENDING = 1024, 40


class Run(NamedTuple):
    """One request.

    Attributes:
        first_token: seconds until its first token.
        computed: tokens of the prompt that passed the target.
        loaded: tokens of the prompt that the connector loaded.
    """

    first_token: float
    computed: int
    loaded: int
    tokens: list[int]
    tau: float


def run(llm: LLM, prompt: list[int], params: SamplingParams, salt: str) -> Run:
    engine, before = llm.engine, llm.engine.scheduler.stats()
    request = llm.engine.new_group(llm.request_maker.add(prompt, params)).requests[0]
    request.cache_salt = salt
    first_token, start = 0.0, time.perf_counter()
    engine.scheduler.add(request)
    while not request.finished:
        engine.step()
        if request.num_output and not first_token:
            first_token = time.perf_counter() - start
    stats, output = engine.scheduler.stats(), request.completion()
    # Each step after the prompt's has one known token.
    computed = stats.known_tokens - before.known_tokens - output.stats.steps
    loaded = stats.external_prefix_hits - before.external_prefix_hits
    return Run(first_token, computed, loaded, output.token_ids, output.stats.tokens / output.stats.steps)


def connector_of(llm: LLM) -> OffloadingConnector:
    connector = llm.engine.connector
    assert isinstance(connector, OffloadingConnector)
    return connector


def copies(llm: LLM) -> tuple[float, float]:
    """Return the fewest seconds in which the blocks of a prompt are copied to host memory, and back."""
    blocks, memory = range(SHARED // llm.engine.worker.cache.block_size), connector_of(llm).memory
    times: list[tuple[float, float]] = []
    for _ in range(20):
        start = time.perf_counter()
        memory.store(blocks, blocks, memory.names).wait()
        middle = time.perf_counter()
        memory.load(blocks, blocks).wait()
        times.append((middle - start, time.perf_counter() - middle))
    out, back = zip(*times, strict=True)
    return min(out), min(back)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=DEMO / "target")
    parser.add_argument("--draft", default=DEMO_HEAD)
    parser.add_argument("--name", default="kv_transfer")
    parser.add_argument("--rounds", type=int, default=5, help="after one whose times do not count")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--pool", type=json.loads, help="settings of a Mooncake store, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    salts, length = [str(number) for number in range(args.rounds + 1)], SHARED + ENDING + args.max_tokens

    def engine(config: dict[str, Any] | None = None, num_requests: float = len(salts)) -> LLM:
        memory = int(num_requests * length * bytes_per_token) if config else None
        own: dict[str, Any] = {"dtype": "float32", "adaptive_drafts": False, "max_model_len": length + 64}
        return LLM(args.model, args.draft, kv_cache_memory=memory, kv_transfer_config=config, **own)

    def connector(name: str, **extra: Any) -> dict[str, Any]:
        own = {"cpu_bytes_to_use": 2 * (len(salts) + 2) * length * bytes_per_token, "load_timeout": 60, **extra}
        return {"kv_connector": name, "kv_connector_extra_config": own}

    runs: dict[str, list[Run]] = {}
    with engine() as llm:
        cache = llm.engine.worker.cache
        bytes_per_token = ceil_div(sum(part[0].nbytes for part in cache.parts.values()), cache.block_size)
        text = [token for messages in read_prompts("sgd-eval") for token in llm.chat_prompt(messages)]
        prompt = text[: SHARED + ENDING]
        runs["recomputed"] = [run(llm, prompt, params, salt) for salt in salts]
    with engine(connector("OffloadingConnector"), 1.1) as llm:
        for salt in salts:
            run(llm, prompt, params, salt)
        runs["host memory"] = [run(llm, prompt, params, salt) for salt in salts]
        out, back = copies(llm)
    with tempfile.TemporaryDirectory() as folder:
        disk = connector("OffloadingConnector", secondary_tiers=[{"type": "fs", "root_dir": folder}])
        both = pool = connector("MooncakeStoreConnector", **args.pool) if args.pool else None
        if pool is not None:
            both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [disk, pool]}}
        with engine(both or disk) as first:
            for salt in salts:
                run(first, prompt, params, salt)
                wait_until_written(first)
            if pool is not None:
                with engine(pool) as llm:
                    runs["Mooncake store"] = [run(llm, prompt, params, salt) for salt in salts]
        with engine(disk) as llm:
            runs["disk, after a restart"] = [run(llm, prompt, params, salt) for salt in salts]
    assert all(each.loaded for each in runs["disk, after a restart"]), "stores lack blocks; see the log"
    base = runs["recomputed"]
    seconds = {place: statistics.median(each.first_token for each in found[1:]) for place, found in runs.items()}
    rows = [
        {
            "blocks": place,
            "first_token_ms": round(1000 * seconds[place], 1),
            "recomputed_over_this": round(seconds["recomputed"] / seconds[place], 2),
            "computed": max(each.computed for each in found),
            "loaded": min(each.loaded for each in found),
            "tau": round(found[0].tau, 3),
            "same_tokens_and_tau": all(
                (a.tokens, a.tau) == (b.tokens, b.tau) for a, b in zip(found, base, strict=True)
            ),
        }
        for place, found in runs.items()
    ]
    figures = {"model": shown_path(args.model), "shared": SHARED, "ending": ENDING, "rounds": args.rounds}
    copied = {"to_host_ms": round(1000 * out, 2), "from_host_ms": round(1000 * back, 2)}
    share = round((out + back) / min(each.first_token for each in base), 4)
    finish(args.name, {**figures, "bytes_per_token": bytes_per_token, **copied, "copies_share": share}, rows)


def wait_until_written(llm: LLM) -> None:
    """Wait until the stores have all blocks."""
    connector = connector_of(llm)
    while connector.tier.writing:
        connector.wait(0.1)
        connector.update_connector_output(connector.get_finished())


if __name__ == "__main__":
    main()
