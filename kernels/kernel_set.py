"""Which implementation of each operation a device runs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.native.adapters import NativeAdapters
from specdec.kernels.native.drafting import NativeBlockDrafting, NativeDrafting
from specdec.kernels.native.library import NOT_BUILT, Library, library_file
from specdec.kernels.native.operations import NativeLayer, NativeMoves, NativeOperations, NativeProjection
from specdec.kernels.native.packed_matrix import Rounding
from specdec.kernels.native.packed_quantized import GROUP
from specdec.kernels.native.target import NativeTarget
from specdec.kernels.native.walks import NativeWalks
from specdec.kernels.reference import elementwise as elementwise_reference
from specdec.kernels.reference import grouped_lora as grouped_lora_reference
from specdec.kernels.reference import kv_copy as kv_copy_reference
from specdec.kernels.reference import logit_filters as logit_filters_reference
from specdec.kernels.reference import rotary_store as rotary_store_reference
from specdec.kernels.reference import tree_attention as tree_attention_reference
from specdec.kernels.reference import tree_search as tree_search_reference
from specdec.kernels.reference.noise import GumbelNoise
from specdec.kernels.reference.projection import Projection
from specdec.kernels.reference.sampling import HostSampling
from specdec.kernels.triton.walks import DeviceWalks
from specdec.kernels.types.adapters import GroupedLoRA
from specdec.kernels.types.draft_trees import Walks, at_once
from specdec.kernels.types.fused import FusedPasses
from specdec.kernels.types.product import Product
from specdec.kernels.types.quantized_tensor import QuantizedTensor
from specdec.kernels.types.ragged_rows import WORD_BITS, RaggedRows
from specdec.kernels.types.settings import KernelChoice, Quantization
from specdec.kernels.types.threads import LimitedThreads, usable_threads
from specdec.kernels.types.tree_search import SearchKernels
from specdec.kernels.types.types import (
    DTYPES,
    Candidates,
    EntryMoves,
    HeadNorms,
    KernelLimits,
    NoiseMaker,
    NoiseRows,
    Stream,
    TopK,
)

logger = logging.getLogger(__name__)
# Of the compute capability of GPUs that the Triton kernels are made for.
LEAST_MAJOR = 8


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """The operations of a step on a device.

    Each is documented at its Triton kernel, and at its reference in plain torch; those that take `NoiseRows` are
    documented here.

    Attributes:
        name: "torch", "triton" or "native".
        on_device: whether drafting and verification stay on the device without waiting for it, so that trees are kept
            there and graphs can be captured; otherwise the host works on lists, which is faster on a CPU.
        projection: prepares products with a weight `[out_features, in_features]` and a bias or None.
        rounding: the same with weights that are rounded to 4 bits, for draft heads: no output can show that. None where
            products with fewer bits are not faster.
        entry_moves: takes tensors `[layers, slots, …]`, contiguous within each layer, that stay where they are; returns
            what copies entries of all of them between slots, as `specdec.kernels.triton.kv_copy.move_kv` does.
        search: of draft trees.
        grouped_lora: adds what adapters make of a product's inputs, where products are called one by one.
        walks: acceptance rules over a batch.
        passes: what runs in one call; None where the parts of a layer, a pass and a drafter are called one by one.
        limits: the sizes that it takes.
        torch_threads: threads that torch's operations may use beside these; None for all. Torch's threads spin for
            milliseconds after an operation, and keep threads of our own from their processors.
        noise: source of sampled rows' noise; None where the operations make it themselves.
    """

    name: str
    on_device: bool
    projection: Callable[[Tensor, Tensor | None], Product]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    rotary_store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor | None, HeadNorms | None], Tensor]
    tree_attention: Callable[[Tensor, Tensor, RaggedRows, float, int, Tensor | None, Tensor | None], Tensor]
    entry_moves: Callable[[Sequence[Tensor]], EntryMoves]
    copy_blocks: Callable[[Tensor, Tensor, Tensor, int], None]
    copy_between: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    filter_logits: Callable[[Tensor, Tensor], Tensor]
    search: SearchKernels
    grouped_lora: GroupedLoRA
    rounding: "KernelSet | None" = None
    walks: Walks = field(default_factory=Walks)
    passes: FusedPasses | None = None
    limits: KernelLimits = field(default_factory=KernelLimits)
    torch_threads: int | None = None
    noise: GumbelNoise | None = None

    def limited_threads(self) -> LimitedThreads:
        """Return what holds torch to `torch_threads` meanwhile."""
        return LimitedThreads(self.torch_threads)

    def draft_output(self, matrix: Tensor | None, target: Product) -> Product:
        """Prepare the product of a draft head's states.

        Args:
            matrix: the head's own output matrix; None if it uses the target's.
            target: the target's.
        """
        if matrix is not None:
            return (self.rounding or self).projection(matrix, None)
        # A quantised one is as short already; one that was given up has no rows.
        is_plain = len(target.weight) and not isinstance(target.weight, QuantizedTensor)
        return self.rounding.projection(target.weight, None) if self.rounding and is_plain else target

    def check_model(self, head_dim: int, group: int) -> None:
        """Refuse what attention was not made for.

        Args:
            group: query heads per KV head.

        Raises:
            ValueError: naming the value and what is supported.
        """
        limits = self.limits
        if limits.head_dims is not None and head_dim not in limits.head_dims:
            known = ", ".join(map(str, limits.head_dims))
            raise ValueError(f"head_dim is {head_dim}; the {self.name} kernels support {known}; use kernels 'torch'")
        if limits.max_group is not None and group > limits.max_group:
            raise ValueError(
                f"{group} query heads share a KV head; the {self.name} kernels support up to {limits.max_group}; "
                "use kernels 'torch'"
            )

    def check_tree(self, nodes: int) -> None:
        """Refuse trees that attention was not made for.

        Raises:
            ValueError: naming the number and what is supported.
        """
        if self.limits.max_nodes is not None and nodes > self.limits.max_nodes:
            raise ValueError(
                f"a tree of {nodes} nodes, or levels times branching while drafting: the {self.name} kernels support "
                f"up to {self.limits.max_nodes}; lower nodes, depth or branching, or use kernels 'torch'"
            )


def torch_kernels(device: torch.device, make: NoiseMaker | None = None) -> KernelSet:
    """Return the operations in plain torch, on any device. Each set has its own cache of Gumbel noise.

    Args:
        make: see `GumbelNoise`.
    """
    noise = GumbelNoise(device, make=make)
    return KernelSet(
        name="torch",
        on_device=False,
        projection=Projection,
        rms_norm=elementwise_reference.rms_norm,
        add_rms_norm=elementwise_reference.add_rms_norm,
        silu_and_mul=elementwise_reference.silu_and_mul,
        rotary_store=rotary_store_reference.rotary_store,
        tree_attention=tree_attention_reference.tree_attention,
        entry_moves=kv_copy_reference.entry_moves,
        copy_blocks=kv_copy_reference.copy_blocks,
        copy_between=kv_copy_reference.copy_between,
        filter_logits=logit_filters_reference.filter_logits,
        search=SearchKernels(
            HostSampling(noise).perturbed_top_k, tree_search_reference.next_frontier, tree_search_reference.best_nodes
        ),
        grouped_lora=grouped_lora_reference.grouped_lora,
        noise=noise,
    )


def native_kernels(library: Library, quantization: Quantization = "none") -> KernelSet:
    """Return the operations of the compiled library, and those of plain torch that it does not have.

    Args:
        quantization: of all weights that are multiplied.
    """
    plain = torch_kernels(torch.device("cpu"), library.noise)
    noise = plain.noise
    assert noise is not None
    operations, walks = NativeOperations(library), NativeWalks(library, noise)

    def with_weights(rounding: Rounding) -> KernelSet:
        """Return the set that keeps weights so."""
        return replace(
            plain,
            name="native",
            projection=partial(NativeProjection, library, quantization=rounding),
            passes=FusedPasses(
                layer=partial(NativeLayer, library, quantization=rounding),
                target=partial(NativeTarget, library),
                drafting=partial(NativeDrafting, library, noise),
                block=partial(NativeBlockDrafting, library, noise),
                adapters=partial(NativeAdapters, library),
            ),
            walks=Walks(at_once(walks.coupled_walk), at_once(walks.rejection_walk)),
            limits=KernelLimits(rounded_group=GROUP if rounding == "q8" else None),
            torch_threads=1,
            rms_norm=operations.rms_norm,
            tree_attention=operations.tree_attention,
            filter_logits=operations.filter_logits,
            entry_moves=partial(NativeMoves, library),
        )

    return replace(with_weights(quantization), rounding=with_weights("q4") if library.multiplies_bytes else None)


def choose_kernels(
    choice: KernelChoice,
    device: torch.device,
    dtype: torch.dtype,
    threads: int | None = None,
    quantization: Quantization = "none",
) -> KernelSet:
    """Return the kernels of a device.

    "auto" is Triton on a GPU, the compiled library on a CPU where it was built, and plain torch elsewhere and in
    float64.

    Args:
        threads: of the library; None for `usable_threads()`.
        quantization: of the library's weights.

    Raises:
        ValueError: kernels where they cannot run, or a quantization that they do not have.
    """
    if choice == "auto":
        choice = _fastest(device, dtype)
    if quantization != "none" and choice != "native":
        raise ValueError(_not_quantized(quantization, choice, device, dtype))
    if choice == "triton":
        return _triton(device, dtype)
    if choice == "native":
        if device.type != "cpu" or dtype not in DTYPES:
            raise ValueError(f"the native kernels run float32, bfloat16 and float16 on a CPU, not {dtype} on {device}")
        return native_kernels(Library(threads or usable_threads(), dtype), quantization)
    return replace(torch_kernels(device), torch_threads=usable_threads())


def _not_quantized(quantization: Quantization, choice: KernelChoice, device: torch.device, dtype: torch.dtype) -> str:
    wanted = f"quantization {quantization!r} is for the native kernels on a CPU"
    if dtype not in DTYPES:
        return f"{wanted}, in float32, bfloat16 or float16, not {dtype}; use one of these, or quantization 'none'"
    if device.type == "cpu" and library_file() is None:
        return f"{wanted}; {NOT_BUILT}, or use quantization 'none'"
    remedy = "kernels 'native'" if device.type == "cpu" else "device 'cpu'"
    return f"{wanted}, not for the {choice} kernels; use {remedy}, or quantization 'none'"


def _fastest(device: torch.device, dtype: torch.dtype) -> KernelChoice:
    if dtype not in DTYPES or device.type not in ("cuda", "cpu"):
        return "torch"
    if device.type == "cuda":
        if torch.cuda.get_device_properties(device).major >= LEAST_MAJOR:
            return "triton"
        logger.warning("%s is older than compute capability %d.0; plain torch is slower", device, LEAST_MAJOR)
        return "torch"
    if library_file() is None:
        logger.warning("%s; plain torch is slower", NOT_BUILT)
        return "torch"
    return "native"


def _triton(device: torch.device, dtype: torch.dtype) -> KernelSet:
    # Late: an engine on a CPU, or a reader of --help, should not wait for Triton.
    from triton import knobs

    if dtype not in DTYPES:
        raise ValueError(f"the triton kernels take float32, bfloat16 and float16, not {dtype}; use kernels 'torch'")
    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(f"the triton kernels run on {device} in Triton's interpreter alone; set TRITON_INTERPRET=1")
    if device.type == "cuda" and (chip := torch.cuda.get_device_properties(device)).major < LEAST_MAJOR:
        raise ValueError(
            f"the triton kernels take a GPU of compute capability {LEAST_MAJOR}.0 or newer, and {device} has "
            f"{chip.major}.{chip.minor}; use kernels 'torch'"
        )
    from specdec.kernels.triton import (
        accepted,
        coupled_walk,
        elementwise,
        grouped_lora,
        gumbel_argmax,
        kv_copy,
        logit_filters,
        perturbed_top_k,
        quantized_linear,
        rejection_walk,
        rotary_store,
        tree_attention,
        tree_search,
    )

    def top_k(candidates: Candidates, noise: NoiseRows, k: int, stream: Stream, lane: int) -> TopK:
        scores, _, tokens = candidates
        return perturbed_top_k.perturbed_top_k(scores, noise.columns(scores.device), k, tokens, int(stream), lane)

    walks = DeviceWalks(gumbel_argmax.gumbel_argmax, coupled_walk.coupled_walk, rejection_walk.rejection_walk)
    return KernelSet(
        name="triton",
        on_device=True,
        projection=quantized_linear.projection,
        rms_norm=elementwise.rms_norm,
        add_rms_norm=elementwise.add_rms_norm,
        silu_and_mul=elementwise.silu_and_mul,
        rotary_store=rotary_store.rotary_store,
        tree_attention=tree_attention.tree_attention,
        entry_moves=partial(kv_copy_reference.entry_moves, move=kv_copy.move_kv),
        copy_blocks=kv_copy.copy_blocks,
        copy_between=kv_copy.copy_between,
        filter_logits=logit_filters.filter_logits,
        search=SearchKernels(top_k, tree_search.next_frontier, tree_search.best_nodes),
        grouped_lora=grouped_lora.grouped_lora,
        walks=Walks(walks.coupled_walk, walks.rejection_walk, accepted.commit),
        limits=KernelLimits(
            head_dims=tree_attention.HEAD_DIMS,
            max_nodes=tree_attention.MAX_WORDS * WORD_BITS,
            max_group=tree_attention.MAX_GROUP,
        ),
    )
