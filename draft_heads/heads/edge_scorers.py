"""Edge scorers of block heads: which token follows which inside a block, at the cost of a vector per path."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Tokens of a slot that a scorer may put first; the target's is among them in 99 of 100 cases.
CANDIDATES = 64
# Kinds of DSpark's Markov head, by its `markov_head_type`.
MARKOV_KINDS = ("vanilla", "gated", "rnn")


class Edges(NamedTuple):
    """Scores of the tokens after some paths, in factored form.

    Attributes:
        vectors: `[paths, rank]`; their product with a candidate's row of `successors` is added to its logit.
        states: `[paths, state_size]`, handed on to the paths that go on from these.
    """

    vectors: Tensor
    states: Tensor


class EdgeScorer(Protocol):
    """Scores of candidates after a path: the logit of candidate c of a slot is `base[c] + vector @ successors[c]`.

    Attributes:
        state_size: numbers that a path carries from slot to slot; 0 where its last token is enough.
        first_slot: slots before it have no edges.
        candidates: tokens of a slot that have edges, those with the highest logits.
    """

    state_size: int
    first_slot: int
    candidates: int

    @property
    def successors(self) -> Tensor:
        """Return one row per token of the draft vocabulary, `[draft_vocab_size, rank]`."""
        ...

    def __call__(self, tokens: Tensor, hidden: Tensor, states: Tensor) -> Edges:
        """Score what follows paths.

        Args:
            tokens: int64 `[paths]`, the target's id of each path's last token; the anchor for an empty path.
            hidden: `[paths, hidden_size]`, the normed state of the slot that comes after the path.
            states: `[paths, state_size]`, zeros for an empty path.
        """
        ...


@dataclass(frozen=True)
class MarkovConfig:
    """Shape of DSpark's Markov head.

    Attributes:
        rank: size of its vectors.
        kind: "vanilla" reads the last token alone, "gated" also the slot's state, "rnn" the whole path.
    """

    rank: int
    kind: str = "vanilla"


class MarkovScorer(nn.Module):
    """DSpark's Markov head (2607.05147): a bias of low rank from the token before, `W2 f(W1[token], state)`.

    Args:
        vocab_size: tokens of the target.
        draft_vocab_size: tokens that the head can propose.
    """

    first_slot, candidates = 0, CANDIDATES

    def __init__(self, config: MarkovConfig, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        rank, self.kind = config.rank, config.kind
        self.state_size = rank if self.kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(vocab_size, rank, _weight=torch.zeros(vocab_size, rank))
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)
        if not self.markov_w1.weight.is_meta:
            nn.init.normal_(self.markov_w1.weight, std=0.01)

    @property
    def successors(self) -> Tensor:
        return self.markov_w2.weight

    @property
    def joint(self) -> tuple[Tensor, Tensor] | None:
        """Weight and bias of what makes a path's vector of more than its last token; None for kind "vanilla"."""
        if self.kind == "vanilla":
            return None
        part = self.gate_proj if self.kind == "gated" else self.joint_proj
        return part.weight, part.bias

    def forward(self, tokens: Tensor, hidden: Tensor, states: Tensor) -> Edges:
        """See `EdgeScorer`."""
        before = F.embedding(tokens, self.markov_w1.weight)
        if self.kind == "gated":
            before = torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before
        if self.kind != "rnn":
            return Edges(before, states)
        gate, candidate, output = self.joint_proj(torch.cat([states, before, hidden], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return Edges(torch.tanh(output), gate * states + (1 - gate) * torch.tanh(candidate))


@dataclass(frozen=True)
class DominoConfig:
    """Shape of Domino's correction.

    Attributes:
        rank: size of its vectors (`emb_dim`).
        state_size: of the GRU (`gru_hidden_dim`).
        first_slot: slots before it are not corrected (`pure_draft_prefix_len`).
    """

    rank: int
    state_size: int
    first_slot: int = 1


class PathGRU(nn.Module):
    """One step of a GRU without biases (Cho et al. 2014), with torch's names and order of gates."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.zeros(3 * size, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(3 * size, size))

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        """Return the states after inputs: `[paths, inputs]` and `[paths, size]` to `[paths, size]`."""
        # Not torch.gru_cell: autocast on a GPU would round the states that paths carry.
        read, kept = F.linear(x, self.weight_ih_l0).chunk(3, -1), F.linear(states, self.weight_hh_l0).chunk(3, -1)
        reset, update = torch.sigmoid(read[0] + kept[0]), torch.sigmoid(read[1] + kept[1])
        return (1 - update) * torch.tanh(read[2] + reset * kept[2]) + update * states


class DominoScorer(nn.Module):
    """Domino's correction (2605.29707): a bias of low rank from the slot's state and a GRU over the path's tokens.

    Args:
        embed: returns the target's embedding of tokens, which the GRU reads.
    """

    candidates = CANDIDATES

    def __init__(
        self, config: DominoConfig, vocab_size: int, hidden_size: int, embed: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.state_size, self.first_slot, self._embed = config.state_size, config.first_slot, embed
        self.prefix_gru = PathGRU(hidden_size, config.state_size)
        first = nn.Linear(hidden_size + config.state_size, config.rank, bias=False)
        self.embed_proj = nn.Sequential(first, nn.SiLU(), nn.Linear(config.rank, vocab_size, bias=False))

    @property
    def successors(self) -> Tensor:
        weight = self.embed_proj[2].weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, tokens: Tensor, hidden: Tensor, states: Tensor) -> Edges:
        """See `EdgeScorer`."""
        states = self.prefix_gru(self._embed(tokens), states)
        return Edges(self.embed_proj[:2](torch.cat([hidden, states], -1)), states)


@dataclass(frozen=True)
class SelectorConfig:
    """Shape of DFlash2's candidate selector.

    Attributes:
        rank: size of its vectors.
        top_k: candidates of a slot that it scores.
    """

    rank: int
    top_k: int = 16


class SelectorScorer(nn.Module):
    """DFlash2's selector: products of the last token's row, the slot's projected state, and the candidate's row."""

    state_size = first_slot = 0

    def __init__(self, config: SelectorConfig, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.candidates = config.top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, config.rank))
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)

    @property
    def successors(self) -> Tensor:
        return self.successor_codebook

    def forward(self, tokens: Tensor, hidden: Tensor, states: Tensor) -> Edges:
        """See `EdgeScorer`."""
        return Edges(F.embedding(tokens, self.predecessor_codebook) * self.hidden_projection(hidden), states)


class ConfidenceHead(nn.Module):
    """DSpark's estimate of the probability that a slot's token is accepted if all before it are, as a logit.

    Args:
        rank: size of the previous token's row of `markov_w1`, which it reads beside the state; 0 for the state alone.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.reads_token = rank > 0
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """Return logits `[paths]` from states `[paths, hidden_size]` and rows of `markov_w1` `[paths, rank]`."""
        if self.reads_token:
            assert before is not None
            hidden = torch.cat([hidden, before], -1)
        logits: Tensor = self.proj(hidden)
        return logits.squeeze(-1)


def block_edges(scorer: EdgeScorer, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Return the vectors of whole blocks whose tokens are known, as in training, `[blocks, slots, rank]`.

    Args:
        tokens: int64 `[blocks, slots]`, the token before each slot's.
        hidden: `[blocks, slots, hidden_size]`, normed.
    """
    blocks, slots = tokens.shape
    if not scorer.state_size:
        nothing = hidden.new_zeros(blocks * slots, 0)
        vectors = scorer(tokens.flatten(), hidden.flatten(0, 1), nothing).vectors
        return vectors.view(blocks, slots, scorer.successors.shape[1])
    states, found = hidden.new_zeros(blocks, scorer.state_size), []
    for slot in range(slots):
        vectors, states = scorer(tokens[:, slot], hidden[:, slot], states)
        found.append(vectors if slot >= scorer.first_slot else torch.zeros_like(vectors))
    return torch.stack(found, 1)
