"""Tau and speed with several draft sources and with predicted texts; whether tokens are those of plain decoding.

    python -m benchmarks.predictions                                          # the demo model
    python -m benchmarks.predictions --model FOLDER --draft none ngram --code-edits --requests 8 --max-tokens 128

Of the demo, each prediction is the model's own answer of the same seed with small edits: tokens inserted, removed and
replaced. Of `--code-edits` (`prompts/code-edits.jsonl`) it is the file before the edit. Tau is measured with fixed
trees, speed with adaptive ones, one request after another; modes take turns, request by request.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.report import PROMPTS, finish, parse_shape, read_prompts
from specdec import LLM, DraftShape, SamplingParams, Speculation
from specdec.core.outputs import SpeculationStats

# A request: its prompt, and the text that it brings, None for one made of its own answer.
Case = tuple[list[int], str | None]


def edited(tokens: list[int], share: float, seed: int) -> list[int]:
    """Return a text in which about `share` of the tokens are edited: removed, replaced, or another one inserted."""
    chance, text = random.Random(seed), list[int]()
    for token in tokens:
        kind = chance.random() / share
        other = chance.choice(tokens)
        text += [] if kind < 1 / 3 else [other] if kind < 2 / 3 else [other, token] if kind < 1 else [token]
    return text


def read_cases(llm: LLM, args: argparse.Namespace) -> list[Case]:
    if not args.code_edits:
        return [(llm.chat_prompt(messages), None) for messages in read_prompts("sgd-eval")[: args.requests]]
    lines = (PROMPTS / "code-edits.jsonl").read_text(encoding="utf-8").splitlines()
    cases: list[Case] = []
    for edit in map(json.loads, lines[: args.requests]):
        text = f"{edit['instruction']} Answer with the whole file.\n\n```\n{edit['file']}```"
        cases.append((llm.chat_prompt([{"role": "user", "content": text}]), f"```\n{edit['file']}```"))
    return cases


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> tuple[list[list[int]], SpeculationStats]:
    """Return the requests' tokens and figures, all in one batch."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.token_ids) for output in outputs], SpeculationStats.total(output.stats for output in outputs)


def measure(llms: dict[str, tuple[LLM, LLM]], cases: list[Case], temperature: float, args: argparse.Namespace) -> Any:
    """Return figures of every draft, without predictions and with them."""
    prompts = [prompt for prompt, _ in cases]
    base = SamplingParams(temperature=temperature, max_tokens=args.max_tokens)
    plain = [replace(base, seed=seed, speculation=Speculation(enabled=False)) for seed in range(len(cases))]
    first = next(iter(llms.values()))[0]
    expected, _ = run(first, prompts, plain)
    without = [replace(own, speculation=Speculation()) for own in plain]
    given = [
        text if text is not None else edited(tokens, args.share, seed)
        for seed, ((_, text), tokens) in enumerate(zip(cases, expected, strict=True))
    ]
    predicted = [replace(own, prediction=text) for own, text in zip(without, given, strict=True)]
    rows, speeds = [], dict[tuple[str, bool], list[float]]()
    modes = [(draft, uses) for draft in llms for uses in (False, True)]
    for index in range(0 if args.no_speed else len(cases)):
        for draft, uses in modes:
            own = (predicted if uses else without)[index]
            began = time.perf_counter()
            (output,) = llms[draft][1].generate([prompts[index]], own, use_tqdm=False)
            seconds = time.perf_counter() - began
            assert list(output.token_ids) == expected[index]
            speeds.setdefault((draft, uses), []).append(len(expected[index]) / seconds)
    for draft, uses in modes:
        tokens, stats = run(llms[draft][0], prompts, predicted if uses else without)
        own_speeds = speeds.get((draft, uses), [])
        plain_speeds = speeds.get(("none", False), [])
        ratios = [mine / other for mine, other in zip(own_speeds, plain_speeds, strict=False)]
        rows.append(
            {
                "draft": draft,
                "prediction": uses,
                "temperature": temperature,
                "tau": round(stats.tau, 3),
                "nodes_per_step": round(stats.drafted / stats.steps, 2),
                "accepted_prediction": stats.accepted_prediction,
                "rejected_prediction": stats.rejected_prediction,
                "tokens_equal_plain": tokens == expected,
                "tok_per_s": round(median(own_speeds), 1) if own_speeds else None,
                "speed_over_plain": round(median(ratios), 3) if ratios else None,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target folder; default: the demo model")
    parser.add_argument("--draft", nargs="+", default=["none", "eagle", "ngram", "eagle,ngram"], help="as for LLM")
    parser.add_argument("--code-edits", action="store_true", help="files to be edited, in place of dialogues")
    parser.add_argument(
        "--shape", type=parse_shape, default=DraftShape(6, 3, 8, 0.6), help="DEPTH,BRANCHING,NODES,REACH"
    )
    parser.add_argument("--share", type=float, default=0.06, help="share of the tokens that are edited")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--no-speed", action="store_true", help="measure tau alone")
    parser.add_argument("--name", default="predictions", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    llms = {
        draft: (
            LLM(args.model, draft, shape=args.shape, adaptive_drafts=False),
            LLM(args.model, draft, shape=args.shape),
        )
        for draft in args.draft
    }
    llm = next(iter(llms.values()))[0]
    cases = read_cases(llm, args)
    rows = [row for temperature in args.temperatures for row in measure(llms, cases, temperature, args)]
    settings = {"dtype": llm.config.dtype, "shape": vars(args.shape), "requests": len(cases)}
    prompts, share = ("code-edits", None) if args.code_edits else ("sgd-eval", args.share)
    settings |= {"max_tokens": args.max_tokens, "prompts": prompts, "edited_share": share}
    shown = ("temperature", "draft", "prediction", "tau", "nodes_per_step", "speed_over_plain", "tokens_equal_plain")
    finish(args.name, settings, rows, shown)


if __name__ == "__main__":
    main()
