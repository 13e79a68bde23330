"""Keys and values in 8 bits against 16 bits: perplexity, tau, and how many tokens the same memory holds.

    python -m benchmarks.kv_cache_dtype

With the demo model and its EAGLE-3 head, in bfloat16 and on the native kernels. Perplexity is that of the conversations
of `benchmarks/prompts/`, tau that of greedy answers to the first of them. None of it depends on the machine's speed.
"""

import argparse
import gc
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.acceptance import measure
from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams
from specdec.kernels.settings import KVCacheDtype

EVALS = ("sgd-eval", "gsm8k-eval")
# Of the target, and of the head: None for the same.
KINDS: list[tuple[KVCacheDtype, KVCacheDtype | None]] = [
    ("auto", None),
    ("fp8_e4m3", None),
    ("fp8_e5m2", None),
    ("int8", None),
    ("auto", "int8"),
]
SEATS = 16


def log_probs(llm: LLM, name: str) -> list[float]:
    """Return the log-probability of every token of the conversations but their first."""
    prompts = [llm.chat_prompt(messages) for messages in read_prompts(name)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        for token, entries in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entries is not None
            found.append(entries[token].logprob)
    return found


def perplexity(found: Sequence[float]) -> float:
    return math.exp(-math.fsum(found) / len(found))


def capacity(llm: LLM) -> dict[str, Any]:
    """Return what the engine's cache holds."""
    cache = llm.engine.worker.cache
    parts = {name: part[0].nbytes // cache.block_size for name, part in cache.parts.items()}
    return {"blocks": cache.num_blocks, "bytes_per_token": sum(parts.values()), "bytes_per_token_by_part": parts}


def row(
    kind: tuple[KVCacheDtype, KVCacheDtype | None], args: argparse.Namespace, plain: dict[str, list[float]]
) -> dict[str, Any]:
    """Measure one choice of dtypes.

    Args:
        plain: log-probabilities in 16 bits by kind of text; filled by the first row.
    """
    target, draft = kind
    llm = LLM(
        draft="eagle",
        dtype="bfloat16",
        kernels="native",
        kv_cache_dtype=target,
        draft_kv_cache_dtype=draft,
        kv_cache_memory=args.memory << 20,
        max_num_seqs=SEATS,
        adaptive_drafts=False,
    )
    made: dict[str, Any] = {"kv_cache_dtype": target, "draft_kv_cache_dtype": draft or target, **capacity(llm)}
    for name in EVALS:
        found = log_probs(llm, name)
        first = plain.setdefault(name, found)
        changes = [abs(a - b) for a, b in zip(found, first, strict=True)]
        answers = measure(llm, name, 0.0, args.max_tokens, args.answers)
        made[name] = {
            "tokens": len(found),
            "perplexity": round(perplexity(found), 4),
            "mean_change_of_log_prob": round(math.fsum(changes) / len(changes), 5),
            "tau": answers["tau"],
            "output_tokens": answers["output_tokens"],
            "steps": answers["steps"],
        }
    llm.close()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--answers", type=int, default=40, help="prompts of each kind of text that are answered, for tau"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--memory", type=int, default=64, help="MiB of the cache")
    args = parser.parse_args()
    rows, plain = [], dict[str, list[float]]()
    for kind in KINDS:
        rows.append(row(kind, args, plain))
        print(rows[-1], flush=True)
        gc.collect()
    table = Table("target", "head", "blocks", *(f"{name}, {what}" for name in EVALS for what in ("perplexity", "tau")))
    for one in rows:
        figures = [f"{one[name][what]:.3f}" for name in EVALS for what in ("perplexity", "tau")]
        table.add_row(one["kv_cache_dtype"], one["draft_kv_cache_dtype"], str(one["blocks"]), *figures)
    Console().print(table)
    settings = {"dtype": "bfloat16", "max_tokens": args.max_tokens, "answers": args.answers, "cache_mib": args.memory}
    write("kv_cache_dtype", {**settings, "rows": rows})


if __name__ == "__main__":
    main()
