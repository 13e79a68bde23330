"""What an engine is built with."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.kernels.kernel_set import KernelChoice
from specdec.kernels.linear import is_bfloat16_fast
from specdec.scheduling.scheduler_config import SchedulerConfig

DEMO = Path(__file__).parent / "demo"
# The better of the demo target's two.
DEMO_HEAD = DEMO / "eagle3"
NGRAM = "ngram"
CPU = torch.device("cpu")
# Tokens; a table of rotary embeddings has a row for each.
LONGEST_CONTEXT = 2**22
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
        draft: checkpoint folder of a head or a small model, "ngram" for what the text itself holds, None for plain
            decoding.
        dtype: of weights, activations and cache.
        device: where the model runs.
        shape: bounds of draft trees.
        scheduler: limits of requests and steps.
        max_model_len: most tokens of a request, prompt included; None for the model's own limit.
        kv_cache_memory: bytes for the cache of target and head together; None for 1 GiB on a CPU, and on a GPU for
            what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of a GPU's memory that weights, the largest step and the cache take together.
        swap_space: GiB of host memory for preempted requests.
        block_size: entries a cache block, a multiple of 8.
        enable_prefix_caching: whether requests use the cached beginnings of others.
        kernels: "torch", "triton", or "auto": Triton on a GPU.
        draft_vocab: tokens that can be drafted, as a number (its first ones) or a token map; end and special
            tokens always can. None for all.
        draft_rank: of the scores that pick the tokens whose draft logits are computed; None to compute all of them.
        enforce_eager: launch every kernel by itself, and capture no CUDA graphs.
    """

    model: Path = DEMO / "target"
    draft: Path | Literal["ngram"] | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    shape: DraftShape = EAGLE2_SHAPE
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 0.0
    block_size: int = 16
    enable_prefix_caching: bool = True
    kernels: KernelChoice = "auto"
    draft_vocab: int | Path | None = None
    draft_rank: int | None = None
    enforce_eager: bool = False

    def __post_init__(self) -> None:
        if self.kv_cache_memory is not None and self.kv_cache_memory < 1:
            raise ValueError(f"kv_cache_memory is {self.kv_cache_memory}; it must be at least 1")
        if self.block_size < 8 or self.block_size % 8:
            raise ValueError(f"block_size is {self.block_size}; it must be a multiple of 8")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1"
            )
        if self.swap_space < 0:
            raise ValueError(f"swap_space is {self.swap_space} GiB; it must be at least 0")
        if self.draft == NGRAM and (self.draft_vocab is not None or self.draft_rank is not None):
            raise ValueError(
                "draft_vocab and draft_rank are for a head's logits; draft 'ngram' has none; leave them out"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; it must be at least 2")

    def context(self, most: int) -> int:
        """Tokens of the longest request, of a model that has `most` positions.

        Raises:
            ValueError: more is asked than that.
        """
        if self.max_model_len is not None and self.max_model_len > most:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than the model's max_position_embeddings {most}"
            )
        if most < 2:
            raise ValueError(f"the model's max_position_embeddings is {most}; a prompt and an answer need at least 2")
        longest = self.max_model_len or most
        if longest > LONGEST_CONTEXT:
            name = "the model's max_position_embeddings" if self.max_model_len is None else "max_model_len"
            raise ValueError(f"{name} is {longest}; set max_model_len to {LONGEST_CONTEXT} or less")
        return longest


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        ValueError: not a device torch knows, or one this machine lacks.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is unknown; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not there: torch sees no CUDA GPU; use cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Where kernels and events go that name no device: of several GPUs to this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device computes in it, float32 elsewhere.

    Raises:
        ValueError: an unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if is_bfloat16_fast(device) else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def default_shape(device: torch.device) -> DraftShape:
    """EAGLE-2's published tree on a GPU; on a CPU, where every row and level costs, the measured best.

    `benchmarks/tree_shapes.py` measures it.
    """
    return EAGLE2_SHAPE if device.type == "cuda" else DraftShape(6, 3, 8, min_reach=0.6)
