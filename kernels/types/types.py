"""The types that kernels, their references and their callers share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.types.upload import Packet

# Dtypes that the Triton kernels compute with; the references take float64 as well.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The parent of a root's children; the root itself is no node.
ROOT = -1
# What is emitted where no token can be: the row's logits are not finite, or every token is forbidden.
NO_TOKEN = -1


@dataclass(frozen=True)
class KernelLimits:
    """Sizes that a kernel set takes.

    Attributes:
        head_dims: the only ones that attention takes; None for any.
        max_nodes: nodes of a tree, or levels times branching while drafting; None for any number.
        max_group: query heads per KV head; None for any number.
        rounded_group: inputs of a row that share a scale where plain weights are rounded; None where they are not.
    """

    head_dims: tuple[int, ...] | None = None
    max_nodes: int | None = None
    max_group: int | None = None
    rounded_group: int | None = None


class Stream(IntEnum):
    """Uses of random numbers. Streams are independent of each other, so no use of one biases another."""

    TARGET = 0
    DRAFT = 1
    COIN = 2
    RESIDUAL = 3


class NoiseKey(NamedTuple):
    """Key of a vector of noise: a request's sample and an output position (0 is the first generated token)."""

    seed: int
    sample_index: int
    position: int


class NoiseColumns(NamedTuple):
    """`NoiseKey` of each row, as a device takes them.

    Attributes:
        seeds, sample_indices, positions: int64 `[rows]`, from 0 to 2**63 - 1; of no meaning where a row has no noise.
        sampled: bool `[rows]`, whether a row has noise; the others follow their scores alone.
    """

    seeds: Tensor
    sample_indices: Tensor
    positions: Tensor
    sampled: Tensor

    @staticmethod
    def of(keys: Sequence[NoiseKey | None], packet: Packet) -> "NoiseColumns":
        """Return the keys on a device, once the packet is sent; 0 where a row has no noise."""
        numbers = [[0 if key is None else key[part] for key in keys] for part in range(3)]
        seeds, indices, positions = packet.add_lists(*numbers)
        return NoiseColumns(seeds, indices, positions, packet.add([key is not None for key in keys], torch.bool))


