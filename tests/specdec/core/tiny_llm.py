"""Engines of the tiny checkpoint, and requests for them."""

from pathlib import Path

from specdec import LLM, DraftShape, SamplingParams
from tests.specdec.tiny_checkpoints import CHARACTERS

VOCAB = 3 + len(CHARACTERS)
RULES = ["coupled", "rejection"]
SHAPE = DraftShape(3, 4, 10)
WARM = SamplingParams(seed=11, max_tokens=14, ignore_eos=True)


def load(folder: Path, head: Path | None, **settings: object) -> LLM:
    return LLM(folder, head, dtype="float64", device="cpu", **{"shape": SHAPE, "adaptive_drafts": False, **settings})  # type: ignore[arg-type]


def several(count: int, **changes: object) -> SamplingParams:
    return SamplingParams(**{"n": count, "seed": 11, "max_tokens": 14, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def at_rest(llm: LLM) -> bool:
    """Return whether no request has left anything behind."""
    scheduler = llm.engine.scheduler
    return not llm.engine.has_unfinished and scheduler.stats().kv_usage == 0


def name(token: int) -> str:
    return ["<unk>", "<s>", "</s>", *CHARACTERS][token]
