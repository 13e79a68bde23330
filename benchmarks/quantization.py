"""Weights of few bits against weights as they are: products, a target's speed and memory, changes of its logits.

    python -m benchmarks.quantization products
    python -m benchmarks.quantization logits
    python -m benchmarks.quantization speed --wide FOLDER

FOLDER is what `python -m benchmarks.widen` wrote. All times are medians of interleaved runs in one process; the figures
to read are the ratios. Products go through copies of a weight that fill more than the processor's caches together.

Logits are those of the demo target at every token of its own greedy answers, all fed alike. Perplexity is that of the
conversations before the answers.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.report import finish, in_use_mib, read_prompts, write
from specdec import LLM, SamplingParams
from specdec.bench.timed_run import EngineContender, run_rounds
from specdec.cache.kv_cache import KVCache
from specdec.config import DEMO
from specdec.core.device import DTYPES
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.native.library import Library
from specdec.kernels.native.operations import NativeProjection
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.settings import Quantization
from specdec.kernels.types.tree import TreeRow
from specdec.models.llama import LlamaModel, load_llama
from specdec.verify.tree_batch import TreeBatch

CPU = torch.device("cpu")
KINDS: tuple[Quantization, ...] = get_args(Quantization)
# In bfloat16 the other forms compute as in float32.
FORMS = [("avx512_bf16", "bfloat16"), ("avx512", "float32"), ("avx2", "float32")]
SHAPES = [(4096, 1024), (1024, 4096)]
ROWS = (1, 4, 8, 16)
COPIES = 10
PRODUCT_ROUNDS = 25
BLOCK_SIZE = 16
EVALS = ("sgd-eval", "gsm8k-eval")


def products(form: str, dtype: str, threads: int) -> list[dict[str, Any]]:
    """Time products of few rows, with weights of bfloat16 numbers, by one form of the library.

    Returns nothing where the processor does not have the form.
    """
    try:
        library = Library(threads, DTYPES[dtype], form)
    except ValueError:
        return []
    rows = []
    for shape in SHAPES:
        weights = [torch.randn(*shape).bfloat16().to(DTYPES[dtype]) for _ in range(COPIES)]
        packed = {kind: [NativeProjection(library, weight, quantization=kind) for weight in weights] for kind in KINDS}
        for count in ROWS:
            x = torch.randn(count, shape[1]).to(DTYPES[dtype])
            ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for _ in range(PRODUCT_ROUNDS + 1):
                for kind in KINDS:
                    start = time.perf_counter()
                    for product in packed[kind]:
                        product(x)
                    ms[kind].append((time.perf_counter() - start) / COPIES * 1e3)
            medians = {kind: statistics.median(times[1:]) for kind, times in ms.items()}
            rows.append(
                {
                    "form": form,
                    "dtype": dtype,
                    "threads": threads,
                    "columns": shape[0],
                    "inputs": shape[1],
                    "rows": count,
                    **{f"{kind}_ms": round(value, 3) for kind, value in medians.items()},
                    "ratio": round(medians["none"] / medians["q8"], 2),
                }
            )
    return rows


def load(folder: Path, dtype: str, kind: Quantization) -> tuple[LlamaModel, float]:
    """Return a target, and the MiB that it keeps."""
    gc.collect()
    before = in_use_mib()
    kernels = choose_kernels("native", CPU, DTYPES[dtype], None, kind)
    model = load_llama(folder, DTYPES[dtype], CPU, kernels)
    gc.collect()
    return model, in_use_mib() - before


@torch.inference_mode()
def logits_of(model: LlamaModel, dtype: str, tokens: list[int]) -> Tensor:
    """Return float32 `[tokens, vocab]`, the logits after each token."""
    count, blocks = len(tokens), ceil_div(len(tokens), BLOCK_SIZE)
    kernels = choose_kernels("native", CPU, DTYPES[dtype])
    cache = KVCache(blocks, BLOCK_SIZE, model.config, None, DTYPES[dtype], CPU, kernels=kernels)
    row = TreeRow(tokens, 0, list(range(blocks)), count)
    batch = TreeBatch.pack([row], HostTrees.empty(1), BLOCK_SIZE, CPU)
    table = model.config.rope.table(model.config.head_dim, count, DTYPES[dtype])
    attentions = [PagedAttention(kv, batch.slots, batch.rows, kernels) for kv in cache.target]
    output = model(batch.tokens, rotary_at(table, batch.positions), attentions)
    return model.output(output.features).float()


def changes(texts: Sequence[tuple[list[int], int]], one: Sequence[Tensor], other: Sequence[Tensor]) -> dict[str, Any]:
    """Compare the logits of two models at the tokens of answers; perplexities of what is before them."""
    # The logits after a text's last token predict nothing that is known.
    pairs = [(a[start - 1 : -1], b[start - 1 : -1]) for (_, start), a, b in zip(texts, one, other, strict=True)]
    first, second = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
    # A softmax does not see what is added to all logits; nor does this.
    difference = ((first - first.mean(-1, keepdim=True)) - (second - second.mean(-1, keepdim=True))).abs()
    same = first.argmax(-1) == second.argmax(-1)
    return {
        "tokens": len(first),
        "mean_logit_difference": round(float(difference.mean()), 4),
        "largest_logit_difference": round(float(difference.max()), 3),
        "spread_of_logits": round(float(first.std(-1).mean()), 3),
        "equal_greedy_tokens": round(float(same.double().mean()), 4),
        "perplexities": [round(perplexity(texts, found), 4) for found in (one, other)],
    }


def perplexity(texts: Sequence[tuple[list[int], int]], found: Sequence[Tensor]) -> float:
    """Return the perplexity of the conversations."""
    losses = []
    for (tokens, start), logits in zip(texts, found, strict=True):
        target = torch.tensor(tokens[1:start])
        losses.append(torch.nn.functional.cross_entropy(logits[: start - 1], target, reduction="none"))
    return float(torch.cat(losses).double().mean().exp())


def quality(prompts: int, max_tokens: int) -> dict[str, Any]:
    """Compare the demo target with itself in 8 bits, and bfloat16 with float32 for a measure."""
    llm = LLM(draft=None, dtype="float32", kernels="native")
    conversations = [llm.chat_prompt(messages) for name in EVALS for messages in read_prompts(name)[:prompts]]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    answers = llm.generate(conversations, params, use_tqdm=False)
    texts = [(prompt + answer.token_ids, len(prompt)) for prompt, answer in zip(conversations, answers, strict=True)]
    found = {}
    for dtype in ("float32", "bfloat16"):
        for kind in KINDS:
            model, _ = load(DEMO / "target", dtype, kind)
            found[dtype, kind] = [logits_of(model, dtype, tokens) for tokens, _ in texts]
    return {
        "q8 / none, float32": changes(texts, found["float32", "none"], found["float32", "q8"]),
        "q8 / none, bfloat16": changes(texts, found["bfloat16", "none"], found["bfloat16", "q8"]),
        "bfloat16 / float32, none": changes(texts, found["float32", "none"], found["bfloat16", "none"]),
    }


def speed(folder: Path, dtype: str, prompts: int, rounds: int, max_tokens: int) -> dict[str, Any]:
    """Time plain decoding and decoding with the EAGLE-3 head, one prompt at a time."""
    contenders, params = {}, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for kind in KINDS:
        for name, head in (("plain", None), ("eagle3", folder / "eagle3")):
            llm = LLM(folder / "target", head, dtype=dtype, kernels="native", quantization=kind)
            contenders[f"{name} {kind}"] = EngineContender(llm, params)
    conversations = [llm.chat_prompt(messages) for name in EVALS for messages in read_prompts(name)[:prompts]]
    for contender in contenders.values():
        contender.run(conversations[:1])
    measured = run_rounds(contenders, [[prompt] for prompt in conversations], rounds, warmup=0)
    speeds = {
        name: [len(sample.token_ids) / sample.seconds for one in found for sample in one.samples]
        for name, found in measured.items()
    }
    answers = {name: [sample.token_ids for one in found for sample in one.samples] for name, found in measured.items()}

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(speeds[one], speeds[other], strict=True)), 2)

    assert all(answers[f"eagle3 {kind}"] == answers[f"plain {kind}"] for kind in KINDS), "drafts changed the output"
    return {
        "dtype": dtype,
        "weights_mib": {kind: round(load(folder / "target", dtype, kind)[1], 1) for kind in KINDS},
        "tok_per_s": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "q8_over_none": {name: ratio(f"{name} q8", f"{name} none") for name in ("plain", "eagle3")},
        "eagle3_over_plain": {kind: ratio(f"eagle3 {kind}", f"plain {kind}") for kind in KINDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["products", "logits", "speed"])
    parser.add_argument("--wide", type=Path, help="folder with target and eagle3, for the speed")
    parser.add_argument("--dtype", default="bfloat16", help="of activations, for the speed")
    parser.add_argument("--prompts", type=int, default=2, help="of each kind of text, for the speed")
    parser.add_argument("--texts", type=int, default=8, help="of each kind of text, for the logits")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    if args.what == "products":
        # Torch's threads spin after an operation, beside those of the products.
        torch.set_num_threads(1)
        made = [row for form, dtype in FORMS for count in (2, 1) for row in products(form, dtype, count)]
        finish("quantization_products", {}, made)
    elif args.what == "logits":
        write("quantization_logits", {"comparisons": quality(args.texts, args.max_tokens)})
    else:
        if args.wide is None:
            parser.error("speed needs --wide")
        torch.set_num_threads(2)
        figures = speed(args.wide, args.dtype, args.prompts, args.rounds, args.max_tokens)
        write("quantization_speed", figures)


if __name__ == "__main__":
    main()
