"""Every form of temperature, filters, penalties and edges that drafters have, against `verify/transforms.py`.

The heads here are tables: what their scores are after a token stands in a drawn matrix. So the values of a tree's nodes
show the distribution that its drafter has made of them, in Python or in the compiled library.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.drafting.draft_levels import RowSampling
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.drafters import drafter_of, shape_for
from specdec.draft_heads.drafting.tree_drafter import TreeDrafter
from specdec.draft_heads.heads.block_head import BlockConfig, BlockHead
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.heads.edge_scorers import CANDIDATES, MarkovConfig
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.rope import RopeConfig
from specdec.kernels.kernel_set import KernelSet
from specdec.kernels.reference.noise import gumbel
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.upload import Packet
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from tests.kernel_sets import TORCH
from tests.kernels.native_forms import FORMS, kernels_of, library
from tests.profiles import num_cases
from tests.strategies import samplings, seeds
from tests.trees import path_to

pytestmark = pytest.mark.slow

HIDDEN, RANK, DEPTH, PAGE = 16, 3, 3, 16
# A small vocabulary, and one of more tokens than a slot of a block has candidates.
VOCABULARIES = (7, 80)
Path = tuple[int, ...]
# Share of a bound within which float32 may keep or drop a token.
UNSURE = 2e-5


class Tables:
    """A head by level or by block whose scores are those of drawn matrices.

    Args:
        few: whether it scores every other token only.

    Attributes:
        scored: the tokens that it scores.
        scores: `[scored, HIDDEN]`, of the tokens after token i in column i % HIDDEN; by level in half steps of a small
            vocabulary, so that many are equal.
        edges: `[vocab, vocab]`, of a block head: what a token's predecessor adds to its score.
    """

    def __init__(self, vocab: int, seed: int, is_block: bool, few: bool) -> None:
        self.vocab, self.is_block = vocab, is_block
        generator = torch.Generator().manual_seed(seed)
        self.scored = torch.arange(0, vocab, 2 if few else 1)
        scores = 3 * torch.randn(len(self.scored), HIDDEN, generator=generator)
        # The norm of a block head rounds, which would decide between equal ones.
        self.scores = scores if is_block or vocab > VOCABULARIES[0] else scores.mul(2).round().div(2)
        # Small: the mass of the other tokens than a slot's candidates is a difference, whose error large edges magnify.
        self.predecessors = torch.randn(vocab, RANK, generator=generator) / 4
        self.successors = torch.randn(len(self.scored), RANK, generator=generator)
        self.edges = torch.zeros(vocab, vocab)
        self.edges[:, self.scored] = self.predecessors @ self.successors.T
        self.mask = vocab - 1

    def logits(self, root: int, path: Path) -> Tensor:
        """Return the scores after a path, without edges, `[vocab]`."""
        last = [root, *path][-1]
        # The slots of a block know no path: their rows but the first are those of the mask token.
        row = last if not self.is_block or not path else self.mask
        found = torch.full((self.vocab,), -math.inf)
        found[self.scored] = self.scores[:, row % HIDDEN]
        return found

    def drafter(self, kernels: KernelSet, width: int, rows: int, proposal: Proposal) -> TreeDrafter[Any]:
        """Return the drafter of the head, over a cache with `entries` for each of some rows."""
        llama = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=HIDDEN,
            intermediate_size=8,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            max_position=64,
            rms_norm_eps=1e-12,
            rope=RopeConfig(original_max_position=64),
        )
        few = len(self.scored) < self.vocab
        head: EagleHead | BlockHead
        if self.is_block:
            markov = MarkovConfig(RANK)
            draft_vocab = len(self.scored) if few else None
            head = BlockHead(BlockConfig(llama, (1,), DEPTH, self.mask, True, (False,), draft_vocab, markov))
        else:
            head = EagleHead(EagleConfig(llama, fc_bias=False))
        for parameter in head.requires_grad_(False).parameters():
            parameter.zero_()
        # The layers add nothing, and the state after a token is one of the unit vectors.
        unit = torch.eye(HIDDEN)
        head.embed_tokens.weight.copy_(unit[torch.arange(self.vocab) % HIDDEN])
        if isinstance(head, BlockHead):
            assert head.markov_head is not None
            head.norm.weight.fill_(HIDDEN**-0.5)
            head.markov_head.markov_w1.weight.copy_(self.predecessors)
            head.markov_head.markov_w2.weight.copy_(self.successors)
            if few:
                head.draft_tokens.copy_(self.scored)
        else:
            head.fc.weight[:, :HIDDEN] = unit
        readout = MatrixReadout(kernels.projection(self.scores, None), self.vocab, self.scored if few else None)
        draft = DraftModel(head.form(kernels), readout)
        nodes = width + (DEPTH - 1) * width**2
        shape = shape_for(draft, DraftShape(DEPTH, width, nodes))
        size = rows * entries(width)
        kv, features = torch.zeros(1, size, 2, 8), torch.zeros(size, HIDDEN)
        return drafter_of(draft, kv, features, PAGE, torch.float32, shape, proposal, kernels)

    def log_q(self, context: Context, path: Path, noisy: bool) -> Tensor:
        """Return log-probabilities after a path by the definition, `[vocab]`; -inf where no token is possible.

        Args:
            noisy: whether the position's noise is added, as in a search.
        """
        sampling, root = context.sampling, context.token_ids[-1]
        seen = () if self.is_block else path
        paths = torch.tensor([seen], dtype=torch.int64).view(1, len(seen))
        given = self.logits(root, path)[None]
        assume(is_sure(given, NodeRows(context, 1, lambda: paths)))
        scores = processed_logits(given, [NodeRows(context, 1, lambda: paths)], TORCH)[0]
        if noisy and not sampling.is_greedy:
            scores = scores + gumbel(sampling.seed, sampling.sample_index, context.num_output + len(path), self.vocab)
        if self.is_block:
            candidates = scores.topk(min(CANDIDATES, len(self.scored))).indices
            edges = torch.zeros(self.vocab)
            edges[candidates] = self.edges[[root, *path][-1], candidates]
            scores = scores + edges / (1.0 if sampling.is_greedy else sampling.temperature)
            if not noisy:
                # A drawn token is one of the candidates.
                scores = torch.full_like(scores, -math.inf).scatter(0, candidates, scores[candidates])
        return torch.log_softmax(scores, 0).nan_to_num(-math.inf, neginf=-math.inf)


def is_sure(logits: Tensor, part: NodeRows) -> bool:
    """Return whether slightly narrower and slightly wider filters keep the same tokens."""
    sampling = part.context.sampling
    if sampling.top_p >= 1 and sampling.min_p <= 0:
        return True
    kept = []
    for slack in (-UNSURE, UNSURE):
        top_p = sampling.top_p * (1 + slack) if sampling.top_p < 1 else 1.0
        near = replace(sampling, top_p=top_p, min_p=min(1.0, sampling.min_p * (1 - slack)))
        kept.append(processed_logits(logits, [part._replace(context=part.context._replace(sampling=near))], TORCH))
    return torch.equal(kept[0].isfinite(), kept[1].isfinite())


def entries(width: int) -> int:
    """Cache entries of a row: for eight known tokens and the scratch of a search, in whole blocks."""
    return -(-(8 + max(DEPTH * width + 2 * width**2, 8)) // PAGE) * PAGE


def drafted(drafter: TreeDrafter[Any], contexts: Sequence[Context], width: int) -> list[DraftTree]:
    """Draft the largest tree for each row."""
    blocks = entries(width) // PAGE
    rows = [
        DraftRow(range(i * blocks, (i + 1) * blocks), 0, len(one.token_ids), drafter.shape.nodes, DEPTH, one)
        for i, one in enumerate(contexts)
    ]
    with torch.inference_mode():
        return list(drafter.propose(rows).with_probs())


def children_of(tree: DraftTree) -> dict[Path, dict[int, float]]:
    """Return by path the tokens of its children, with the logarithm of their probability after it."""
    assert len(tree) == 0 or tree.read_values is not None
    values = [] if tree.read_values is None else list(tree.read_values())
    found: dict[Path, dict[int, float]] = {(): {}}
    for node, parent in enumerate(tree.parents):
        path = tuple(tree.tokens[above] for above in path_to(tree, node))
        before = 0.0 if parent == ROOT else values[parent]
        found.setdefault(path[:-1], {})[path[-1]] = values[node] - before
    return found


# Few leave one token alone, after which nothing else shows.
temperatures = st.sampled_from([0.3, 1.7, 1.0, 0.6, 0.0])
filters = st.builds(
    Sampling,
    temperature=temperatures,
    top_k=st.sampled_from([0, 3, 5, 20, 1]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
    seed=seeds,
)
penalties = st.builds(
    Sampling,
    temperature=temperatures,
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.02]),
    repetition_penalty=st.sampled_from([1.3, 0.8, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    seed=seeds,
)


@st.composite
def contexts_of(draw: st.DrawFn, vocab: int) -> list[Context]:
    """Rows of which none has edits, or each may have some."""
    own = draw(st.sampled_from([filters, penalties, samplings(vocab)]))
    tokens = st.lists(st.integers(0, vocab - 1), min_size=2, max_size=8)
    return [
        Context(sampling, known, draw(st.integers(1, len(known))))
        for sampling, known in draw(st.lists(st.tuples(own, tokens), min_size=1, max_size=3))
    ]


@cache
def kernel_set(name: str) -> KernelSet:
    """Return plain torch, or the compiled library in a form."""
    return TORCH if name == "torch" else kernels_of(library(name, 2, torch.float32))


@pytest.mark.long
@pytest.mark.parametrize("is_block", [False, True], ids=["by level", "by block"])
@pytest.mark.parametrize("kernels", [["torch"], FORMS], ids=["torch", "native"])
@settings(max_examples=num_cases(100))
@given(st.data(), st.sampled_from(VOCABULARIES), seeds, st.booleans(), st.integers(1, 7))
def test_searched_trees_follow_the_transforms(
    kernels: list[str], is_block: bool, data: st.DataObject, vocab: int, seed: int, few: bool, width: int
) -> None:
    """Each node has the value, and each frontier node the best children, of processed logits plus noise."""
    contexts = data.draw(contexts_of(vocab))
    tables, own = Tables(vocab, seed, is_block, few), kernel_set(data.draw(st.sampled_from(kernels)))
    width = min(width, len(tables.scored))
    drafter = tables.drafter(own, width, len(contexts), Proposal.COUPLED)
    assert (drafter.one_call is None) == (own is TORCH)
    for context, tree in zip(contexts, drafted(drafter, contexts, width), strict=True):
        found = children_of(tree)
        # A tree has all children of the root, and theirs: all are expanded.
        for path in [*found, *((token,) for token in found[()])]:
            wanted = tables.log_q(context, path, noisy=True)
            children = found.get(path, {})
            tokens = list(children)
            values = torch.tensor([children[token] for token in tokens])
            torch.testing.assert_close(values, wanted[tokens], rtol=1e-4, atol=1e-4)
            others = wanted.index_fill(0, torch.tensor(tokens, dtype=torch.int64), -math.inf).max()
            assert others <= (values.min() + 1e-3 if len(tokens) == width else -math.inf)


@pytest.mark.long
@pytest.mark.parametrize("is_block", [False, True], ids=["by level", "by block"])
@settings(max_examples=num_cases(100))
@given(st.data(), st.sampled_from(VOCABULARIES), seeds, st.booleans(), st.integers(1, 7))
def test_drawn_trees_pass_on_the_transforms_distribution(
    is_block: bool, data: st.DataObject, vocab: int, seed: int, few: bool, width: int
) -> None:
    """Q of each node with children is processed logits' own, of a block head with the edges behind the filters."""
    contexts = data.draw(contexts_of(vocab))
    tables = Tables(vocab, seed, is_block, few)
    width = min(width, len(tables.scored))
    drafter = tables.drafter(TORCH, width, len(contexts), Proposal.DRAWN)
    for context, tree in zip(contexts, drafted(drafter, contexts, width), strict=True):
        assert (tree.draft_probs is None) == context.sampling.is_greedy
        for node in {} if tree.draft_probs is None else tree.children_of:
            path = () if node == ROOT else tuple(tree.tokens[above] for above in path_to(tree, node))
            wanted = tables.log_q(context, path, noisy=False).exp()
            assert tree.draft_probs is not None
            torch.testing.assert_close(tree.draft_probs[1 + node].float(), wanted, rtol=1e-4, atol=1e-5)


# Batches with rows of any kind, without filters, and without temperatures.
batches = st.sampled_from(
    [filters, st.builds(Sampling, temperature=temperatures), st.builds(Sampling, st.just(1.0), st.integers(0, 5))]
).flatmap(lambda one: st.lists(one, min_size=1, max_size=4))


@pytest.mark.long
@settings(max_examples=num_cases(100))
@given(batches, st.integers(1, 3), st.integers(1, 90), seeds)
def test_row_sampling_is_the_transforms(many: list[Sampling], times: int, vocab: int, seed: int) -> None:
    """To the bit; so it is with all parameters on the device, as captured graphs have them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(many) * times, vocab, generator=generator)
    parts = [NodeRows(Context(one, [0], 1), times, lambda: torch.zeros(times, 0).long()) for one in many]
    wanted = processed_logits(logits, parts, TORCH)
    given_rows = RowSampling.of(many, torch.float32, Packet(logits.device), for_graph=False)
    assert given_rows is not None
    assert given_rows.repeated(times).process(logits.clone(), TORCH).equal(wanted)
    whole = RowSampling.of(many, torch.float32, Packet(logits.device), for_graph=True)
    assert whole.repeated(times).process(logits.clone(), TORCH).equal(wanted)
