"""What a head is worth: tokens a step of the target yields, by the engine itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specdec.draft_heads.draft_shape import DraftShape
from specdec.llm import LLM
from specdec.outputs import SpeculationStats
from specdec.sampling_params import SamplingParams

# EAGLE-2's published tree.
SHAPE = DraftShape(6, 10, 60)


class Worth(NamedTuple):
    """Of a head on some prompts.

    Attributes:
        tau: tokens that a step of the target yields, the target's own included.
        accepted_per_depth: share of steps that accept a draft of depth 1, 2, …
        tokens: generated.
    """

    tau: float
    accepted_per_depth: list[float]
    tokens: int


def measure_tau(
    model: Path,
    head: Path,
    prompts: Sequence[list[int]],
    temperature: float = 0.0,
    max_tokens: int = 96,
    shape: DraftShape = SHAPE,
    dtype: str = "auto",
) -> Worth:
    """Answer prompts (token ids) with every tree as large as `shape` allows, seeds 0, 1, …"""
    llm = LLM(model, head, dtype=dtype, shape=shape, adaptive_drafts=False)
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(prompts))]
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    total = SpeculationStats()
    for output in outputs:
        total.add(output.stats)
    share = [count / max(1, total.steps) for count in total.accepted_per_depth]
    return Worth(total.tau, share, total.tokens)
