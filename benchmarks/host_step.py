"""Host time of a plain step with the device simulated away: scheduling, packing, plans, read-back, commit.

    python -m benchmarks.host_step [--before TREE]

The target's pass is a graph that computes nothing, and verification finds token 0, so that what is left is the host's.
Attention is planned as for Llama-3.1-8B on an H100, all numbers of the step are written to where a GPU would get them
from, and those of the graph copied to its inputs. On a GPU come one copy, two launches and a graph's on top, and one
copy back. With `--before`, another tree of this repository takes turns with this one.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specdec.building.engine_builder import EngineBuilder
from specdec.config import EngineConfig
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.engine.engine import LLMEngine
from specdec.engine.request_maker import RequestMaker
from specdec.execution import graph_capture
from specdec.kernels.kernel_set import choose_kernels
from specdec.kernels.triton.attention_plan import AttentionGeometry
from specdec.kernels.triton.walks import DeviceWalks
from specdec.kernels.types.draft_trees import Walks
from specdec.kernels.types.integers import ceil_div
from specdec.kernels.types.types import Walk
from specdec.kernels.types.upload import Packet
from specdec.models.generation_config import GenerationConfig
from specdec.models.llama import LlamaModel, LlamaWeights
from specdec.parallel.ranks import Ranks
from specdec.scheduling.scheduler_config import SchedulerConfig
from specdec.text.detokenizer import Detokenizer
from specdec.verify.sampling import Sampling

BATCHES, CONTEXTS = (1, 16, 64), (1024, 8192, 32768)
STEPS, WARM_UPS, BUDGET = 40, 8, 8192
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1 << 16,
    "rms_norm_eps": 1e-5,
}
LLAMA_8B = AttentionGeometry(2, 128, 4, 8)


def new_tokens(batch: int, context: int) -> int:
    """Return the tokens that the first request may get until the last one's are measured."""
    return STEPS + WARM_UPS + 8 + 2 * ceil_div(batch * context, BUDGET)


def engine_of(batch: int, context: int) -> LLMEngine:
    """Return an engine whose pass computes nothing."""
    device = torch.device("cpu")
    config, longest = LlamaConfig.from_json(SIZES), context + context // 8 + new_tokens(batch, context) + 64
    with torch.device("meta"):
        weights = LlamaWeights(config)
    weights.to_empty(device=device)
    for parameter in weights.parameters():
        torch.nn.init.zeros_(parameter)
    weights.requires_grad_(False).eval()
    # As to a GPU, all numbers of a step go in one packet.
    Packet.is_copied = property(lambda _: True)  # type: ignore[method-assign, assignment]
    walks: Any = DeviceWalks(no_argmax, no_walk, no_walk)
    kernels = choose_kernels("torch", device, torch.float32)
    kernels = replace(kernels, walks=Walks(walks.coupled_walk))
    settings = EngineConfig(
        dtype="float32",
        device="cpu",
        scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=BUDGET, prefill_stretch=0),
        max_model_len=longest,
        # More than they need, so that none waits for room.
        kv_cache_memory=2 * 16 * 4 * batch * (longest + 64),
        enable_prefix_caching=False,
    )
    requests = RequestMaker(settings, config, None, GenerationConfig(frozenset(), {}), longest)
    engine = EngineBuilder(settings, LlamaModel(weights, kernels), None, kernels, Ranks(), requests).build()
    runner = engine.worker.runner

    # Of a tree before 6c4d3faa `before_layer` is given too.
    def features(batch: Any, **_: Any) -> Tensor:
        return torch.zeros(len(batch.tokens), SIZES["hidden_size"])

    runner.features = features  # type: ignore[method-assign]
    graph_capture._geometries = lambda *_: [LLAMA_8B]
    limits = graph_capture.GraphLimits(  # type: ignore[attr-defined]
        batch, BUDGET, ceil_div(longest, settings.block_size), 1, 0
    )
    graph_capture.capture_passes(runner, lambda _: lambda: None, limits)
    return engine


def no_argmax(scores: Tensor, *_: Any) -> Tensor:
    """Return token 0 for each row."""
    return scores.new_zeros(len(scores), dtype=torch.int64)


def no_walk(emitted: Tensor, *_: Any) -> Walk:
    """Return token 0 after each root, as trees before `7e777127` ask for it in plain steps."""
    return Walk(emitted.new_full((len(emitted), 1), -1), *[torch.zeros_like(emitted)] * 2)


def seconds_of(batch: int, context: int) -> float:
    """Return the median seconds of a step of `batch` requests that decode after `context` tokens."""
    engine = engine_of(batch, context)
    for number in range(batch):
        engine.scheduler.add(
            Request(
                request_id=str(number),
                token_ids=[1 + number % 60] * context,
                num_prompt=context,
                params=SamplingParams(temperature=0, max_tokens=None),
                sampling=Sampling(),
                max_length=context + new_tokens(batch, context),
                end_tokens=frozenset(),
                detokenizer=Detokenizer(None, ()),
            )
        )
    while sum(request.num_output > 0 for request in engine.scheduler.running) < batch:
        engine.step()
    for _ in range(WARM_UPS):
        engine.step()
    found = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start)
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a tree of this repository, with its library built")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cell", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        print(1e3 * seconds_of(*args.cell))
        return
    from benchmarks.report import finish, in_turns

    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        for context in CONTEXTS:
            found = in_turns(__file__, ["--cell", str(batch), str(context)], args.before, args.rounds)
            medians = {name: round(median(ms for (ms,) in own), 3) for name, own in found.items()}
            rows.append({"batch": batch, "context": context, **medians})
    finish("host_step", {"rounds": args.rounds, "steps": STEPS}, rows)


if __name__ == "__main__":
    main()
