"""Types of fused operations: a decoder layer, a pass of the target, a drafter, each in one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from specdec.kernels.types.adapters import AdapterBank
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.product import Product
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.kernels.types.types import NoiseKey


class GatedWeights(NamedTuple):
    """Weights of a gated MLP, each a weight `[outputs, inputs]` and a bias or None.

    Attributes:
        gate_up: gate first, `[2 * intermediate, hidden]`.
    """

    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


class LayerWeights(NamedTuple):
    """Weights of a decoder layer, for a kernel set that runs it in one call.

    Attributes:
        heads: query heads.
        window: tokens that a row sees, itself included; 0 for all.
        slopes: of the query heads' ALiBi bias, `[heads]`; None without.
        eps: of all norms.
        input_norm: of what queries, keys and values are made from; None where the caller makes it, or none is wanted.
        query_norm: of each query head, `[head_dim]`, or None.
        qkv: weight `[(heads + 2 * kv_heads) * head_dim, inputs]` and bias or None, and so `output`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    slopes: Tensor | None
    eps: float
    input_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    post_norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    mlp: GatedWeights


class FusedLayer(Protocol):
    """A decoder layer that runs in one call, over one layer's cache."""

    def __call__(
        self,
        x: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv: Tensor,
        slots: Tensor,
        rows: RaggedRows,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Run the layer over a step's rows, and store their keys and values.

        Args:
            x: `[rows, inputs]`, what queries, keys and values are made from; None for the residual, normed if the layer
                has an input norm.
            residual: `[rows, hidden]`; the output has its shape.
            cos: rotary table rows, and `sin`, `[rows, 1, head_dim]`.
            kv: `[slots, 2 * kv_heads, head_dim]`, keys first; numbers, or codes as in `kv_entries`.
            slots: int64 `[rows]`, where the rows' keys and values go.
            scales: float32 `[2 * kv_heads]`, of codes, from the checkpoint; None: see `kv_entries.quantize`.
        """
        ...


class FeatureWeights(NamedTuple):
    """Weights that turn a target's states into the feature that a head reads.

    Attributes:
        taps: layers whose inputs are read side by side (as many as there are layers for the stream behind the last).
        product: from the taps to the feature; None where the feature is the state behind the last norm.
    """

    taps: Sequence[int]
    product: Product | None


class TargetWeights(NamedTuple):
    """Parts of a target, for a kernel set that runs its pass in one call.

    Attributes:
        embedding: `[vocab, hidden]`.
        eps: of the last norm.
        layers: as the kernel set prepared them.
        norm: before the output matrix, `[hidden]`.
        output: from states to logits.
        features: what the cache keeps of each token for a head; None for nothing.
    """

    embedding: Tensor
    eps: float
    layers: Sequence[FusedLayer]
    norm: Tensor
    output: Product
    features: FeatureWeights | None


class TargetCache(NamedTuple):
    """Memory that a target's pass reads and writes.

    Attributes:
        kv: `[layers, slots, 2 * kv_heads, head_dim]`; numbers, or codes as in `kv_entries`.
        features: `[slots, feature_size]`, or None.
        rotary: table of cosines and sines, `[positions, 2, 1, head_dim]`.
        block_size: entries of a block.
        scales: float32 `[layers, 2 * kv_heads]`, of codes, from the checkpoint; None: see `kv_entries.quantize`.
    """

    kv: Tensor
    features: Tensor | None
    rotary: Tensor
    block_size: int
    scales: Tensor | None = None


class FusedTarget(Protocol):
    """A target's pass in one call: packing, layers, features, logits."""

    def __call__(self, rows: Sequence[TreeRow], trees: Sequence[DraftTree]) -> Tensor:
        """Run the pass over chains, each with its tree behind it; store keys, values and features in the cache.

        Returns:
            Logits `[sum of (num_scored + nodes), vocab_size]`.
        """
        ...


class HeadWeights(NamedTuple):
    """Parts of a draft head, for a kernel set that drafts in one call.

    A head without `input` and norms reads tokens alone; one with `input` multiplies embedding and feature side by side;
    one with norms gives both, normed, to its first layer, beside the feature as residual.

    Attributes:
        embedding: `[vocab, hidden]`.
        eps: of all norms.
        layers: as the kernel set prepared them.
        residual_is_normed: whether the residual is the normed feature.
        norm: before the output matrix; None if that reads the states as they are.
        states_are_normed: whether the head feeds back its states after `norm`.
    """

    embedding: Tensor
    eps: float
    layers: Sequence[FusedLayer]
    input: Product | None = None
    embed_norm: Tensor | None = None
    state_norm: Tensor | None = None
    residual_is_normed: bool = False
    norm: Tensor | None = None
    states_are_normed: bool = False


class BlockWeights(NamedTuple):
    """Parts of a block head, for a kernel set that drafts in one call.

    Attributes:
        embedding: `[vocab, hidden]`.
        eps: of all norms.
        layers: as the kernel set prepared them.
        causal: per layer, whether a row of a block sees only the rows before it, besides itself.
        rows: of a block.
        slots: how many of them predict, the last ones.
        mask_token: of all rows but the first.
        hidden_norm: of features.
        context: from a normed feature to keys and values of all layers, keys of a layer first.
        key_norms: `[layers, head_dim]`, or None.
        norm: before the output matrix.
        predecessors: `[vocab, rank]`, whose product with a candidate's row of `successors` is added to its score; None
            for no such score.
        successors: `[draft_vocab, rank]`.
        joint: `[gates x rank, inputs]` and `[gates x rank]`, which make the gates of a path's vector: one gate that
            reads slot and token, or three that read path, token and slot; None where the token's row is the vector. See
            `MarkovScorer`.
    """

    embedding: Tensor
    eps: float
    layers: Sequence[FusedLayer]
    causal: Sequence[bool]
    rows: int
    slots: int
    mask_token: int
    hidden_norm: Tensor
    context: Product
    key_norms: Tensor | None
    norm: Tensor
    predecessors: Tensor | None
    successors: Tensor | None
    joint: tuple[Tensor, Tensor] | None


class DraftingRow(NamedTuple):
    """A request as the drafter in one call reads it.

    Attributes:
        block_table: the request's blocks, enough for the entries of expanded nodes behind `end`.
        tokens: the tokens of entries `start .. end - 1`, which the head reads; of at least one.
        first: first entry of the head's that these rows see.
        num_nodes: most nodes of the tree under the last token; 0 for no tree.
        depth: most levels of the tree.
        temperature: to divide scores by.
        limits: min_p, top_k and top_p of the scores after that; None to keep all tokens.
        noise: of the first level; None without noise.
        adapter: place of the request's adapter in the head's bank, 0 for none.
    """

    block_table: Sequence[int]
    tokens: Sequence[int]
    start: int
    end: int
    first: int
    num_nodes: int
    depth: int
    temperature: float
    limits: tuple[float, float, float] | None
    noise: NoiseKey | None
    adapter: int = 0


class DraftingCache(NamedTuple):
    """Memory and bounds of a drafter in one call.

    Attributes:
        kv: `[layers, slots, 2 * kv_heads, head_dim]`; numbers, or codes as in `kv_entries`.
        features: `[slots, hidden]`, of each cached token; `[slots, 0]` for a head that reads none.
        rotary: table of cosines and sines, `[positions, 2, 1, head_dim]`.
        block_size: entries of a block.
        first: the head's first entry.
        width: children of a node, and nodes expanded a level.
    """

    kv: Tensor
    features: Tensor
    rotary: Tensor
    block_size: int
    first: int
    width: int


class FusedDrafting(Protocol):
    """A drafter in one call: the head reads tokens, and the trees under the last ones are searched."""

    def takes(self, rows: Sequence[DraftingRow]) -> bool:
        """Return whether rows can be drafted so."""
        ...

    def __call__(self, rows: Sequence[DraftingRow], least_reach: float) -> HostTrees:
        """Draft a tree for each row, empty for a row that is only read.

        Args:
            least_reach: total probability of a level's expanded nodes below which a row's search ends.
        """
        ...


@dataclass(frozen=True)
class FusedPasses:
    """Passes that a kernel set runs in one call each.

    Attributes:
        layer: prepares a decoder layer.
        target: prepares a target's pass over its memory.
        drafting: prepares a drafter with a head, its output matrix, the vocabulary size, the tokens scored, and its
            memory.
        block: the same with a block head, whose edge scorer may have rows for some tokens only.
        adapters: prepares a bank of adapters for a model's layers, and for a product beside them or None.
    """

    layer: Callable[[LayerWeights], FusedLayer]
    target: Callable[[TargetWeights, TargetCache], FusedTarget]
    drafting: Callable[[HeadWeights, Product, int, Tensor | None, DraftingCache], FusedDrafting]
    block: Callable[[BlockWeights, Product, int, Tensor | None, Tensor | None, DraftingCache], FusedDrafting]
    adapters: Callable[[Sequence[FusedLayer], Product | None], AdapterBank]
