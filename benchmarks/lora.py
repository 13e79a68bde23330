"""A batch in which each request has an adapter of its own, against the same batch without adapters.

    python -m benchmarks.lora

An adapter of every projection is trained for some seconds on conversations, and loaded under as many names as there are
requests: its cost does not depend on its numbers, and drafts meet a target that the head was not trained for. Runs are
interleaved in one process, without a prefix cache; the figures to read are the ratios of throughput, medians over
rounds. Goal: 8 adapters in one batch at least 0.7 of the throughput without. Tau: `benchmarks.lora_drafts`.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import finish, read_prompts
from benchmarks.trained_adapters import train_adapter
from specdec import LLM, LoRARequest, SamplingParams
from specdec.bench.environment import shown_path
from specdec.config import DEMO, DEMO_HEAD

KINDS = ("without", "one adapter", "own adapters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO / "target"), help="target folder")
    parser.add_argument("--draft", default=str(DEMO_HEAD), help="head folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=8, help="adapters, and requests of the batch")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="of training")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    settings: Any = {"enable_prefix_caching": False, "max_loras": args.adapters, "max_lora_rank": args.rank}
    engines = {
        name: LLM(args.model, draft, threads=args.threads, enable_lora=True, **settings)
        for name, draft in (("plain", None), ("drafts", args.draft))
    }
    prompts = [engines["plain"].chat_prompt(messages) for messages in read_prompts("sgd-eval")]
    batch = prompts[: args.adapters]
    with tempfile.TemporaryDirectory() as folder:
        text = [token for prompt in prompts[args.adapters :] for token in prompt]
        losses = train_adapter(Path(args.model), Path(folder), text, args.rank, args.steps)
        adapters = [LoRARequest(f"adapter-{number}", number, folder) for number in range(1, args.adapters + 1)]
        given = {"without": None, "one adapter": adapters[0], "own adapters": adapters}
        seconds: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in engines}
        for number in range(-1, args.rounds):
            for name, llm in engines.items():
                for kind in KINDS[:: -1 if number % 2 else 1]:
                    start = time.perf_counter()
                    llm.generate(batch, params, lora_request=given[kind], use_tqdm=False)
                    if number >= 0:
                        seconds[name][kind].append(time.perf_counter() - start)
    rows = []
    for name, own in seconds.items():
        for kind, values in own.items():
            ratio = statistics.median(a / b for a, b in zip(own["without"], values, strict=True))
            speed = len(batch) * args.max_tokens / statistics.median(values)
            rows.append({"engine": name, "adapters": kind, "tok_per_s": round(speed, 1), "ratio": round(ratio, 3)})
    finish(
        "lora",
        {
            "model": shown_path(args.model),
            "draft": shown_path(args.draft),
            "dtype": engines["plain"].config.dtype,
            "threads": args.threads,
            "adapters": args.adapters,
            "rank": args.rank,
            "training_steps": args.steps,
            "training_loss": [round(loss, 3) for loss in losses],
            "max_tokens": args.max_tokens,
            "rounds": args.rounds,
        },
        rows,
    )


if __name__ == "__main__":
    main()
