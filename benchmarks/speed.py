"""Batch 1 on the demo model: transformers' `generate`, plain decoding, and decoding with the EAGLE head.

    python -m benchmarks.speed

All in one process and one dtype, interleaved prompt by prompt; the figures to read are the ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.report import parse_shape, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.config import DEMO, DEMO_HEAD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "target"), help="target folder")
    parser.add_argument("--draft", default=str(DEMO_HEAD), help="head folder")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=6, help="of each kind of text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--shape", help="depth,branching,nodes and min_reach if any; default: the device's own")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = parse_shape(args.shape) if args.shape else None
    plain = LLM(args.model, None, dtype=args.dtype)
    eagle = LLM(args.model, args.draft, dtype=args.dtype, shape=shape)
    fixed = LLM(args.model, args.draft, dtype=args.dtype, shape=shape, adaptive_drafts=False)
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=plain.config.dtype).eval()
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    kinds = [name for name in ("sgd-eval", "gsm8k-eval") for _ in range(args.prompts)]
    prompts = [plain.chat_prompt(m) for name in dict.fromkeys(kinds) for m in read_prompts(name)[: args.prompts]]
    taus: list[float] = []

    def run_transformers(prompt: list[int]) -> list[int]:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=args.max_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return list(out[0, len(prompt) :].tolist())

    def run_plain(prompt: list[int]) -> list[int]:
        return plain.generate([prompt], params)[0].token_ids

    def run_eagle(prompt: list[int]) -> list[int]:
        output = eagle.generate([prompt], params)[0]
        taus.append(output.stats.tau)
        return output.token_ids

    def run_fixed(prompt: list[int]) -> list[int]:
        return fixed.generate([prompt], params)[0].token_ids

    runs: dict[str, Callable[[list[int]], list[int]]] = {
        "transformers": run_transformers,
        "plain": run_plain,
        "eagle": run_eagle,
        "fixed": run_fixed,
    }
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    equal = 0
    for run in runs.values():
        run(prompts[0])
    taus.clear()
    for _ in range(args.rounds):
        for prompt in prompts:
            tokens = {}
            for name, run in runs.items():
                start = time.perf_counter()
                tokens[name] = run(prompt)
                speeds[name].append(len(tokens[name]) / (time.perf_counter() - start))
            equal += tokens["plain"] == tokens["eagle"]

    def ratio(a: str, b: str, kind: str | None = None) -> float:
        pairs = zip(speeds[a], speeds[b], kinds * args.rounds, strict=True)
        return round(statistics.median(x / y for x, y, own in pairs if kind in (None, own)), 2)

    names = list(dict.fromkeys(kinds))
    table = Table("", "tok/s, median", "of transformers", "of plain", *(f"of plain, {kind}" for kind in names))
    for name in runs:
        table.add_row(
            name,
            f"{statistics.median(speeds[name]):.0f}",
            f"{ratio(name, 'transformers'):.2f}",
            f"{ratio(name, 'plain'):.2f}",
            *(f"{ratio(name, 'plain', kind):.2f}" for kind in names),
        )
    Console().print(table)
    tau = statistics.mean(taus)
    speedup = ratio("eagle", "plain")
    write(
        "speed",
        {
            "dtype": plain.config.dtype,
            "shape": vars(eagle.config.shape),
            "prompts": len(prompts),
            "rounds": args.rounds,
            "max_tokens": args.max_tokens,
            "tok_per_s_median": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
            "plain_over_transformers": ratio("plain", "transformers"),
            "eagle_over_plain": speedup,
            "over_plain_by_prompts": {
                name: {kind: ratio(name, "plain", kind) for kind in names} for name in ("eagle", "fixed")
            },
            "tau": round(tau, 3),
            "cycle_cost": round(tau / speedup, 3),
            "runs_with_equal_tokens": f"{equal} of {len(prompts) * args.rounds}",
        },
    )


if __name__ == "__main__":
    main()
