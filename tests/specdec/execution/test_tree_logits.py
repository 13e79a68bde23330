"""Logits at a tree node against a plain forward pass over its path."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from specdec.cache.kv_cache import KVCache
from specdec.execution.model_runner import ModelRunner
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.models.llama import LlamaModel, load_llama
from tests.fakes import TINY, save_random_llama
from tests.kernel_sets import TORCH
from tests.roundings import rounds_either_way
from tests.strategies import draft_trees, prompts, seeds, shuffled_tables
from tests.trees import path_to

CPU = torch.device("cpu")
VOCAB = TINY["vocab_size"]


class Models(NamedTuple):
    """One checkpoint, loaded twice."""

    plain: LlamaForCausalLM
    ours: LlamaModel


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("target")
    save_random_llama(folder)
    plain = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    return Models(plain, load_llama(folder, torch.float64, CPU, TORCH))


class Sequence(NamedTuple):
    """A request: of `tokens`, the last `chain` come in the step that carries the tree."""

    tokens: list[int]
    chain: int
    tree: DraftTree


@st.composite
def sequences(draw: st.DrawFn, min_nodes: int, max_nodes: int) -> Sequence:
    tokens = draw(prompts(VOCAB, max_len=40))
    chain = draw(st.one_of(st.just(1), st.integers(1, len(tokens))))
    return Sequence(tokens, chain, draw(draft_trees(max_nodes, VOCAB, min_nodes)))


batches = st.lists(sequences(0, 64), min_size=1, max_size=3)


def plain_logits(model: LlamaForCausalLM, sequence: Sequence) -> Tensor:
    """`[1 + nodes, vocab]`: at the root and at each node, by dense passes over every root-to-leaf sequence."""
    tree, known = sequence.tree, len(sequence.tokens)
    leaves = sorted(set(range(len(tree))) - set(tree.parents)) or [-1]
    paths = [path_to(tree, leaf) for leaf in leaves]
    longest = max(len(path) for path in paths)
    # Padding on the right is invisible to the tokens before it.
    ids = [sequence.tokens + [tree.tokens[node] for node in path] + [0] * (longest - len(path)) for path in paths]
    logits = model(torch.tensor(ids)).logits
    expected = torch.full((1 + len(tree), VOCAB), float("nan"), dtype=torch.float64)
    for row, path in zip(logits, paths, strict=True):
        for depth, node in enumerate([-1, *path]):
            expected[1 + node] = row[known - 1 + depth]
    return expected


def tree_logits(model: LlamaModel, batch: list[Sequence], block_size: int, seed: int) -> Tensor:
    """Return the same for all sequences in one packed step, after a step that cached the tokens before."""
    lengths = [len(s.tokens) + len(s.tree) for s in batch]
    plan = shuffled_tables(lengths, block_size, seed)
    cache = KVCache(plan.num_blocks, block_size, model.config, None, torch.float64, CPU, kernels=TORCH)
    runner = ModelRunner(model, cache, torch.float64)
    assert runner.cache.target.isnan().all()
    before, step = [], []
    for s, table in zip(batch, plan.tables, strict=True):
        cached = len(s.tokens) - s.chain
        if cached:
            before.append(TreeRow(s.tokens[:cached], 0, table, num_scored=0))
        step.append(TreeRow(s.tokens[cached:], cached, table, num_scored=1))
    if before:
        assert runner.forward(before, HostTrees.empty(len(before))).shape == (0, VOCAB)
    return runner.forward(step, HostTrees([s.tree for s in batch]))


@torch.no_grad()
def assert_equal(models: Models, batch: list[Sequence], block_size: int, seed: int) -> None:
    actual = tree_logits(models.ours, batch, block_size, seed)
    assert len(actual) == sum(1 + len(s.tree) for s in batch)
    for sequence, found in zip(batch, actual.split([1 + len(s.tree) for s in batch]), strict=True):
        expected = plain_logits(models.plain, sequence)
        assert 1 < expected.abs().max() < 50
        differences = (found - expected).abs().amax(-1)
        for node, difference in enumerate(differences.tolist(), -1):
            # A comparison with NaN on either side is false.
            if not difference < 1e-9:
                tokens = sequence.tokens + [sequence.tree.tokens[above] for above in path_to(sequence.tree, node)]
                assert difference < 1e-5
                assert rounds_either_way(models.plain, tokens)


def test_logits_may_differ_where_transformers_rounds_by_chance(models: Models) -> None:
    """Found by night: a norm gets a number half way between two of float32."""
    tokens = [46, 60, 61, 36, 53, 29, 57, 0, 52, 84, 91, 33, 30, 81, 28, 1, 37, 38, 42]
    assert rounds_either_way(models.plain, tokens)
    assert not rounds_either_way(models.plain, tokens[:-1])
    assert_equal(models, [Sequence([49], 1, DraftTree()), Sequence(tokens, 1, DraftTree())], 4, 0)


@pytest.mark.long
@given(batch=batches, block_size=st.sampled_from([4, 16]), seed=seeds)
def test_logits_at_nodes_equal_passes_over_their_paths(
    models: Models, batch: list[Sequence], block_size: int, seed: int
) -> None:
    assert_equal(models, batch, block_size, seed)


@pytest.mark.long
@given(batch=st.lists(sequences(65, 150), min_size=1, max_size=2), seed=seeds)
def test_logits_at_nodes_of_trees_beyond_one_word_equal_passes_over_their_paths(
    models: Models, batch: list[Sequence], seed: int
) -> None:
    assert_equal(models, batch, 16, seed)


@pytest.mark.parametrize("nodes", [63, 64, 65, 127, 128, 129])
def test_logits_of_a_star_equal_passes_over_its_paths(models: Models, nodes: int) -> None:
    tree = DraftTree(tuple(range(64)) + tuple(range(nodes - 64)), (-1,) * 64 + (0,) * (nodes - 64))
    tree = tree if nodes > 63 else DraftTree(tuple(range(nodes)), (-1,) * nodes)
    assert_equal(models, [Sequence([5, 6, 7], 1, tree), Sequence([9], 1, DraftTree())], 8, nodes)
