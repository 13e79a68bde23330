"""Tau of an adapter's requests, drafted by the head as it was trained and by the head with an adapter of its own.

    python -m benchmarks.lora_drafts

An adapter of the target is trained for some seconds on conversations (as in `benchmarks.lora`), and answers some of
them. An adapter of the head is then trained on these answers and the adapted target's states. Tau is that of fixed
trees, on prompts of which neither has seen any, as the engine's counts for each adapter tell it; without adapters
beside it.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import read_prompts, write
from benchmarks.trained_adapters import train_adapter, train_draft_adapter
from specdec import LLM, LoRARequest, SamplingParams
from specdec.bench.environment import shown_path
from specdec.config import DEMO, DEMO_HEAD
from specdec.train_eagle.data.chat_mask import Sample

TEXT = "sgd-eval"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "target", help="target folder")
    parser.add_argument("--draft", type=Path, default=DEMO_HEAD, help="head folder")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="of the target's training")
    parser.add_argument("--draft-steps", type=int, default=150, help="of the head's training")
    parser.add_argument("--prompts", type=int, default=32, help="prompts that tau is measured on")
    parser.add_argument("--training-prompts", type=int, default=64, help="other ones, whose answers train the head")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    settings: Any = {"adaptive_drafts": False, "enable_lora": True, "max_lora_rank": args.rank}
    llm = LLM(args.model, args.draft, threads=args.threads, **settings)
    prompts = [llm.chat_prompt(messages) for messages in read_prompts(TEXT)]
    measured, others = prompts[: args.prompts], prompts[args.prompts :][: args.training_prompts]
    with tempfile.TemporaryDirectory() as folder:
        target, head = Path(folder) / "target", Path(folder) / "head"
        text = [token for prompt in prompts[args.prompts :] for token in prompt]
        losses = train_adapter(args.model, target, text, args.rank, args.steps)
        plain = LoRARequest("plain head", 1, str(target))
        answers = llm.generate(others, params, lora_request=plain, use_tqdm=False)
        samples = [
            Sample([*prompt, *answer.token_ids], [False] * len(prompt) + [True] * len(answer.token_ids))
            for prompt, answer in zip(others, answers, strict=True)
        ]
        draft_losses = train_draft_adapter(args.model, target, args.draft, head, samples, args.rank, args.draft_steps)
        llm.remove_lora(1)
        # Counted from here on.
        llm = LLM(args.model, args.draft, threads=args.threads, **settings)
        for request in (LoRARequest("target", 1, str(target)), LoRARequest("target", 2, str(target), str(head))):
            llm.generate(measured, params, lora_request=request, use_tqdm=False)
        found = llm.stats().adapters["target"]
        before = llm.stats()
        llm.generate(measured, params, use_tqdm=False)
        after = llm.stats()
    trees, tokens = after.trees_verified - before.trees_verified, after.tree_tokens - before.tree_tokens
    taus = {
        "without adapters": round(tokens / trees, 3),
        "adapted target, plain head": round(found.plain.tau, 3),
        "adapted target, adapted head": round(found.adapted.tau, 3),
    }
    for name, tau in taus.items():
        print(f"{name}: tau {tau} ({llm.config.tree_in_words})")
    write(
        "lora_drafts",
        {
            "model": shown_path(str(args.model)),
            "draft": shown_path(str(args.draft)),
            "dtype": llm.config.dtype,
            "rank": args.rank,
            "training_steps": args.steps,
            "training_loss": [round(loss, 3) for loss in losses],
            "draft_training_steps": args.draft_steps,
            "draft_training_loss": [round(loss, 3) for loss in draft_losses],
            "training_prompts": len(others),
            "prompts": len(measured),
            "max_tokens": args.max_tokens,
            "tau": taus,
        },
    )


if __name__ == "__main__":
    main()
