"""The paged, batched BlockDrafter against a search over the description of its head, with nothing kept."""

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.draft_heads.drafting.block_drafter import BlockDrafter
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.drafters import drafter_of, shape_for
from specdec.draft_heads.heads.block_head import BlockForm
from specdec.draft_heads.heads.draft_head import DraftModel, TargetOutput
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.kernels.reference.projection import Projection
from specdec.kernels.types.tree import DraftTree
from specdec.verify.sampling import Context, Sampling
from specdec.verify.tree_batch import slots_of
from tests.block_heads import Block, block, path_logits, slots, states
from tests.checkpoints import FEW, TARGET_HIDDEN, VOCAB
from tests.draft_heads.built_blocks import built
from tests.draft_heads.dense_search import TokenPath, dense_search, paths_of
from tests.kernel_sets import TORCH
from tests.profiles import num_cases
from tests.strategies import seeds, shuffled_tables
from tests.trees import path_to

MOST_TOKENS, PAGE = 40, 8
BLOCKS = {
    "dflash": lambda: block(41, anchor_first=False),
    "causal, few tokens": lambda: block(42, layers=1, causal=True, tokens=FEW, anchor_first=False),
    "vanilla": lambda: block(43, rank=6),
    "vanilla, causal": lambda: block(49, rank=6, causal=True),
    "vanilla, in a window": lambda: block(50, rank=6, windows=(9, 9)),
    "causal, in a window": lambda: block(51, causal=(True, False), windows=(6, 0), anchor_first=False),
    "gated, few tokens": lambda: block(44, layers=1, rank=6, kind="gated", tokens=FEW),
    "rnn": lambda: block(45, causal=(True, False), rank=6, kind="rnn"),
    "domino": lambda: block(46, layers=1, rank=6, kind="domino"),
    "domino, first row unused": lambda: block(47, layers=1, rank=6, kind="domino", prefix=0, anchor_first=False),
    "dflash2": lambda: block(48, rank=6, kind="dflash2", anchor_first=False),
}


class Served:
    """A head with its cache, NaN where nothing was written."""

    def __init__(self, name: str, num_blocks: int, shape: DraftShape, proposal: Proposal = Proposal.COUPLED) -> None:
        self.block: Block = BLOCKS[name]()
        self.head: BlockForm = built(self.block).requires_grad_(False).form(TORCH)
        llama = self.head.llama
        size = num_blocks * PAGE
        self.kv = torch.full((llama.num_layers, size, 2 * llama.num_kv_heads, llama.head_dim), float("nan")).double()
        self.features = torch.full((size, TARGET_HIDDEN), float("nan")).double()
        output = Projection(self.block.weights["lm_head.weight"].double())
        tokens = None if self.block.tokens is None else self.head.draft_tokens
        draft = DraftModel(self.head, MatrixReadout(output, VOCAB, tokens))
        self.shape = shape_for(draft, shape)
        rest = (PAGE, torch.float64, self.shape, proposal, TORCH)
        self.drafter = drafter_of(draft, self.kv, self.features, *rest)
        assert isinstance(self.drafter, BlockDrafter)

    def logits(self, tokens: list[int], taps: list[Tensor], path: TokenPath) -> Tensor:
        """The logits after a path, -inf where the head has no score."""
        found = slots(self.block, states(self.block, tokens, taps))
        scores = torch.full((VOCAB,), float("-inf"), dtype=torch.float64)
        scores[self.block.tokens or slice(None)] = path_logits(self.block, found, tokens[-1], path)
        return scores


