"""Long prompts that displace each other: plain swapping, whole blocks through a connector, and layer by layer.

    python -m benchmarks.displaced_prompts
    python -m benchmarks.displaced_prompts --model WIDENED --draft WIDENED_HEAD --name displaced_prompts_wide

The cache holds one request. A prompt of 1,064 tokens is computed and begins its answer (`alone_ms`: its first token).
A second one of higher priority displaces it (`out_ms`: its first token, with the other's blocks out of the way). When
its answer has ended, the first request goes on (`in_ms`: its next token). Milliseconds are medians over rounds, in
which the engines take turns; `out_over_swapping` and `in_over_swapping` are medians of the rounds' ratios.

recomputed: displaced tokens are computed again. swapping: blocks move to host memory and back before the steps
(`--swap-space`). connector: a prompt's blocks are copied to host memory behind the step that computes them, and come
back before a step. layerwise: the same beside the step, layer by layer. Tokens must be the same in all.
"""

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams
from specdec.bench.environment import shown_path
from specdec.config import DEMO, DEMO_HEAD
from specdec.core.request import Request
from specdec.kernels.types.integers import ceil_div

LENGTH, STEPS_BEFORE = 1064, 3
MODES = ("recomputed", "swapping", "connector", "layerwise")


class Round(NamedTuple):
    """Seconds of one round, and the tokens of both answers."""

    alone: float
    out: float
    back: float
    tokens: list[list[int]]


def run_until_token(llm: LLM, request: Request) -> float:
    """Step until the request has another token; return the seconds."""
    before, start = request.num_output, time.perf_counter()
    while request.num_output == before:
        llm.engine.step()
    return time.perf_counter() - start


def run_round(llm: LLM, prompts: list[list[int]], params: SamplingParams, salt: str) -> Round:
    first, second = (
        llm.new_group(prompt, params, priority=priority).requests[0]
        for prompt, priority in zip(prompts, (0, -1000), strict=True)
    )
    first.cache_salt = second.cache_salt = salt
    engine = llm.engine
    engine.add_request(first)
    alone = run_until_token(llm, first)
    for _ in range(STEPS_BEFORE):
        engine.step()
    engine.add_request(second)
    out = run_until_token(llm, second)
    while not second.finished:
        engine.step()
    back = run_until_token(llm, first)
    while not first.finished:
        engine.step()
    return Round(alone, out, back, [request.completion().token_ids for request in (first, second)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=DEMO / "target")
    parser.add_argument("--draft", default=DEMO_HEAD)
    parser.add_argument("--name", default="displaced_prompts")
    parser.add_argument("--rounds", type=int, default=15, help="after one whose times do not count")
    parser.add_argument("--max-tokens", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    length = LENGTH + args.max_tokens
    own: dict[str, Any] = {"dtype": "float32", "adaptive_drafts": False, "max_model_len": length + 64}
    with LLM(args.model, args.draft, **own) as llm:
        cache = llm.engine.worker.cache
        bytes_per_token = ceil_div(sum(part[0].nbytes for part in cache.parts.values()), cache.block_size)
        text = [token for messages in read_prompts("sgd-eval") for token in llm.chat_prompt(messages)]
    prompts = [text[:LENGTH], text[LENGTH : 2 * LENGTH]]

    def engine(mode: str) -> LLM:
        settings: dict[str, Any] = {}
        if mode == "swapping":
            settings["swap_space"] = 2 * length * bytes_per_token / (1 << 30)
        elif mode != "recomputed":
            extra = {"cpu_bytes_to_use": 6 * length * bytes_per_token, "use_layerwise": mode == "layerwise"}
            settings["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": extra,
            }
        memory = int(1.15 * (length + 64) * bytes_per_token)
        return LLM(args.model, args.draft, scheduling_policy="priority", kv_cache_memory=memory, **own, **settings)

    engines = {mode: engine(mode) for mode in MODES}
    rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
    for number in range(args.rounds + 1):
        for mode, llm in engines.items():
            rounds[mode].append(run_round(llm, prompts, params, str(number)))
    stats = {mode: llm.stats() for mode, llm in engines.items()}
    for llm in engines.values():
        llm.close()

    def seconds(mode: str, field: str) -> list[float]:
        return [getattr(each, field) for each in rounds[mode][1:]]

    def milliseconds(mode: str, field: str) -> float:
        return round(1000 * statistics.median(seconds(mode, field)), 2)

    def over_swapping(mode: str, field: str) -> float:
        pairs = zip(seconds(mode, field), seconds("swapping", field), strict=True)
        return round(statistics.median(own / swapping for own, swapping in pairs), 3)

    rows = [
        {
            "mode": mode,
            "alone_ms": milliseconds(mode, "alone"),
            "out_ms": milliseconds(mode, "out"),
            "in_ms": milliseconds(mode, "back"),
            "out_over_swapping": over_swapping(mode, "out"),
            "in_over_swapping": over_swapping(mode, "back"),
            "preemptions": stats[mode].preemptions,
            "swaps": stats[mode].swaps,
            "loaded": stats[mode].external_prefix_hits,
            "same_tokens": all(each.tokens == rounds["recomputed"][0].tokens for each in rounds[mode]),
        }
        for mode in MODES
    ]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    figures = {"model": shown_path(args.model), "length": LENGTH, "rounds": args.rounds, "threads": args.threads}
    write(args.name, {**figures, "bytes_per_token": bytes_per_token, "rows": rows})


if __name__ == "__main__":
    main()
