"""What an engine is built with."""

from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.draft_heads.drafter import DraftShape

DEMO = Path(__file__).parent / "demo"
CPU = torch.device("cpu")
# EAGLE-2, paper and code: depth 6, 10 expanded a level, 60 verified.
EAGLE2_SHAPE = DraftShape(6, 10, 60)
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and places; checks itself.

    Attributes:
        model: checkpoint folder of the target.
        draft: checkpoint folder of the head, None for plain decoding.
        dtype: of weights, activations and cache.
        device: where the model runs.
        shape: bounds of draft trees.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most known tokens in a step; longer prompts are split.
        max_model_len: most tokens of a request, prompt included; None for the model's own limit.
        kv_cache_memory: bytes for the cache of target and head together.
        block_size: entries a cache block.
    """

    model: Path = DEMO / "target"
    draft: Path | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    shape: DraftShape = EAGLE2_SHAPE
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    kv_cache_memory: int = 1 << 30
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}; "
                "every running request needs a token of the step"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 2")


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        ValueError: not a device torch knows, or one this machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not there: torch sees no CUDA GPU; use cpu")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, float32 elsewhere.

    Raises:
        ValueError: an unknown name.
    """
    if name == "auto":
        fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def default_shape(device: torch.device) -> DraftShape:
    """EAGLE-2's published tree on a GPU; on a CPU, where every row and level costs, the measured best.

    `benchmarks/tree_shapes.py` measures it.
    """
    return EAGLE2_SHAPE if device.type == "cuda" else DraftShape(6, 3, 8, min_reach=0.6)
