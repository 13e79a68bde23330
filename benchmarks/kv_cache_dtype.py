"""Keys and values in 8 bits against 16 bits: perplexity, tau, and how many requests run in the same memory.

    python -m benchmarks.kv_cache_dtype

With the demo model and its EAGLE-3 head, in bfloat16 and on the native kernels. Perplexity is that of the conversations
of `benchmarks/prompts/`, tau that of greedy answers to the first of them. A checkpoint with scales is made from the
largest keys and values of each head in the first conversations. None of it depends on the machine's speed.
"""

import argparse
import gc
import json
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.acceptance import measure
from benchmarks.report import read_prompts, write
from specdec import LLM, SamplingParams
from specdec.config import DEMO, DEMO_HEAD
from specdec.kernels.types.kv_entries import KV_DTYPES, LARGEST
from specdec.kernels.types.settings import KVCacheDtype

EVALS = ("sgd-eval", "gsm8k-eval")
# Conversations of each kind of text from which a checkpoint's scales are made.
CALIBRATED = 20
SEATS = 16
# Requests that run at once in 16 bits where requests are counted, and what one is: in blocks of 16, it takes three.
COUNTED, PROMPT, OUTPUT, BLOCKS = 100, 40, 8, 3


class Kind(NamedTuple):
    """A choice of dtypes.

    Attributes:
        target: `kv_cache_dtype`.
        draft: `draft_kv_cache_dtype`; None for the same.
        calibrated: whether the checkpoint has scales of the target's keys and values.
    """

    target: KVCacheDtype
    draft: KVCacheDtype | None = None
    calibrated: bool = False


KINDS = [
    Kind("auto"),
    Kind("fp8_e4m3"),
    Kind("fp8_e4m3", calibrated=True),
    Kind("fp8_e5m2"),
    Kind("int8"),
    Kind("int8", calibrated=True),
    Kind("auto", "int8"),
]


def largest_entries() -> Tensor:
    """Return the largest key and value of each head in the calibration's texts, `[layers, 2 * kv_heads]`."""
    llm = LLM(draft=None, dtype="bfloat16", kernels="native", kv_cache_memory=256 << 20, max_num_seqs=SEATS)
    entries = llm.engine.worker.cache.target
    entries.zero_()
    prompts = [llm.chat_prompt(messages) for name in EVALS for messages in read_prompts(name)[:CALIBRATED]]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    found = entries.float().abs().amax(dim=(1, 3))
    llm.close()
    return found


def save_calibrated(folder: Path, largest: Tensor, dtype: KVCacheDtype) -> Path:
    """Write the demo target with scales by which its largest keys and values are the largest codes."""
    shutil.copytree(DEMO / "target", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer, row in enumerate(largest / LARGEST[KV_DTYPES[dtype]]):
        for name, scales in zip(("k_scale", "v_scale"), row.chunk(2), strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = scales.clone()
    save_file(tensors, file, {"format": "pt"})
    kind = "int" if KV_DTYPES[dtype] == torch.int8 else "float"
    scheme = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "attn_head", "dynamic": False}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


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


def load(kind: Kind, model: Path, head: Path | None, memory: int, seats: int, **settings: Any) -> LLM:
    """Return an engine with these dtypes, whose cache has `memory` bytes."""
    return LLM(
        model,
        head,
        dtype="bfloat16",
        kernels="native",
        kv_cache_dtype=kind.target,
        draft_kv_cache_dtype=kind.draft if head else None,
        kv_cache_memory=memory,
        max_num_seqs=seats,
        adaptive_drafts=False,
        **settings,
    )


def most_running(kind: Kind, model: Path, head: Path | None) -> int:
    """Count the requests that run at once in the memory in which `COUNTED` do in 16 bits."""
    plain = load(Kind("auto"), DEMO / "target", head, 1 << 20, 1)
    memory = COUNTED * BLOCKS * plain.engine.worker.cache.block_size * capacity(plain)["bytes_per_token"]
    plain.close()
    llm = load(kind, model, head, memory, 4 * COUNTED, watermark=0, max_num_batched_tokens=4 * COUNTED * PROMPT)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    for i in range(4 * COUNTED):
        # All differ from the first token on.
        group = llm.engine.new_group(llm.request_maker.add([100 + i] * PROMPT, params))
        llm.engine.scheduler.add(group.requests[0])
    most = 0
    while llm.engine.has_unfinished:
        llm.engine.step()
        most = max(most, llm.stats().running)
    llm.close()
    return most


def row(kind: Kind, model: Path, args: argparse.Namespace, plain: dict[str, list[float]]) -> dict[str, Any]:
    """Measure one choice of dtypes.

    Args:
        model: the target's folder.
        plain: log-probabilities in 16 bits by kind of text; filled by the first row.
    """
    llm = load(kind, model, DEMO_HEAD, args.memory << 20, SEATS)
    made: dict[str, Any] = {
        "kv_cache_dtype": kind.target,
        "draft_kv_cache_dtype": kind.draft or kind.target,
        "checkpoint_scales": kind.calibrated,
        **capacity(llm),
        "requests": {"target": most_running(kind, model, None), "with_head": most_running(kind, model, DEMO_HEAD)},
    }
    for name in EVALS:
        found = log_probs(llm, name)
        first = plain.setdefault(name, found)
        changes = [a - b for a, b in zip(found, first, strict=True)]
        answers = measure(llm, name, 0.0, args.max_tokens, args.answers)
        made[name] = {
            "tokens": len(found),
            "perplexity": round(perplexity(found), 4),
            "standard_error_of_change": round(perplexity(found) * standard_error(changes), 4),
            "mean_change_of_log_prob": round(math.fsum(map(abs, changes)) / len(changes), 5),
            "tau": answers["tau"],
            "output_tokens": answers["output_tokens"],
            "steps": answers["steps"],
        }
    llm.close()
    return made


def standard_error(changes: Sequence[float]) -> float:
    """Return the standard error of a mean of independent changes."""
    mean = math.fsum(changes) / len(changes)
    return math.sqrt(math.fsum((change - mean) ** 2 for change in changes) / (len(changes) - 1) / len(changes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--answers", type=int, default=40, help="prompts of each kind of text that are answered, for tau"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--memory", type=int, default=64, help="MiB of the cache")
    args = parser.parse_args()
    rows, plain, largest = [], dict[str, list[float]](), largest_entries()
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            model = DEMO / "target"
            if kind.calibrated:
                model = save_calibrated(Path(folder) / kind.target, largest, kind.target)
            rows.append(row(kind, model, args, plain))
            print(rows[-1], flush=True)
            gc.collect()
    texts = (f"{name}, {what}" for name in EVALS for what in ("perplexity", "tau"))
    table = Table("target", "head", "checkpoint's scales", "blocks", "requests", *texts)
    for one in rows:
        figures = [f"{one[name][what]:.3f}" for name in EVALS for what in ("perplexity", "tau")]
        scales, requests = str(one["checkpoint_scales"]), "{target} / {with_head}".format(**one["requests"])
        dtypes = one["kv_cache_dtype"], one["draft_kv_cache_dtype"]
        table.add_row(*dtypes, scales, str(one["blocks"]), requests, *figures)
    Console().print(table)
    settings: dict[str, Any] = {"requests_in_16_bits": COUNTED, "tokens_of_a_request": PROMPT + OUTPUT}
    settings |= {"dtype": "bfloat16", "max_tokens": args.max_tokens, "answers": args.answers, "cache_mib": args.memory}
    write("kv_cache_dtype", {**settings, "rows": rows})


if __name__ == "__main__":
    main()
