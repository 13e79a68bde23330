"""RejectionVerifier hands each row's own p, tree and chance to the rule, and keeps broken rows to themselves."""

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.kernels.types.draft_trees import Walks
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import NO_TOKEN, Acceptance, NoiseKey
from specdec.verify.chance import Chance, PhiloxChance
from specdec.verify.host_walks import Rule, host_walk
from specdec.verify.rejection import walk_rejection
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from specdec.verify.verifier import CoupledVerifier, RejectionVerifier
from tests.kernel_sets import TORCH
from tests.profiles import num_cases
from tests.strategies import draft_trees, samplings, seeds
from tests.trees import chain_of, path_to
from tests.verify.sampled_rows import SampledRow, verify

VOCAB = 7
NAN, NEVER = float("nan"), float("-inf")
VERIFIER = RejectionVerifier(TORCH)


def by(rule: Rule) -> RejectionVerifier:
    return RejectionVerifier(replace(TORCH, walks=Walks(rejection=host_walk(rule))))


def with_q(tree: DraftTree, generator: torch.Generator) -> DraftTree:
    q = torch.softmax(torch.randn(1 + len(tree), VOCAB, generator=generator, dtype=torch.float64), -1)
    return DraftTree(tree.tokens, tree.parents, q)


@st.composite
def sampled_rows(draw: st.DrawFn, sampling: Sampling) -> SampledRow:
    """A tree with q, behind some output."""
    tree, seed = draw(draft_trees(8, VOCAB)), draw(seeds)
    generator = random.Random(seed)
    num_prompt = generator.randint(1, 3)
    known = [generator.randrange(VOCAB) for _ in range(num_prompt + generator.randint(0, 4))]
    return SampledRow(with_q(tree, torch.Generator().manual_seed(seed)), Context(sampling, known, num_prompt))


