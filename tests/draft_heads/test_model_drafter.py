"""The paged, batched ModelDrafter against EAGLE-2 with dense passes and no cache."""

import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig as HFLlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.formats.head_kinds import load_head
from specdec.draft_heads.heads.draft_head import TargetParts
from specdec.draft_heads.heads.eagle import EagleForm
from specdec.draft_heads.heads.readout import MatrixReadout
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.kernels.reference.projection import Projection
from specdec.kernels.types.tree import DraftTree
from specdec.verify.sampling import Context, Sampling
from specdec.verify.tree_batch import slots_of
from tests.draft_heads.dense_search import TokenPath, dense_search, paths_of
from tests.fakes import TINY, save_random_head
from tests.kernel_sets import TORCH
from tests.profiles import num_cases
from tests.strategies import draft_shapes, seeds, shuffled_tables

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
VOCAB, HIDDEN = TINY["vocab_size"], TINY["hidden_size"]
MOST_TOKENS = 70
# Sharp enough that deep candidates are among the best.
LM_HEAD = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


# Tokens that the head with a window sees.
WINDOW = 9


def drafter_of(heads: "Heads", kv: Tensor, features: Tensor, shape: DraftShape) -> ModelDrafter:
    readout = MatrixReadout(Projection(LM_HEAD), VOCAB)
    return ModelDrafter(heads.ours, readout, kv, features, 8, torch.float64, shape, Proposal.COUPLED, TORCH)


class DenseHead:
    """The head of a folder, made of transformers' decoder layer; a whole sequence each time."""

    def __init__(self, folder: Path, window: int | None) -> None:
        self.window = window
        config = HFLlamaConfig(**TINY)
        config._attn_implementation = "sdpa"
        tensors = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embedding, self.weight, self.bias = (
            tensors.pop(name) for name in ("embed_tokens.weight", "fc.weight", "fc.bias")
        )
        self.layer = LlamaDecoderLayer(config, 0).double().eval()
        self.layer.input_layernorm = nn.Identity()
        self.layer.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()})
        self.rotary = LlamaRotaryEmbedding(config)

    def last(self, tokens: list[int], features: Tensor) -> Tensor:
        """Prediction at the last of `tokens` x_1 .. x_n, with features f_0 .. f_{n-1}."""
        rows = torch.cat([self.embedding[tokens], features], -1) @ self.weight.T + self.bias
        positions = torch.arange(len(tokens))[None]
        if self.window is not None:
            # The last row sees no others.
            rows, positions = rows[-self.window :], positions[:, -self.window :]
        out: Tensor = self.layer(rows[None], position_embeddings=self.rotary(rows[None], positions))
        return out[0, -1]


class Heads(NamedTuple):
    dense: DenseHead
    ours: EagleForm


@pytest.fixture(scope="module", params=[None, WINDOW])
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    folder = tmp_path_factory.mktemp("head")
    save_random_head(folder)
    output = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64)
    parts = TargetParts(output, Projection(output), LlamaConfig.from_json(TINY))
    ours = load_head(folder, parts, TORCH, request.param).draft.head
    assert isinstance(ours, EagleForm)
    return Heads(DenseHead(folder, request.param), ours)


def naive_tree(head: DenseHead, row: DraftRow, features: Tensor, shape: DraftShape) -> set[TokenPath]:
    """EAGLE-2 for one row by its definition: a node's input feature is the prediction at its parent."""
    known = list(row.token_ids)

    @cache
    def predict(path: TokenPath) -> Tensor:
        drafted = [predict(path[:depth])[None] for depth in range(len(path))]
        return head.last(known[1:] + list(path), torch.cat([features[: len(known) - 1], *drafted]))

    return dense_search(lambda path: LM_HEAD @ predict(path), row, shape)