class Request:
    """Stands in for the engine: tokens grow, and their true features come into the cache."""

    def __init__(self, seed: int, table: list[int], temperature: float, length: int, num_taps: int) -> None:
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.taps = list(torch.randn(num_taps, MOST_TOKENS, TARGET_HIDDEN, dtype=torch.float64, generator=generator))
        self.sampling = Sampling(temperature=temperature, seed=seed)
        self.tokens = [self.random.randrange(VOCAB) for _ in range(length + 1)]
        self.table, self.prompt, self.read, self.start = table, length, 0, 0

    def store(self, served: Served) -> None:
        """The step that caches all known tokens but the last."""
        end = len(self.tokens) - 1
        taps = [tap[:end] for tap in self.taps]
        served.features[slots_of(self.table, 0, end, PAGE)] = served.head.feature_of(TargetOutput(taps[0], taps))

    def row(self, nodes: int, max_depth: int, reach: int = 0) -> DraftRow:
        if reach:
            # The head need not read what no row depends on.
            self.start = max(self.start, len(self.tokens) - reach)
            self.read = max(self.read, self.start)
        context = Context(self.sampling, self.tokens, self.prompt)
        end = len(self.tokens) if nodes else self.random.randint(0, len(self.tokens))
        return DraftRow(self.table, self.read, end, nodes, max_depth, context, draft_start=self.start)


def wanted(served: Served, request: Request, row: DraftRow) -> set[TokenPath]:
    tokens = list(row.token_ids)
    taps = [tap[: len(tokens) - 1] for tap in request.taps]
    return dense_search(cache(lambda path: served.logits(tokens, taps, path)), row, served.shape)


@pytest.mark.long
@settings(max_examples=num_cases(10))
@given(
    name=st.sampled_from(sorted(BLOCKS)),
    shape=st.builds(DraftShape, st.integers(1, 6), st.integers(1, 5), st.integers(1, 40), st.sampled_from([0.0, 0.9])),
    seed=seeds,
    temperatures=st.tuples(*[st.sampled_from([0.0, 0.7])] * 3),
    lengths=st.tuples(*[st.integers(1, 20)] * 3),
)
@torch.no_grad()
def test_trees_are_those_of_a_search_over_the_description(
    name: str, shape: DraftShape, seed: int, temperatures: tuple[float, ...], lengths: tuple[int, ...]
) -> None:
    plan = shuffled_tables([MOST_TOKENS + max(shape.slots, 8)] * 3, PAGE, seed)
    served = Served(name, plan.num_blocks, shape)
    taps = len(served.block.layer_ids)
    requests = [
        Request(seed + i, table, temperature, length, taps)
        for i, (table, temperature, length) in enumerate(zip(plan.tables, temperatures, lengths, strict=True))
    ]
    for _ in range(3):
        for request in requests:
            request.store(served)
        rows = [
            request.row(request.random.choice([0, shape.nodes]), request.random.choice([1, 2, 9]), served.head.reach)
            for request in requests
        ]
        for request, row, tree in zip(requests, rows, served.drafter.propose(rows).read(), strict=True):
            assert paths_of(tree) == (wanted(served, request, row) if row.num_nodes else set())
            request.read = max(request.read, row.draft_prefill_end)
            request.tokens += [request.random.randrange(VOCAB) for _ in range(request.random.randint(1, 5))]


@pytest.mark.parametrize(("name", "rows"), [("vanilla, causal", 2), ("causal, few tokens", 3), ("vanilla", 5)])
@torch.no_grad()
def test_a_pass_computes_no_more_rows_than_the_levels_need(name: str, rows: int) -> None:
    """In a causal head; in others, early rows see later ones."""
    served = Served(name, 4, DraftShape(4, 2, 8))
    request = Request(1, [2, 0, 3, 1], 0.0, 7, len(served.block.layer_ids))
    request.store(served)
    served.drafter.propose([request.row(4, 2)])
    known = len(request.tokens)
    written = ~served.kv[:, slots_of(request.table, known, known + 8, PAGE)].isnan().any(dim=(2, 3)).any(0)
    assert written.tolist() == [True] * rows + [False] * (8 - rows)


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_drawn_trees_pass_on_the_distribution_of_each_parent(name: str) -> None:
    shape = DraftShape(4, 2, 8)
    served = Served(name, 8, shape, Proposal.DRAWN)
    request = Request(5, list(range(8)), 0.8, 11, len(served.block.layer_ids))
    request.store(served)
    (tree,) = served.drafter.propose([request.row(8, 9)]).with_probs()
    assert len(tree) == 8
    assert tree.draft_probs is not None
    taps = [tap[:11] for tap in request.taps]
    for node in range(-1, len(tree)):
        path = () if node < 0 else tuple(tree.tokens[above] for above in path_to(tree, node))
        if node in tree.parents:
            q = torch.softmax(served.logits(request.tokens, taps, path) / 0.8, -1)
            torch.testing.assert_close(tree.draft_probs[1 + node].double(), q, rtol=0, atol=1e-6)


