"""Share of a step's time that verification and sampling take, at batch 1 and 16.

    python -m benchmarks.verification_cost

The clock runs around `verifier.verify`: processing of logits, noise, the walk down each tree.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import parse_shape, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.kernels.types.draft_trees import DraftTrees, PreparedWalk, WalkOutcome
from specdec.kernels.types.upload import Packet
from specdec.verify.noise import gumbel
from specdec.verify.sampling import Context
from specdec.verify.verifier import Verifier

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1},
    "top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}
NOISE_VOCAB = 128_000


class TimedVerifier:
    """A verifier, and the seconds spent in it."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.seconds = verifier, 0.0

    def prepare(self, trees: DraftTrees, contexts: Sequence[Context], packet: Packet) -> PreparedWalk:
        start = time.perf_counter()
        walk = self.verifier.prepare(trees, contexts, packet)
        self.seconds += time.perf_counter() - start

        def timed(logits: Tensor) -> WalkOutcome:
            start = time.perf_counter()
            outcome = walk(logits)
            acceptances = outcome.read()
            self.seconds += time.perf_counter() - start
            return WalkOutcome(lambda: acceptances, outcome.walk)

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rules", nargs="+", default=["coupled", "rejection"])
    parser.add_argument("--shape", help="depth,branching,nodes and min_reach if any; default: the device's own")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for rule in args.rules:
        llm = LLM(
            draft="eagle",
            verify=rule,
            shape=parse_shape(args.shape) if args.shape else None,
            adaptive_drafts=False,
        )
        timed = TimedVerifier(llm.engine.worker.verifier)
        llm.engine.worker.verifier = timed
        prompts = [llm.chat_prompt(messages) for messages in read_prompts("gsm8k-eval")]
        for batch in args.batches:
            for what, parameters in ASKED.items():
                params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, seed=0, **parameters)
                llm.generate(prompts[:batch], params, use_tqdm=False)
                timed.seconds = 0.0
                start = time.perf_counter()
                for _ in range(args.rounds * max(1, 4 // batch)):
                    llm.generate(prompts[:batch], params, use_tqdm=False)
                share = timed.seconds / (time.perf_counter() - start)
                rows.append({"rule": rule, "batch": batch, "parameters": what, "share": round(share, 4)})
    noise = []
    for position in range(200):
        start = time.perf_counter()
        gumbel(0, 0, position, NOISE_VOCAB)
        noise.append(time.perf_counter() - start)
    table = Table("rule", "batch", "parameters", "share of the time")
    for row in rows:
        table.add_row(row["rule"], str(row["batch"]), row["parameters"], f"{row['share']:.1%}")
    Console().print(table)
    noise_ms = round(sorted(noise)[len(noise) // 2] * 1e3, 3)
    write("verification_cost", {"noise_ms_per_128k_position_median": noise_ms, "rows": rows})


if __name__ == "__main__":
    main()
