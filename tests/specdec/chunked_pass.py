"""A prompt run through a target model chunk by chunk, as in the engine."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specdec.cache.kv_cache import KVCache
from specdec.execution.model_runner import ModelRunner
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import TreeRow
from specdec.models.llama import LlamaModel, load_llama
from tests.fakes import TINY
from tests.kernel_sets import TORCH
from tests.strategies import shuffled_tables

CPU = torch.device("cpu")
VOCAB = TINY["vocab_size"]
BLOCK = 8
# Chunks that end inside blocks, at their ends, and with a single token.
CHUNKS = (5, 3, 1, 13, 16, 1, 31)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def new_cache(model: LlamaModel, num_blocks: int, dtype: torch.dtype) -> KVCache:
    return KVCache(num_blocks, BLOCK, model.config, None, dtype, CPU, kernels=TORCH)


def chunked_logits(folder: Path, dtype: torch.dtype, tokens: Sequence[int], chunks: Sequence[int] = CHUNKS) -> Tensor:
    """Return the logits of all positions of a prompt that is fed chunk by chunk through the engine's model runner."""
    assert sum(chunks) == len(tokens)
    model = load_llama(folder, dtype, CPU, TORCH)
    plan = shuffled_tables([len(tokens)], BLOCK, seed=0)
    runner = ModelRunner(model, new_cache(model, plan.num_blocks, dtype), dtype)
    logits, start = [], 0
    for chunk in chunks:
        row = TreeRow(tokens[start : start + chunk], start, plan.tables[0], num_scored=chunk)
        logits.append(runner.forward([row], HostTrees.empty(1)))
        start += chunk
    return torch.cat(logits)


@torch.no_grad()
def assert_logits_equal(folder: Path, tolerances: dict[torch.dtype, float], chunks: Sequence[int] = CHUNKS) -> None:
    """Compare a checkpoint's logits with transformers', in each dtype within its tolerance."""
    tokens = random_tokens(sum(chunks))
    for dtype, tolerance in tolerances.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
        expected = model(torch.tensor([tokens])).logits[0]
        actual = chunked_logits(folder, dtype, tokens, chunks)
        assert 1 < expected.abs().max() < 100
        assert (actual - expected).abs().max() < tolerance
