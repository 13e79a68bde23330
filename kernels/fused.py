"""Types of fused operations: decoder layers in one call, and the search of draft trees in one call."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from specdec.kernels.projection import Product
from specdec.kernels.ragged_rows import RaggedRows
from specdec.kernels.types import NoiseKey


class LayerWeights(NamedTuple):
    """Weights of a decoder layer, for a kernel set that runs it in one call.

    Attributes:
        heads: query heads.
        eps: of all norms.
        input_norm: of what queries, keys and values are made from; None where the caller makes it, or none is wanted.
        query_norm: of each query head, `[head_dim]`, or None.
        qkv: weight `[(heads + 2 * kv_heads) * head_dim, inputs]` and bias or None; so the other three.
        gate_up: gate first, `[2 * intermediate, hidden]`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    input_norm: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    post_norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    output: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


class FusedLayer(Protocol):
    """A decoder layer that runs in one call, over one layer's cache."""

    def __call__(
        self, x: Tensor | None, residual: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, slots: Tensor, rows: RaggedRows
    ) -> Tensor:
        """Run the layer over a step's rows, and store their keys and values.

        Args:
            x: `[rows, inputs]`, what queries, keys and values are made from; None for the residual, normed if the layer
                has an input norm.
            residual: `[rows, hidden]`; the output has its shape.
            cos: rotary table rows, and `sin`, `[rows, 1, head_dim]`.
            kv: `[slots, 2 * kv_heads, head_dim]`, keys first.
            slots: int64 `[rows]`, where the rows' keys and values go.
        """
        ...


class LayerStack(Protocol):
    """Decoder layers that run one after another in one call."""

    def __call__(
        self,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        kvs: Sequence[Tensor],
        slots: Tensor,
        rows: RaggedRows,
        wanted: Collection[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run the layers; for the arguments see `FusedLayer`.

        Args:
            kvs: each layer's cache.
            wanted: layers whose input is returned too, by their index.
        """
        ...


class HeadWeights(NamedTuple):
    """Parts of a draft head, for a kernel set that searches draft trees in one call.

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


class SearchInputs(NamedTuple):
    """Inputs of a search of draft trees: `rows` rows, of each of which `width` nodes are expanded a level.

    Attributes:
        states: `[rows, hidden]`, the head's state after each root.
        depth: most levels.
        slots: int64 `[depth - 1, rows * width]`, where keys and values of expanded nodes go.
        tables: int64 `[rows, blocks]`.
        base: known tokens of each row.
        first: the head's first entry.
        block_size: entries of a block.
        words: 64-bit words of ancestor bits.
        rotary: table of cosines and sines, `[positions, 2, 1, head_dim]`.
        kv: `[layers, slots, 2 * kv_heads, head_dim]`.
        temperatures: `[rows, 1]` to divide scores by; None where all are 1.
        noise: of each row's first level; None for a row without.
        least_reach: total probability of a frontier below which a row's search ends.
        depths: levels of each row, lowered where it ends; None to search all levels.
    """

    states: Tensor
    width: int
    depth: int
    slots: Tensor
    tables: Tensor
    base: Sequence[int]
    first: int
    block_size: int
    words: int
    rotary: Tensor
    kv: Tensor
    temperatures: Tensor | None
    noise: Sequence[NoiseKey | None]
    least_reach: float
    depths: list[int] | None


class FoundLevels(NamedTuple):
    """Candidates of a search, one entry a level.

    Attributes:
        tokens: int64 `[rows, candidates]`, the children of the frontier before in turn.
        values: float32, of the same shape: log-probability of each candidate's path.
        best: int64 `[rows, width]`, the candidates that were expanded, best first.
    """

    tokens: list[Tensor]
    values: list[Tensor]
    best: list[Tensor]


class SearchLoop(Protocol):
    """The search of draft trees with a head, all levels in one call."""

    def takes(self, inputs: SearchInputs) -> bool:
        """Return whether a search can be done so."""
        ...

    def __call__(self, inputs: SearchInputs) -> FoundLevels: ...