class Request:
    """Stands in for the engine: tokens grow, and their true features come into the cache."""

    def __init__(self, seed: int, table: list[int], temperature: float, prompt: int) -> None:
        self.random = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.table, self.prompt = table, prompt
        self.features = torch.randn(MOST_TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
        self.sampling = Sampling(temperature=temperature, seed=seed)
        self.tokens = [self.random.randrange(VOCAB) for _ in range(prompt)]
        self.read = self.start = 0

    def store(self, cache: Tensor) -> None:
        """The step that caches all known tokens."""
        end = len(self.tokens)
        cache[slots_of(self.table, 0, end, 8)] = self.features[:end]

    def grow(self, cache: Tensor) -> None:
        """A step accepts some drafts: their features come in, and the target's own token follows."""
        self.tokens += [self.random.randrange(VOCAB) for _ in range(self.random.randint(0, 4))]
        self.store(cache)
        self.tokens.append(self.random.randrange(VOCAB))

    def row(self, shape: DraftShape, reach: int = 0) -> DraftRow:
        if reach and self.read < len(self.tokens) - reach:
            # The head need not read what no row depends on.
            self.read = self.start = len(self.tokens) - reach
        nodes = self.random.choice([0, shape.nodes, shape.nodes, max(1, shape.nodes // 2)])
        # Without nodes it reads nothing, or a part.
        return DraftRow(
            block_table=self.table,
            num_draft_cached=self.read,
            draft_prefill_end=len(self.tokens)
            if nodes
            else self.random.choice([0, self.random.randint(0, len(self.tokens))]),
            num_nodes=nodes,
            max_depth=self.random.choice([1, 2, 9, 9]),
            draft_start=self.start,
            context=Context(self.sampling, self.tokens, self.prompt),
        )


def empty_cache(head: EagleForm, blocks: int) -> tuple[Tensor, Tensor]:
    """Keys and values, and features, of nothing yet."""
    llama = head.config.llama
    kv = torch.full((1, blocks * 8, 2 * llama.num_kv_heads, llama.head_dim), float("nan"), dtype=torch.float64)
    return kv, torch.full((blocks * 8, HIDDEN), float("nan"), dtype=torch.float64)


@pytest.mark.long
@settings(max_examples=num_cases(12))
@given(
    shape=draft_shapes(max_depth=5, max_branching=5, max_nodes=80),
    seed=seeds,
    temperatures=st.tuples(*[st.sampled_from([0.0, 0.0, 0.7])] * 3),
    sizes=st.tuples(*[st.integers(1, 30)] * 3),
    restarted=st.integers(0, 5),
)
@example(DraftShape(5, 4, 68), 0, (0.0, 0.7, 0.0), (3, 30, 1), 1)
@example(DraftShape(5, 4, 68, min_reach=0.3), 1, (0.0, 0.7, 0.0), (3, 30, 1), 1)
@torch.no_grad()
def test_trees_equal_eagle2_with_dense_passes_over_many_rounds(
    heads: Heads,
    shape: DraftShape,
    seed: int,
    temperatures: tuple[float, ...],
    sizes: tuple[int, ...],
    restarted: int,
) -> None:
    plan = shuffled_tables([MOST_TOKENS + shape.slots] * 3, 8, seed)
    kv, features = empty_cache(heads.ours, plan.num_blocks)
    drafter = drafter_of(heads, kv, features, shape)
    requests = [
        Request(seed + i, table, temperature, size)
        for i, (table, temperature, size) in enumerate(zip(plan.tables, temperatures, sizes, strict=True))
    ]
    for request in requests:
        request.store(features)
        request.tokens.append(request.random.randrange(VOCAB))
    for number in range(4):
        rows = [request.row(shape, heads.ours.reach) for request in requests]
        trees = drafter.propose(rows).read()
        assert len(trees) == len(rows)
        for request, row, tree in zip(requests, rows, trees, strict=True):
            assert paths_of(tree) == naive_tree(heads.dense, row, request.features, shape)
            request.read = max(request.read, row.draft_prefill_end)
        for i, request in enumerate(requests):
            request.grow(features)
            if number == 1 and i == restarted:
                # Its cache has gone and come again without the head's part.
                kv[:, slots_of(request.table, 0, 8 * len(request.table), 8)] = float("nan")
                request.read = request.start = 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@torch.no_grad()
def test_a_row_with_less_room_than_others_keeps_to_its_own(heads: Heads, temperature: float) -> None:
    """The levels beyond its room lie in a block that no row reads, and change no tree."""
    shape, null = DraftShape(5, 4, 20), 11
    kv, features = empty_cache(heads.ours, null + 1)
    requests = [Request(1, [0, 1, 2, 3], temperature, 14), Request(2, [4, 5, null, null], temperature, 11)]
    for request in requests:
        request.store(features)
        request.tokens.append(5)
    rows = [
        request.row(shape)._replace(draft_prefill_end=len(request.tokens), num_nodes=20, max_depth=9)
        for request in requests
    ]
    # 12 tokens are known: 4 entries are left, which is one level.
    rows[1] = rows[1]._replace(max_depth=2, num_nodes=4)
    drafter = drafter_of(heads, kv, features, shape)
    for request, row, tree in zip(requests, rows, drafter.propose(rows).read(), strict=True):
        assert paths_of(tree) == naive_tree(heads.dense, row, request.features, shape)
    held = slots_of([0, 1, 2, 3, 4, 5, null], 0, 7 * 8, 8)
    others = [slot for slot in range(kv.shape[1]) if slot not in held]
    assert kv[:, others].isnan().all()


def test_rows_without_budget_or_feature_get_empty_trees(heads: Heads) -> None:
    shape = DraftShape(2, 2, 3)
    kv, features = empty_cache(heads.ours, 4)
    drafter = drafter_of(heads, kv, features, shape)
    features[16] = 0.0

    def row(tokens: list[int], num_nodes: int, max_depth: int) -> DraftRow:
        return DraftRow([2, 1], 0, len(tokens), num_nodes, max_depth, Context(Sampling(), tokens, 1))

    assert drafter.propose([row([3], 3, 2), row([3, 4], 0, 2), row([3, 4], 3, 0)]).read() == [DraftTree()] * 3
    assert len(drafter.propose([row([3, 4], 3, 2)]).read()[0]) == 3


@torch.no_grad()
def test_a_row_of_full_depth_goes_on_however_unlikely_its_nodes_are(heads: Heads) -> None:
    """So measurements time all levels."""
    shape = DraftShape(4, 2, 20, min_reach=0.999)
    kv, features = empty_cache(heads.ours, 3)
    features[:] = 0.0
    drafter = drafter_of(heads, kv, features, shape)
    row = DraftRow([0, 1, 2], 0, 3, 20, 4, Context(Sampling(), [3, 4, 5], 1))
    (early,) = drafter.propose([row]).read()
    (full,) = drafter.propose([row._replace(full_depth=True)]).read()
    assert (max(early.depths), max(full.depths)) == (1, 4)


def test_the_head_computes_in_the_dtype_asked_for_whatever_its_cache_keeps(heads: Heads) -> None:
    kv, features = empty_cache(heads.ours, 2)
    expected, found = (drafter_of(heads, one, features, DraftShape(2, 2, 3)) for one in (kv, kv.bfloat16()))
    torch.testing.assert_close(found.rope, expected.rope, rtol=0, atol=0)
