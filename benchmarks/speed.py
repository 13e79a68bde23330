"""Batch 1 on the demo model: transformers' `generate`, plain decoding, and decoding with the EAGLE head.

    python -m benchmarks.speed

All in one process and one dtype, interleaved prompt by prompt; the figures to read are the ratios.
"""

import argparse
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import parse_shape, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.bench.peers import PeerSetup
from specdec.bench.timed_run import Contender, EngineContender, run_rounds
from specdec.bench.transformers_peer import TransformersPeer
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
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    kinds = [name for name in ("sgd-eval", "gsm8k-eval") for _ in range(args.prompts)]
    prompts = [plain.chat_prompt(m) for name in dict.fromkeys(kinds) for m in read_prompts(name)[: args.prompts]]
    setup = PeerSetup(
        label="transformers",
        model=Path(args.model),
        dtype=plain.config.dtype,
        longest=max(map(len, prompts)) + args.max_tokens,
        max_tokens=args.max_tokens,
        end_tokens=frozenset(),
        draft=None,
        settings={},
    )
    engines = {"plain": plain, "eagle": eagle, "fixed": fixed}
    contenders: dict[str, Contender] = {
        "transformers": TransformersPeer(setup),
        **{name: EngineContender(llm, params) for name, llm in engines.items()},
    }
    for contender in contenders.values():
        contender.run(prompts[:1])
    rounds = run_rounds(contenders, [[prompt] for prompt in prompts], args.rounds, warmup=0)
    answers = {name: [sample for one in measured for sample in one.samples] for name, measured in rounds.items()}
    speeds = {name: [len(one.token_ids) / one.seconds for one in samples] for name, samples in answers.items()}
    taus = [sample.stats.tau for sample in answers["eagle"]]
    pairs = zip(answers["plain"], answers["eagle"], strict=True)
    equal = sum(one.token_ids == other.token_ids for one, other in pairs)

    def ratio(a: str, b: str, kind: str | None = None) -> float:
        pairs = zip(speeds[a], speeds[b], kinds * args.rounds, strict=True)
        return round(statistics.median(x / y for x, y, own in pairs if kind in (None, own)), 2)

    names = list(dict.fromkeys(kinds))
    table = Table("", "tok/s, median", "of transformers", "of plain", *(f"of plain, {kind}" for kind in names))
    for name in speeds:
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
