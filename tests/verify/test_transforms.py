"""Processed logits of tree nodes against the plain definition, row by row, each with its own path."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels.types.tree import DraftTree
from specdec.verify.sampling import Context, Sampling
from specdec.verify.transforms import NodeRows, processed_logits
from tests.kernel_sets import TORCH
from tests.strategies import draft_trees, samplings, seeds
from tests.trees import path_to
from tests.verify.naive import naive_logits
from tests.verify.sampled_rows import SampledRow, nodes_of

VOCAB = 9
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=6)


@st.composite
def rows(draw: st.DrawFn) -> SampledRow:
    prompt, output = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)), draw(tokens)
    tree = draw(draft_trees(max_nodes=7, vocab_size=VOCAB))
    return SampledRow(tree, Context(draw(samplings(VOCAB)), prompt + output, len(prompt)))


@pytest.mark.long
@given(st.lists(rows(), min_size=1, max_size=4), seeds)
def test_every_node_equals_the_definition_with_its_own_path(batch: list[SampledRow], seed: int) -> None:
    count = sum(1 + len(row.tree) for row in batch)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, VOCAB, generator=generator, dtype=torch.float64)
    before = logits.clone()
    got = iter(processed_logits(logits, nodes_of(batch), TORCH))
    assert torch.equal(logits, before)
    given_logits = iter(logits.tolist())
    for tree, context in batch:
        for node in range(-1, len(tree)):
            path = [tree.tokens[above] for above in path_to(tree, node)]
            output = [*context.token_ids[context.num_prompt :], *path]
            want = torch.tensor(
                naive_logits(next(given_logits), context.sampling, context.token_ids[: context.num_prompt], output)
            ).double()
            have = next(got)
            assert torch.equal(have == -math.inf, want == -math.inf)
            torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("top_k", [0, 3, 100, 250])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.05, 3.0])
def test_long_rows_equal_the_definition(top_k: int, top_p: float, spread: float) -> None:
    """Far more tokens are kept than are sorted at first, or many are equal."""
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(3, 300, generator=generator)).round(decimals=1).double()
    sampling = Sampling(temperature=1.3, top_k=top_k, top_p=top_p)
    other = Sampling(temperature=1.0, top_p=0.999)
    nothing = torch.zeros(1, 0).long()
    parts = [NodeRows(Context(s, [0], 1), 1, lambda: nothing) for s in (sampling, other, Sampling())]
    for got, row, s in zip(
        processed_logits(logits, parts, TORCH), logits.tolist(), (sampling, other, Sampling()), strict=True
    ):
        want = torch.tensor(naive_logits(row, s, [0], []), dtype=torch.float64)
        assert torch.equal(got == -math.inf, want == -math.inf)


def alone(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    parts = [NodeRows(Context(sampling, [0], 1), len(logits), lambda: torch.zeros(len(logits), 0).long())]
    return processed_logits(logits, parts, TORCH)


def test_ties_keep_the_lowest_ids() -> None:
    kept = alone(torch.zeros(1, 5), Sampling(temperature=1.0, top_k=2))[0].softmax(-1)
    torch.testing.assert_close(kept, torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    got = alone(torch.randn(2, 11).to(dtype), Sampling(temperature=0.7, top_p=0.9))
    assert got.dtype == torch.float32


def test_a_temperature_that_rounds_to_nothing_is_greedy() -> None:
    assert Sampling(temperature=1e-6).is_greedy
    assert not Sampling(temperature=1e-4).is_greedy


def test_rows_that_ask_nothing_are_the_logits_themselves() -> None:
    logits = torch.randn(3, 7)
    assert alone(logits, Sampling()).data_ptr() == logits.data_ptr()
    assert alone(logits, Sampling(temperature=1.0)).data_ptr() == logits.data_ptr()


def test_paths_are_asked_for_only_where_a_parameter_needs_them() -> None:
    def paths() -> torch.Tensor:
        raise AssertionError("nobody reads the path")

    for sampling in (Sampling(0.7, top_k=2, min_p=0.1), Sampling(logit_bias=((1, 2.0),), allowed_token_ids=(1, 2))):
        processed_logits(torch.randn(2, 5), [NodeRows(Context(sampling, [0], 1), 2, paths)], TORCH)


def test_path_tokens_are_the_tokens_above() -> None:
    tree = DraftTree(tokens=(4, 7, 4, 9, 1), parents=(-1, -1, 0, 1, 2))
    rows = [[-1, -1, -1], [4, -1, -1], [7, -1, -1], [4, 4, -1], [7, 9, -1], [4, 4, 1]]
    assert tree.path_tokens == rows
    assert DraftTree().path_tokens == [[]]
