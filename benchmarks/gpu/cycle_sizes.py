"""Sizes of the engine's cycle: a model, batches, and how many steps are timed."""

from dataclasses import dataclass
from typing import Any

import torch

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TINY_LLAMA = {
    **LLAMA_8B,
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
STEPS_BEFORE = 3
# In the order in which they are measured.
HEADS = ("eagle3", "eagle")
# Ways to launch: whether CUDA graphs are replayed.
MODES = ("graphs", "eager")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the run.

    Attributes:
        model: as in a config.json.
        batches: requests at once; the last is the largest.
        context: tokens of each prompt.
        shape: depth, branching, nodes.
        accepted: drafts of a step, by force.
        taps: layers that an EAGLE-3 head reads.
        draft_vocab: tokens that it proposes.
        steps: timed of each kind and round.
        peer_tokens: steps of transformers that are timed.
    """

    model: dict[str, Any]
    dtype: torch.dtype
    batches: tuple[int, ...]
    context: int
    shape: tuple[int, int, int]
    accepted: tuple[int, ...]
    rounds: int
    steps: int
    peer_tokens: int
    taps: tuple[int, ...]
    draft_vocab: int

    @property
    def longest(self) -> int:
        """Tokens that a request may come to while it is timed twice."""
        return self.context + (STEPS_BEFORE + 2 * self.steps + 3) * (1 + self.shape[0])


FULL = Sizes(LLAMA_8B, torch.bfloat16, (1, 8, 32), 1024, (6, 10, 60), (0, 2, 4), 3, 12, 24, (2, 16, 29), 32000)
# Triton's interpreter is wrong about bfloat16.
TINY = Sizes(TINY_LLAMA, torch.float32, (2,), 9, (2, 2, 4), (0, 1), 1, 1, 3, (0, 1, 2), 40)
