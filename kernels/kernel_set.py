"""Which implementation of each operation a device runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from specdec.kernels import logit_filters_reference, reference, reference_rejection, reference_sampling, reference_swap
from specdec.kernels.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.reference_sampling import TopK, Walk
from specdec.kernels.settings import KernelChoice


@dataclass(frozen=True)
class KernelSet:
    """The operations of a step; what each does stands with its plain-torch twin in `reference`.

    Attributes:
        name: "torch" or "triton".
        head_dims: the only ones that attention takes; None for any.
        max_nodes: nodes of a tree, or levels times branching while drafting; None for any number.
        max_group: query heads per KV head; None for any number.
    """

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary_store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
    tree_attention: Callable[[Tensor, Tensor, RaggedRows, float], Tensor]
    move_kv: Callable[[Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor, int], None]
    copy_between: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    filter_logits: Callable[[Tensor, Tensor], Tensor]
    gumbel_argmax: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    perturbed_top_k: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor | None, int, int], TopK]
    tree_walk: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Walk]
    rejection_walk: Callable[..., Walk]
    block_walk: Callable[..., Walk]
    head_dims: tuple[int, ...] | None = None
    max_nodes: int | None = None
    max_group: int | None = None

    def check_model(self, head_dim: int, group: int) -> None:
        """Refuse what attention was not made for.

        Args:
            group: query heads per KV head.

        Raises:
            ValueError: naming the value and what is supported.
        """
        if self.head_dims is not None and head_dim not in self.head_dims:
            known = ", ".join(map(str, self.head_dims))
            raise ValueError(f"head_dim is {head_dim}; the {self.name} kernels support {known}; use kernels 'torch'")
        if self.max_group is not None and group > self.max_group:
            raise ValueError(
                f"{group} query heads share a KV head; the {self.name} kernels support up to {self.max_group}; "
                "use kernels 'torch'"
            )

    def check_tree(self, nodes: int) -> None:
        """Refuse trees that attention was not made for.

        Raises:
            ValueError: naming the number and what is supported.
        """
        if self.max_nodes is not None and nodes > self.max_nodes:
            raise ValueError(
                f"a tree of {nodes} nodes, or levels times branching while drafting: the {self.name} kernels support "
                f"up to {self.max_nodes}; lower nodes, depth or branching, or use kernels 'torch'"
            )


TORCH = KernelSet(
    "torch",
    reference.rms_norm,
    reference.add_rms_norm,
    reference.silu_and_mul,
    reference.rotary_store,
    reference.tree_attention,
    reference.move_kv,
    reference.copy_blocks,
    reference_swap.copy_between,
    logit_filters_reference.filter_logits,
    reference_sampling.gumbel_argmax,
    reference_sampling.perturbed_top_k,
    reference_sampling.tree_walk,
    reference_rejection.rejection_walk,
    reference_rejection.block_walk,
)


def choose_kernels(choice: KernelChoice, device: torch.device, dtype: torch.dtype) -> KernelSet:
    """The kernels of a device: "auto" is Triton on a GPU, but for float64, and plain torch elsewhere.

    Raises:
        ValueError: an unknown name, or Triton where it cannot run.
    """
    if choice not in get_args(KernelChoice):
        raise ValueError(f"kernels {choice!r} are unknown; use {', '.join(get_args(KernelChoice))}")
    if choice == "auto":
        choice = "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    return TORCH if choice == "torch" else _triton(device, dtype)


def _triton(device: torch.device, dtype: torch.dtype) -> KernelSet:
    # Late: an engine on a CPU, or a reader of --help, should not wait for Triton.
    from triton import knobs

    if dtype not in reference.DTYPES:
        raise ValueError(f"the triton kernels take float32, bfloat16 and float16, not {dtype}; use kernels 'torch'")
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(f"the triton kernels run on {device} in Triton's interpreter alone; set TRITON_INTERPRET=1")
    from specdec.kernels import (
        block_walk,
        gumbel_argmax,
        logit_filters,
        move,
        perturbed_top_k,
        rejection_walk,
        rms_norm,
        rotary_store,
        silu_and_mul,
        swap,
        tree_attention,
        tree_walk,
    )

    return KernelSet(
        "triton",
        rms_norm.rms_norm,
        rms_norm.add_rms_norm,
        silu_and_mul.silu_and_mul,
        rotary_store.rotary_store,
        tree_attention.tree_attention,
        move.move_kv,
        move.copy_blocks,
        swap.copy_between,
        logit_filters.filter_logits,
        gumbel_argmax.gumbel_argmax,
        perturbed_top_k.perturbed_top_k,
        tree_walk.tree_walk,
        rejection_walk.rejection_walk,
        block_walk.block_walk,
        tree_attention.HEAD_DIMS,
        tree_attention.MAX_WORDS * WORD_BITS,
        tree_attention.MAX_GROUP,
    )