class NoiseRows:
    """The noise that each row of scores takes, by its key; None for no noise.

    Args:
        keys: of the rows, on the host; empty where only the device knows them.
        on_device: the same on a device; None where they have not been sent.
    """

    def __init__(self, keys: Sequence[NoiseKey | None], on_device: NoiseColumns | None = None) -> None:
        self.keys, self.on_device = keys, on_device

    def columns(self, device: torch.device) -> NoiseColumns:
        """Return the keys on a device; they are sent there once."""
        if self.on_device is None:
            packet = Packet(device)
            self.on_device = NoiseColumns.of(self.keys, packet)
            packet.send()
        return self.on_device

    def send_with(self, packet: Packet) -> "NoiseRows":
        """Have the keys sent beside other numbers; return this noise."""
        if packet.is_copied and self.on_device is None:
            self.on_device = NoiseColumns.of(self.keys, packet)
        return self

    def repeated(self, times: int) -> "NoiseRows":
        """Return each row's noise `times` times in turn."""
        keys = [key for key in self.keys for _ in range(times)]
        columns = self.on_device
        if columns is not None:
            columns = NoiseColumns(*(column.repeat_interleave(times) for column in columns))
        return NoiseRows(keys, columns)

    def onwards(self, positions: int) -> "NoiseRows":
        """Return the noise of each row's output position and those after it, `positions` of each row in turn."""
        wide = self.repeated(positions)
        places = [i % positions for i in range(len(wide.keys))]
        keys = [key and key._replace(position=key.position + i) for key, i in zip(wide.keys, places, strict=True)]
        columns = wide.on_device
        if columns is not None:
            steps = torch.arange(positions, device=columns.positions.device).repeat(len(columns.positions) // positions)
            columns = columns._replace(positions=columns.positions + steps)
        return NoiseRows(keys, columns)

    def later(self, positions: int, known: Tensor | None = None) -> "NoiseRows":
        """Return the noise of `positions` output positions further on.

        Args:
            known: these positions on the device, int64 `[rows]`, where they are there already.
        """
        keys = [key and key._replace(position=key.position + positions) for key in self.keys]
        columns = self.on_device
        if columns is not None:
            columns = columns._replace(positions=columns.positions + positions if known is None else known)
        return NoiseRows(keys, columns)


# Copies entries of a cache from slots to slots, which may overlap.
EntryMoves = Callable[[Sequence[int], Sequence[int]], None]
# Writes the noise of keys: (keys, size, stream, lane, where that of each is to lie).
NoiseMaker = Callable[[Sequence[NoiseKey], int, Stream, int, Sequence[int]], None]


class Candidates(NamedTuple):
    """Scores of next tokens: logits, processed or not.

    Attributes:
        scores: `[rows, n]`.
        vocab_size: number of all tokens.
        tokens: int64 `[n]`, which tokens are scored, distinct; None for all of them in order. The others are
            impossible, so probabilities are normalised over these.
    """

    scores: Tensor
    vocab_size: int
    tokens: Tensor | None = None

    def full(self) -> Tensor:
        """Return the scores of all tokens, `[rows, vocab_size]`."""
        if self.tokens is None:
            return self.scores
        scores = self.scores.new_full((len(self.scores), self.vocab_size), float("-inf"))
        return scores.scatter_(1, self.tokens.expand(self.scores.shape), self.scores)


class TopK(NamedTuple):
    """The largest perturbed scores of each row, best first.

    Attributes:
        tokens: int64 `[rows, k]`, distinct; the lower id first where scores are equal.
        scores: float32 `[rows, k]`, noise included; -inf where no more tokens are possible.
        log_sum_exp: float32 `[rows]` over the whole row, which turns scores into log-probabilities.
    """

    tokens: Tensor
    scores: Tensor
    log_sum_exp: Tensor


class DraftProbs(NamedTuple):
    """The distributions that the children of a batch's roots and nodes were drawn from.

    Attributes:
        table: float32 `[distributions, vocab]`.
        rows: int64 `[rows + nodes]`, which distribution the children of each root and node were drawn from, row by
            row; of no meaning where there are no children.
    """

    table: Tensor
    rows: Tensor


class PackedTrees(NamedTuple):
    """The trees of a batch as the kernels of the walks take them.

    Attributes:
        tokens: int64 `[nodes]`, row by row, parents before children; siblings differ.
        parents: int64 `[nodes]`, index of each node's parent within its row, `ROOT` for a child of the root.
        starts: int64 `[rows + 1]`, where each row's root and nodes begin in tensors `[rows + nodes, …]`, and the end.
        max_nodes: at least the nodes of the largest tree.
        max_depth: nodes that a path may have; children of its last node are as if they were not there.
    """

    tokens: Tensor
    parents: Tensor
    starts: Tensor
    max_nodes: int
    max_depth: int


class Walk(NamedTuple):
    """The outcome of each row's step: the tokens of its path, then `next_tokens`.

    Attributes:
        paths: int64 `[rows, max_depth]`, accepted nodes from the root's child downwards, then -1.
        lengths: int64 `[rows]`, their number.
        next_tokens: int64 `[rows]`, the target's own token after them, or -1 where there is none.
    """

    paths: Tensor
    lengths: Tensor
    next_tokens: Tensor


class DraftedEntries(NamedTuple):
    """Cache entries of the nodes of trees that are walked.

    Attributes:
        kv: `[layers, slots, …]`, contiguous within each layer.
        features: `[slots, size]`, contiguous; None without.
        slots: int64 `[rows, most]`, of the nodes of each row's tree; at least as many as the walk is deep.
    """

    kv: Tensor
    features: Tensor | None
    slots: Tensor


class HeadNorms(NamedTuple):
    """RMS norms of each query and key before they are rotated, as in Qwen3.

    Attributes:
        query: `[head_dim]`, weight of queries.
        key: `[head_dim]`, of keys.
    """

    query: Tensor
    key: Tensor
    eps: float


class TokenTargets(NamedTuple):
    """Memory that the new tokens of some rows of a walk are written to, and positions that their number is added to.

    Attributes:
        nodes: int64 `[nodes]`, tokens of the nodes of all trees.
        rows: int64 `[rows]`, their places in the walk.
        firsts: int64 `[rows]`, the first node of each one's tree among the nodes of all.
        tokens: int64 `[rows, most]`, gets the accepted drafts, then the target's own token, then 0.
        accepted: int64 `[rows]`, gets the number of accepted drafts.
        sources: int64 `[rows, most]`, slots of the tokens before these; those of places without a token become the
            first one's. None where there are none.
        positions: int64 `[rows, width]`; the number of accepted drafts is added.
        noise: int64 `[rows]`, likewise.
    """

    nodes: Tensor
    rows: Tensor
    firsts: Tensor
    tokens: Tensor
    accepted: Tensor
    sources: Tensor | None
    positions: Tensor
    noise: Tensor


class Acceptance(NamedTuple):
    """The outcome of a sampled row's step, on the host: the tokens of `path`, then `next_token`.

    Attributes:
        path: accepted nodes from the root's child downwards.
        next_token: the target's own token after them, or `NO_TOKEN`.
    """

    path: tuple[int, ...]
    next_token: int


class NodeTensors(NamedTuple):
    """The nodes of a step's trees on a device, one tree after another.

    Attributes:
        tokens, depths: int64 `[nodes]`; children of a root have depth 1.
        parents: int64 `[nodes]`, the place of each node's parent in its own tree, `ROOT` for a child of the root.
        ancestors: int64 `[nodes, words]`, bits of the nodes on the path from the root, the node itself included.
    """

    tokens: Tensor
    depths: Tensor
    parents: Tensor
    ancestors: Tensor


# A 1-d torch tensor, or a numpy array of `Fraction`: the rules are the same code for the engine and for exact tests.
Vector = Any
