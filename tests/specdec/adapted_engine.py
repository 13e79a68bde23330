"""Engines with adapters, and what they are asked."""

from pathlib import Path
from typing import Any

import torch

from specdec import LLM, DraftShape, SamplingParams
from tests.specdec.world import World

SHAPE = DraftShape(4, 3, 12)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def engine(world: World, draft: str | Path = "none", **settings: Any) -> LLM:
    defaults = {"dtype": "float64", "shape": SHAPE, "adaptive_drafts": False, "enable_lora": True, "max_lora_rank": 17}
    folder = world.draft(draft) if isinstance(draft, str) else draft
    return LLM(world.folder / "target", folder, **{**defaults, **settings})


def prompts(count: int, length: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (length + 9 * i,), generator=generator).tolist() for i in range(count)]
