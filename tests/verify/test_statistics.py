"""Chi-square tests of the rules as the engine runs them: tensors, transforms, and chance from Philox."""

from collections.abc import Callable
from functools import cached_property

import pytest
import torch
from torch import Tensor

from specdec.kernels.reference.noise import gumbel
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.kernels.types.types import Acceptance, NoiseKey
from specdec.verify.chance import PhiloxChance
from specdec.verify.host_walks import follow
from specdec.verify.rejection import walk_rejection
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from tests.kernel_sets import TORCH
from tests.profiles import IS_NIGHTLY, by_day
from tests.trees import path_to
from tests.verify.chi_square import chi_square_tail

pytestmark = pytest.mark.slow

VOCAB = 6
# Per rule and sampling; by night 200,000 and more per rule. So many show a bias of this size.
DRAWS, BIAS = (67_000, 0.04) if IS_NIGHTLY else (12_000, 0.08)
# Output positions that one draw may use.
STRIDE = 4
SAMPLINGS = {
    "cold, min_p": Sampling(temperature=0.3, min_p=0.02, seed=1),
    "warm, top_p": Sampling(temperature=1.0, top_p=0.9, seed=2),
    "hot, top_k": Sampling(temperature=1.7, top_k=4, seed=3),
}
FIXED = DraftTree((1, 4, 0, 2, 4), (ROOT, ROOT, 0, 0, 1))


def processed(logits: Tensor, sampling: Sampling) -> Tensor:
    """float64 probabilities of rows of logits, as the verifiers take them."""
    rows = NodeRows(Context(sampling, [], 0), len(logits), lambda: torch.empty(len(logits), 0, dtype=torch.int64))
    return torch.softmax(processed_logits(logits, [rows], TORCH).double(), -1)


def row_of(path: list[int]) -> int:
    """Row of p and q after `path`."""
    row = 0
    for token in path:
        row = 1 + row * VOCAB + token
    return row


class Draft:
    """A tree with p of its root and nodes."""

    def __init__(self, tree: DraftTree, p: Tensor, q: Tensor | None = None) -> None:
        rows = [row_of([tree.tokens[above] for above in path_to(tree, node)]) for node in range(ROOT, len(tree))]
        self.p = p[rows]
        self.tree = DraftTree(tree.tokens, tree.parents, None if q is None else q[rows])

    def target(self, node: int) -> Tensor:
        return self.p[1 + node]

    def emitted(self, acceptance: Acceptance) -> list[int]:
        return [*(self.tree.tokens[node] for node in acceptance.path), acceptance.next_token]


class Trial:
    """p and q after every path of up to two tokens, and drafts from q for each draw."""

    def __init__(self, sampling: Sampling) -> None:
        self.seed = sampling.seed
        self.generator = torch.Generator().manual_seed(sampling.seed)
        logits = 1.5 * torch.randn(1 + VOCAB + VOCAB**2, VOCAB, generator=self.generator)
        drafted = logits + 0.7 * torch.randn(logits.shape, generator=self.generator)
        self.p, self.q = processed(logits, sampling), processed(drafted, sampling)
        self.fixed = Draft(FIXED, self.p)
        self.drafts: dict[tuple[int, ...], Draft] = {}

    def chance(self, draw: int, position: int = 0) -> PhiloxChance:
        return PhiloxChance(NoiseKey(self.seed, 0, STRIDE * draw + position))

    @cached_property
    def orders(self) -> tuple[list[list[int]], list[list[list[int]]]]:
        """Per draw: tokens in the order in which they are drawn at the root, and after each first token.

        The nodes of a level share their noise: at most one of them is on the accepted path.
        """
        shape = (DRAWS, 1, VOCAB)
        noise = [-torch.empty(shape).exponential_(generator=self.generator).log() for _ in range(2)]
        log_q = self.q[: 1 + VOCAB].log()
        first, second = ((rows + g).argsort(-1, True) for rows, g in zip((log_q[:1], log_q[1:]), noise, strict=True))
        return first[:, 0].tolist(), second.tolist()

    def drawn(self, draw: int, widths: tuple[int, ...]) -> Draft:
        """Draw a tree whose root has a child for each of `widths`, with that many children; fewer where q has fewer."""
        first, second = self.orders[0][draw], self.orders[1][draw]
        tops = first[: min(len(widths), self.support[0])]
        below = [second[top][: min(width, self.support[1 + top])] for top, width in zip(tops, widths, strict=False)]
        key = (*tops, *(token for under in below for token in (ROOT, *under)))
        if key not in self.drafts:
            parents = [ROOT] * len(tops) + [place for place, under in enumerate(below) for _ in under]
            tokens = (*tops, *(token for under in below for token in under))
            self.drafts[key] = Draft(DraftTree(tokens, tuple(parents)), self.p, self.q)
        return self.drafts[key]

    @cached_property
    def support(self) -> list[int]:
        """Tokens that q can draw after each path."""
        counts: list[int] = (self.q > 0).sum(-1).tolist()
        return counts