@torch.no_grad()
def test_only_the_rows_own_entries_are_written() -> None:
    """The pass writes behind the known tokens, context rows in the entries of the tokens after theirs."""
    served = Served("vanilla", 8, DraftShape(4, 2, 8))
    request = Request(6, [5, 2, 7], 0.0, 9, 2)
    request.store(served)
    served.drafter.propose([request.row(8, 9)])
    written = (~served.kv[0].isnan().flatten(1).any(1)).nonzero().flatten().tolist()
    assert sorted(slots_of([5, 2, 7], 1, 10 + served.block.size, PAGE)) == written


@torch.no_grad()
def test_rows_without_budget_or_context_get_empty_trees() -> None:
    served = Served("dflash", 4, DraftShape(2, 2, 3))
    served.features[16] = 0.0

    def row(tokens: list[int], num_nodes: int, max_depth: int) -> DraftRow:
        return DraftRow([2, 1], 0, len(tokens), num_nodes, max_depth, Context(Sampling(), tokens, 1))

    found = served.drafter.propose([row([3], 3, 2), row([3, 4], 0, 2), row([3, 4], 3, 0)])
    assert found.read() == [DraftTree()] * 3
    assert len(served.drafter.propose([row([3, 4], 3, 2)]).read()[0]) == 3


@torch.no_grad()
def test_a_selector_chooses_among_its_candidates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "few", lambda: block(48, rank=6, kind="dflash2", anchor_first=False, top_k=7))
    served = Served("few", 8, DraftShape(4, 3, 30))
    request = Request(5, list(range(8)), 0.0, 11, 2)
    request.store(served)
    (tree,) = served.drafter.propose([request.row(30, 9)]).read()
    found = slots(served.block, states(served.block, request.tokens, [tap[:11] for tap in request.taps]))
    chosen = 0
    for node, token in enumerate(tree.tokens):
        path = tuple(tree.tokens[above] for above in path_to(tree, node))[:-1]
        base = served.block.weights["lm_head.weight"].double() @ found[len(path)]
        candidates = base.topk(7).indices
        assert token in candidates
        logits = path_logits(served.block, found, request.tokens[-1], path)
        rank = int((logits[candidates] > logits[token]).sum())
        assert rank < 3
        chosen += rank == 0 and token != base.argmax()
    assert chosen > 0


@pytest.mark.parametrize("edit", [{"bad_words": ((3,), (4,))}, {"logit_bias": ((7, 50.0),)}])
@torch.no_grad()
def test_edits_reach_every_slot(edit: dict[str, object]) -> None:
    served = Served("rnn", 8, DraftShape(4, 1, 4))
    request = Request(7, list(range(8)), 0.6, 9, 2)
    request.store(served)
    row = request.row(4, 9)
    sampling = Sampling(temperature=0.6, seed=7, **edit)  # type: ignore[arg-type]
    (tree,) = served.drafter.propose([row._replace(context=row.context._replace(sampling=sampling))]).read()
    assert len(tree) == 4
    if "logit_bias" in edit:
        assert tree.tokens == (7,) * 4
    else:
        assert not {3, 4} & set(tree.tokens)
