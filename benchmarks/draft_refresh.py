"""Tau before and after the demo's EAGLE-3 head is trained further on requests that an engine has kept.

    python -m benchmarks.draft_refresh

The demo target knows Python, but its head was trained on dialogues and arithmetic alone. An engine continues pieces of
Python's standard library with `collect_drafts`; the head is trained further on what was kept; a second engine takes it
in place of the first head (`LLM.update_draft`). Tau of both heads is measured by that engine, on other pieces of the
library and on dialogues, and the tokens are compared.
"""

import argparse
import random
import sysconfig
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.report import finish, parse_shape, read_prompts
from specdec import LLM, SamplingParams
from specdec.config import DEMO_HEAD
from specdec.train_eagle.training.read_config import read_config
from specdec.train_eagle.training.train_run import TrainingRun

# Tokens that the demo's head proposes.
DRAFT_VOCAB = 3072
PIECE = 240


def pieces(count: int) -> list[str]:
    """Return pieces of the standard library, from the beginning of a line on; the same for the same Python."""
    chance, found = random.Random(0), list[str]()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [text for file in files if len(text := file.read_text(encoding="utf-8", errors="ignore")) > 10 * PIECE]
    while len(found) < count:
        text = chance.choice(texts)
        start = text.find("\n", chance.randrange(len(text) - 5 * PIECE)) + 1
        found.append(text[start : start + PIECE])
    return found


def params(count: int, temperature: float, max_tokens: int) -> list[SamplingParams]:
    """Return parameters of `count` requests, each with its own seed."""
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        for seed in range(count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", default="6,3,8", help="depth,branching,nodes and min_reach if any")
    parser.add_argument("--served", type=int, default=400, help="requests that are kept")
    parser.add_argument("--measured", type=int, default=40, help="other requests of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings: dict[str, Any] = {"dtype": "float32", "shape": parse_shape(args.shape), "adaptive_drafts": False}
    code = pieces(args.measured + args.served)
    held_out, served = code[: args.measured], code[args.measured :]
    with TemporaryDirectory() as folder:
        ring, new = Path(folder) / "ring", Path(folder) / "head"
        with LLM(draft=DEMO_HEAD, collect_drafts=ring, collect_drafts_share=1.0, **settings) as llm:
            llm.generate(served, params(len(served), 0.7, args.max_tokens), use_tqdm=False)
        given = {"data": [ring], "out": new, "start": DEMO_HEAD, "draft_vocab_size": DRAFT_VOCAB, "tracker": "none"}
        given |= {"epochs": args.epochs, "lr": args.lr, "batch_tokens": 2048, "evaluate_prompts": 0}
        run = TrainingRun(read_config({**given, "evaluate_every": args.epochs}))
        began = time.perf_counter()
        run.train()
        seconds = time.perf_counter() - began
        llm = LLM(draft=DEMO_HEAD, **settings)
        dialogues = [llm.chat_prompt(messages) for messages in read_prompts("sgd-eval")[: args.measured]]
        texts: dict[str, list[Any]] = {"Python": held_out, "dialogues": dialogues}
        cases = [(name, temperature) for name in texts for temperature in (0.0, 0.7)]

        def measured() -> list[tuple[float, list[list[int]]]]:
            found = []
            for name, temperature in cases:
                prompts = texts[name]
                outputs = llm.generate(prompts, params(len(prompts), temperature, args.max_tokens), use_tqdm=False)
                stats = [output.stats for output in outputs]
                tau = sum(one.tokens for one in stats) / sum(one.steps for one in stats)
                found.append((tau, [output.token_ids for output in outputs]))
            return found

        before = measured()
        began = time.perf_counter()
        llm.update_draft(new)
        update_seconds = time.perf_counter() - began
        after = measured()
    rows: list[dict[str, Any]] = []
    for (name, temperature), (old_tau, old), (new_tau, tokens) in zip(cases, before, after, strict=True):
        equal = sum(one == other for one, other in zip(old, tokens, strict=True))
        row = {
            "text": name,
            "temperature": temperature,
            "tau_before": round(old_tau, 3),
            "tau_after": round(new_tau, 3),
        }
        rows.append({**row, "equal_outputs": f"{equal} of {len(old)}"})
    figures = {
        "served": args.served,
        "shape": args.shape,
        "max_tokens": args.max_tokens,
        "epochs": args.epochs,
        "lr": args.lr,
        "tokens": run.plan.tokens,
        "train_seconds": round(seconds, 1),
        "update_seconds": round(update_seconds, 2),
    }
    finish("draft_refresh", figures, rows)


if __name__ == "__main__":
    main()