def one_hot_rejection(trial: Trial, draw: int) -> list[int]:
    fixed = trial.fixed
    return fixed.emitted(walk_rejection(fixed.tree, fixed.target, trial.chance(draw)))


def sampled_rejection(trial: Trial, draw: int) -> list[int]:
    draft = trial.drawn(draw, (2, 1))
    return draft.emitted(walk_rejection(draft.tree, draft.target, trial.chance(draw)))


def chain_rejection(trial: Trial, draw: int) -> list[int]:
    draft = trial.drawn(draw, (1,))
    return draft.emitted(walk_rejection(draft.tree, draft.target, trial.chance(draw)))


def coupled(trial: Trial, draw: int) -> list[int]:
    """The tree stops after one token, so that the second is the next step's or the same step's."""
    noise = torch.stack([gumbel(trial.seed, 0, STRIDE * draw + depth, VOCAB) for depth in range(2)])
    emitted = (trial.p[: 1 + VOCAB].log() + noise[[0, *[1] * VOCAB]]).argmax(-1).tolist()
    tree = DraftTree((1, 4, 0), (ROOT,) * 3)
    acceptance = follow(tree, [emitted[0], *(emitted[1 + token] for token in tree.tokens)])
    tokens = [*(tree.tokens[node] for node in acceptance.path), acceptance.next_token]
    return tokens if len(tokens) > 1 else [tokens[0], emitted[1 + tokens[0]]]


def second_token(trial: Trial, first: int, draw: int) -> int:
    """Return the token of a plain step after a step that emitted one token."""
    return walk_rejection(DraftTree(), lambda _: trial.p[1 + first], trial.chance(draw, 1)).next_token


RULES: list[Callable[[Trial, int], list[int]]] = [one_hot_rejection, sampled_rejection, chain_rejection, coupled]


# By day each rule with one sampling.
CASES = [(rule, list(SAMPLINGS)[(place + turn) % 3]) for turn in range(3) for place, rule in enumerate(RULES)]


@pytest.mark.long
@pytest.mark.parametrize(("rule", "sampling"), by_day(CASES, len(RULES)))
def test_first_two_tokens_follow_the_target(rule: Callable[[Trial, int], list[int]], sampling: str) -> None:
    """At the 0.1 % point for all cases together (Bonferroni)."""
    trial = Trial(SAMPLINGS[sampling])
    counts: list[list[int]] = [[0] * VOCAB for _ in range(VOCAB)]
    for draw in range(DRAWS):
        first, *more = rule(trial, draw)
        counts[first][more[0] if more else second_token(trial, first, draw)] += 1
    found = torch.tensor(counts, dtype=torch.float64)
    expected = DRAWS * trial.p[0][:, None] * trial.p[1 : 1 + VOCAB]
    possible = expected > 0
    assert found[~possible].sum() == 0
    assert chi_square_tail(found[possible], expected[possible]) > 0.001 / (len(RULES) * len(SAMPLINGS))


def test_chi_square_sees_a_small_bias() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    off = p + BIAS * torch.tensor([0.0, 0.3, -0.3], dtype=torch.float64)
    assert chi_square_tail(DRAWS * p, DRAWS * p) == 1
    assert chi_square_tail(DRAWS * off, DRAWS * p) < 0.001 / 12
    assert chi_square_tail(torch.tensor([50.0, 30.0]), torch.tensor([40.0, 40.0])) == pytest.approx(0.0253, abs=1e-4)