def random_logits(rows: list[SampledRow], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(sum(1 + len(row.tree) for row in rows), VOCAB, generator=generator)


def parts_of(rows: list[SampledRow], logits: Tensor) -> list[Tensor]:
    sizes = [1 + len(row.tree) for row in rows]
    return [logits[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def directly(row: SampledRow, logits: Tensor) -> Acceptance:
    """The rule over p of each node, worked out node by node, each as the end of its own output."""
    tree, (sampling, known, num_prompt) = row

    def target(node: int) -> Tensor:
        path = [tree.tokens[above] for above in path_to(tree, node)]
        after = NodeRows(Context(sampling, [*known, *path], num_prompt), 1, lambda: torch.empty(1, 0).long())
        return torch.softmax(processed_logits(logits[1 + node][None], [after], TORCH)[0].double(), -1)

    return walk_rejection(
        tree,
        target,
        PhiloxChance(NoiseKey(sampling.seed, sampling.sample_index, len(known) - num_prompt)),
    )


# Parameters after which every token may still come, so that every row has a law.
possible = samplings(VOCAB).map(lambda one: replace(one, allowed_token_ids=None, bad_words=(), end_tokens=()))


@pytest.mark.long
@settings(max_examples=num_cases(100))
@given(st.lists(possible, min_size=1, max_size=4), st.integers(0, 1), seeds, st.data())
def test_each_row_is_judged_by_its_own_law_and_chance(
    many: list[Sampling], sample_index: int, seed: int, data: st.DataObject
) -> None:
    rows = [data.draw(sampled_rows(replace(one, sample_index=sample_index))) for one in many]
    logits = random_logits(rows, seed)
    found = verify(VERIFIER, rows, logits)
    assert len(found) == len(rows)
    for row, part, acceptance in zip(rows, parts_of(rows, logits), found, strict=True):
        assert verify(VERIFIER, [row], part) == [acceptance]
        if row.context.sampling.is_greedy:
            coupled = CoupledVerifier(TORCH)
            assert verify(coupled, [row], part) == [acceptance]
        else:
            assert directly(row, part) == acceptance


def test_p_is_float64_before_the_softmax() -> None:
    """The likely token would have all of p in float32, and the other could never be drawn."""
    seen: list[Tensor] = []

    def spy(tree: DraftTree, target: Any, chance: Chance) -> Acceptance:
        seen.append(target(ROOT))
        return walk_rejection(tree, target, chance)

    logits = torch.tensor([[0.0, -120.0]])
    verify(by(spy), [SampledRow(DraftTree(), Context(Sampling(1.0), [0], 1))], logits)
    assert seen[0].dtype == torch.float64
    assert seen[0][1] == pytest.approx(torch.tensor(-120.0, dtype=torch.float64).exp().item(), rel=1e-12, abs=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["nan", "one-nan", "inf", "nothing"])
def test_a_root_without_a_law_yields_no_token_and_the_others_live(temperature: float, bad: str) -> None:
    generator = torch.Generator().manual_seed(3)
    trees = [with_q(chain_of([1, 2]), generator) for _ in range(3)]
    rows = [SampledRow(tree, Context(Sampling(temperature, seed=i), [0], 1)) for i, tree in enumerate(trees)]
    logits = random_logits(rows, 0)
    alone = verify(VERIFIER, [rows[0], rows[2]], logits[[0, 1, 2, 6, 7, 8]])
    if bad == "one-nan":
        logits[3, 4] = NAN
    else:
        logits[3] = {"nan": NAN, "inf": float("inf"), "nothing": NEVER}[bad]
    found = verify(VERIFIER, rows, logits)
    assert found[1] == Acceptance((), NO_TOKEN)
    assert [found[0], found[2]] == alone
    assert NO_TOKEN not in [acceptance.next_token for acceptance in alone]


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_without_a_law_ends_its_request_there_and_the_others_live(node: int) -> None:
    """If p equals q, every draft is accepted up to the node after which no token is possible."""
    rows = []
    logits = torch.zeros(9, VOCAB)
    for i in range(3):
        tree = DraftTree((1, 2), (ROOT, 0), torch.full((3, VOCAB), 1 / VOCAB, dtype=torch.float64))
        rows.append(SampledRow(tree, Context(Sampling(1.0, seed=i), [0], 1)))
    logits[3 + 1 + node, 5] = NAN
    found = verify(VERIFIER, rows, logits)
    assert found[1] == Acceptance((0, 1)[: node + 1], NO_TOKEN)
    assert [found[0].path, found[2].path] == [(0, 1), (0, 1)]


@pytest.mark.long
def test_a_dead_end_does_not_bias_what_comes_before() -> None:
    """After token 0 nothing can come; the first token is still 0 or 1 with equal chance."""
    q = torch.full((3, 2), 0.5, dtype=torch.float64)
    logits = torch.tensor([[0.0, 0.0], [NEVER, NEVER], [0.0, 0.0]])
    zeros, draws = 0, 4000
    for seed in range(draws):
        drafted = int(torch.rand((), generator=torch.Generator().manual_seed(seed)) < 0.5)
        tree = DraftTree((drafted, 1), (ROOT, 0), q)
        row_logits = logits if drafted == 0 else torch.zeros(3, 2)
        row = SampledRow(tree, Context(Sampling(1.0, seed=seed), [0], 1))
        (found,) = verify(VERIFIER, [row], row_logits)
        zeros += (tree.tokens[found.path[0]] if found.path else found.next_token) == 0
    # 4.4 standard deviations.
    assert abs(zeros / draws - 0.5) < 4.4 * 0.5 / draws**0.5


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=1),
        Sampling(1.0, frequency_penalty=2.0),
        Sampling(1.0, presence_penalty=2.0),
        Sampling(1.0, bad_words=((1, 1),)),
        Sampling(1.0, min_tokens=3, end_tokens=(1,)),
    ],
)
def test_parameters_see_the_nodes_path(sampling: Sampling) -> None:
    """Token 1 is drafted twice, certain but for the parameter, which says no to it sooner or later."""
    # After output (1,) the next two positions each see one 1 more, or come nearer to min_tokens.
    tree = DraftTree((1, 1), (ROOT, 0), torch.eye(VOCAB, dtype=torch.float64)[[1, 1, 1]])
    laws: list[Tensor] = []

    def spy(tree: DraftTree, target: Any, chance: Chance) -> Acceptance:
        laws.extend(target(node) for node in range(ROOT, len(tree.tokens)))
        return walk_rejection(tree, target, chance)

    logits = torch.zeros(3, VOCAB)
    logits[:, 1] = 1.0
    verify(by(spy), [SampledRow(tree, Context(sampling, [0, 1], 1))], logits)
    for depth, law in enumerate(laws):
        scores = torch.zeros(VOCAB, dtype=torch.float64)
        scores[1] = 1.0
        if sampling.top_k:
            scores[[0, *range(2, VOCAB)]] = NEVER
        scores[1] -= sampling.frequency_penalty * (1 + depth) + sampling.presence_penalty
        if sampling.bad_words or 1 + depth < sampling.min_tokens:
            scores[1] = NEVER
        assert torch.allclose(law, torch.softmax(scores, -1))
