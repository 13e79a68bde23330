"""Tau and acceptance per depth of the demo head, on 100 prompts each of two kinds of text, for each acceptance rule.

    python -m benchmarks.acceptance

Prompts: `benchmarks/prompts/`. Tau is a property of head and tree, not of the machine.
"""

import argparse
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from benchmarks.report import finish, read_prompts
from specdec import LLM, DraftShape, SamplingParams
from specdec.core.outputs import SpeculationStats
from specdec.draft_heads.drafting import level_loops, tree_drafter
from specdec.draft_heads.drafting.drafter import Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter

# Per line of the table, the rule that verifies.
RULES = {"coupled": "coupled", "one-hot top-k": "rejection", "rejection, drawn": "rejection"}
SEATS = 32
PROMPT_TOKENS = 1 << 14


def measure(llm: LLM, name: str, temperature: float, max_tokens: int, count: int | None = None) -> dict[str, Any]:
    """Return tau and acceptance over the first `count` prompts of a kind of text; None for all."""
    prompts = [llm.chat_prompt(messages) for messages in read_prompts(name)[:count]]
    params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens) for seed in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    total = SpeculationStats.total(output.stats for output in outputs)
    return {
        "prompts": name,
        "temperature": temperature,
        "requests": len(outputs),
        "output_tokens": sum(len(output.token_ids) for output in outputs),
        "steps": total.steps,
        "tau": round(total.tau, 3),
        "accepted_share_per_depth": [round(count / total.steps, 3) for count in total.accepted_per_depth],
        "nodes_per_step": round(total.drafted / total.steps, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target folder; default: the demo model")
    parser.add_argument("--draft", default="eagle", help="head folder; default: the demo head")
    parser.add_argument("--shapes", nargs="+", default=["6,10,60"], help="depth,branching,nodes of each tree")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES), help="at temperatures above 0")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--name", default="acceptance", help="of the JSON file under benchmarks/results/")
    args = parser.parse_args()
    rows = []
    for text in args.shapes:
        depth, branching, nodes = map(int, text.split(","))
        for rule in args.rules:
            llm = LLM(
                args.model,
                args.draft,
                shape=DraftShape(depth, branching, nodes),
                verify=RULES[rule],
                adaptive_drafts=False,
                # Every row's whole tree in every step, also beside prompts.
                max_num_seqs=SEATS,
                max_num_batched_tokens=SEATS * (1 + nodes) + PROMPT_TOKENS,
            )
            assert isinstance(llm.engine.worker.drafter, ModelDrafter)
            with ExitStack() as stack:
                if rule == "one-hot top-k":
                    # The most probable tokens by q, as in EAGLE-2 and SGLang: searched without noise, not drawn.
                    llm.engine.worker.drafter.proposal = Proposal.COUPLED
                    stack.enter_context(patch.object(level_loops, "noise_keys", lambda rows: [None] * len(rows)))
                    stack.enter_context(patch.object(tree_drafter, "noise_key", lambda _: None))
                for name in ("sgd-eval", "gsm8k-eval"):
                    for temperature in args.temperatures:
                        # At temperature 0 all rules are one.
                        if temperature or rule == args.rules[0]:
                            row = {"rule": rule, "shape": text, **measure(llm, name, temperature, args.max_tokens)}
                            print(row, flush=True)
                            rows.append(row)
    finish(args.name, {"dtype": llm.config.dtype, "max_tokens": args.max_tokens}, rows)


if __name__ == "__main__":
    main()
