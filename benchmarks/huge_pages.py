"""Steps of plain decoding with packed weights in pages of 2 MB and in ordinary memory.

    python -m benchmarks.huge_pages
    python -m benchmarks.huge_pages --model WIDENED --name huge_pages_wide --rounds 6

Two engines of each kind, in one process and interleaved: where a weight lies in the processor's caches differs from
engine to engine, and shows as the difference between two of a kind.
"""

import argparse
import statistics
import time
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams
from specdec.bench.environment import shown_path
from specdec.config import DEMO
from specdec.kernels.native.huge_pages import HugePages

KINDS = ("ordinary", "2 MB", "ordinary again", "2 MB again")


def load(kind: str, model: str, threads: int) -> LLM:
    """Return an engine whose weights lie in this kind of memory."""
    if kind.startswith("2 MB"):
        return LLM(model, None, threads=threads)
    with mock.patch.object(HugePages, "empty", lambda _self, shape, dtype: torch.empty(*shape, dtype=dtype)):
        return LLM(model, None, threads=threads)


def step_seconds(llm: LLM, prompts: list[list[int]], tokens: int) -> list[float]:
    """Return the seconds of each step behind the prompts'."""
    params, seconds = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), []
    for prompt in prompts:
        llm.engine.add_request(llm.new_group(prompt, params).requests[0])
    llm.engine.step()
    while llm.engine.has_unfinished:
        start = time.perf_counter()
        llm.engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "target"), help="target folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--name", default="huge_pages", help="name of the result")
    args = parser.parse_args()
    engines = {kind: load(kind, args.model, args.threads) for kind in KINDS}
    prompts = [engines[KINDS[0]].chat_prompt(messages) for messages in read_prompts("gsm8k-eval")]
    rows, table = [], Table("batch", *(f"{kind}, ms" for kind in KINDS), "speed-up")
    for batch in args.batches:
        medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(args.rounds):
            for kind, llm in engines.items():
                medians[kind].append(1e3 * statistics.median(step_seconds(llm, prompts[:batch], args.max_tokens)))
        own = {kind: statistics.median(values) for kind, values in medians.items()}
        pairs = zip(*(medians[kind] for kind in KINDS), strict=True)
        speed_up = statistics.median((a + b) / (c + d) for a, c, b, d in pairs)
        rows.append(
            {
                "batch": batch,
                "step_ms": {kind: round(value, 4) for kind, value in own.items()},
                "speed_up": round(speed_up, 3),
            }
        )
        table.add_row(str(batch), *(f"{own[kind]:.3f}" for kind in KINDS), f"{speed_up:.3f}")
    Console().print(table)
    write(args.name, {"model": shown_path(args.model), "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
