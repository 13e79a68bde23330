"""Tau at long contexts with and without a sliding window of the draft head.

    python -m benchmarks.draft_window
    python -m benchmarks.draft_window --model smollm2 --heads HEAD ... --name draft_window_smollm2

Prompts are several conversations of `prompts/sgd-eval.jsonl` in a row, each with the target's own answer, as many as
fit in a number of tokens. Heads were trained on single conversations. Tau is a property of head and text, not of the
machine. A window of "none" is the head's own, if it has one.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.report import finish, read_prompts
from specdec import LLM, SamplingParams
from specdec.bench.environment import shown_path
from specdec.core.outputs import SpeculationStats

CONTEXTS, WINDOWS = (300, 700, 1500), (None, 256, 128, 64)
Messages = list[dict[str, str]]


def answered(model: str | None, conversations: Sequence[Messages], most: int) -> list[Messages]:
    """Return the conversations with the target's greedy answers."""
    llm = LLM(model, draft=None)
    prompts = [llm.chat_prompt(messages) for messages in conversations]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=most), use_tqdm=False)
    return [
        [*messages, {"role": "assistant", "content": output.text}]
        for messages, output in zip(conversations, outputs, strict=True)
    ]


def long_prompt(llm: LLM, before: Sequence[Messages], last: Messages, context: int) -> list[int]:
    """Return the last conversation behind as many others as fit in `context` tokens together."""
    found = llm.chat_prompt(last)
    for start in reversed(range(len(before))):
        longer = llm.chat_prompt([*(turn for each in before[start:] for turn in each), *last])
        if len(longer) > context:
            break
        found = longer
    return found


def measure(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> float:
    """Return tau over all prompts."""
    total = SpeculationStats()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for output in llm.generate(prompts, params, use_tqdm=False):
        total.add(output.stats)
    return round(total.tau, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the demo's target by default")
    parser.add_argument("--heads", nargs="+", default=["eagle3", "dspark"])
    parser.add_argument("--name", default="draft_window", help="name of the result")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    conversations = read_prompts("sgd-eval")
    whole = answered(args.model, conversations, 128)
    rows: list[dict[str, Any]] = []
    for head in args.heads:
        for window in WINDOWS:
            llm = LLM(args.model, draft=head, draft_window_size=window, adaptive_drafts=False)
            for context in CONTEXTS:
                # The conversations before a prompt's own; the first ones' are the last of the file.
                prompts = [
                    long_prompt(llm, [*whole[place + 1 :], *whole[:place]], conversations[place], context)
                    for place in range(args.prompts)
                ]
                tau = measure(llm, prompts, args.max_tokens)
                longest = sum(map(len, prompts)) / len(prompts)
                rows.append(
                    {"head": head, "window": window, "context": context, "prompt_tokens": round(longest), "tau": tau}
                )
                print(rows[-1], flush=True)
    figures = {"model": shown_path(llm.config.model), "prompts": args.prompts, "max_tokens": args.max_tokens}
    finish(args.name, figures, rows)


if __name__ == "__main__":
    main()
