"""Heads of every format: recognised, loaded, and equal to their definitions, in a row and along a tree."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from specdec.draft_heads.formats.head_kind import Source, filled
from specdec.draft_heads.formats.head_kinds import describe_folder
from specdec.draft_heads.heads.draft_head import DraftModel, TargetOutput
from specdec.draft_heads.heads.eagle import EagleConfig, EagleHead
from specdec.draft_heads.llama.llama_config import LlamaConfig
from specdec.draft_heads.llama.llama_layer import PagedAttention
from specdec.draft_heads.llama.rope import rotary_at
from specdec.kernels.types.block_table import pad_block_tables
from specdec.kernels.types.ragged_rows import RaggedRows
from specdec.kernels.types.tree import ROOT, DraftTree
from specdec.verify.tree_batch import slots_of
from tests.checkpoints import FEW, TARGET_HIDDEN, TARGET_LAYERS, VOCAB, Fixture
from tests.draft_heads.dense_head import DenseHead
from tests.draft_heads.loading import PARTS, load
from tests.fakes import TINY
from tests.head_formats import FORMATS
from tests.kernel_sets import TORCH
from tests.profiles import num_cases
from tests.strategies import draft_trees, seeds, shuffled_tables
from tests.trees import path_to

BLOCK = 8


class Heads:
    """A format's heads: ours, the loaded one, and the one by its definition."""

    def __init__(self, name: str, folder: Path) -> None:
        self.fixture: Fixture = FORMATS[name]()
        self.loaded = load(self.fixture.write(folder))
        self.dense = DenseHead(self.fixture.head)


@pytest.fixture(scope="module", params=FORMATS)
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Heads:
    # The folder's name tells nothing.
    return Heads(request.param, tmp_path_factory.mktemp("folder"))


class Served:
    """A head over a paged cache that is NaN where nothing was written, as the drafter runs it."""

    def __init__(self, draft: DraftModel, length: int, seed: int) -> None:
        self.draft, llama = draft, draft.head.llama
        plan = shuffled_tables([length], BLOCK, seed)
        self.table = plan.tables[0]
        shape = (llama.num_layers, plan.num_blocks * BLOCK, 2 * llama.num_kv_heads, llama.head_dim)
        self.kv = torch.full(shape, float("nan"), dtype=torch.float64)
        self.rope = llama.rope.table(llama.head_dim, llama.max_position, torch.float64)

    def run(
        self, tokens: list[int], features: Tensor, positions: list[int], first: int, ancestors: list[int]
    ) -> Tensor:
        """States of rows stored at entries `first` on; where `ancestors` are given they are a tree's."""
        end = first + len(tokens)
        known = end if not ancestors else self.known
        rows = RaggedRows(
            query_lens=[len(tokens)],
            lengths=[end],
            tree_starts=[known],
            block_tables=torch.tensor(pad_block_tables([self.table])),
            visible=torch.tensor([known] * len(tokens) if ancestors else [entry + 1 for entry in range(first, end)]),
            ancestors=torch.tensor(ancestors or [0] * len(tokens))[:, None],
            block_size=BLOCK,
            first=1,
        )
        slots = torch.tensor(slots_of(self.table, first, end, BLOCK))
        layers = zip(self.kv, self.draft.head.windows, strict=True)
        attentions = [PagedAttention(kv, slots, rows, TORCH, window) for kv, window in layers]
        if not ancestors:
            self.known = end
        return self.draft.head(
            torch.tensor(tokens), features, rotary_at(self.rope, torch.tensor(positions)), attentions
        )

    def logits(self, states: Tensor) -> Tensor:
        return self.draft.readout(self.draft.head.read(states)).full()

    def tree(self, root: Tensor, tree: DraftTree) -> Tensor:
        """States of a tree's nodes, level by level; the root's is given."""
        states = torch.empty(len(tree), root.shape[-1], dtype=torch.float64)
        for level in range(1, max(tree.depths) + 1):
            nodes = [node for node, depth in enumerate(tree.depths) if depth == level]
            above = torch.stack([root if tree.parents[n] == ROOT else states[tree.parents[n]] for n in nodes])
            tokens, bits = [tree.tokens[n] for n in nodes], [tree.ancestors[n] for n in nodes]
            positions = [self.known - 2 + level] * len(nodes)
            states[nodes] = self.run(tokens, above, positions, self.known + nodes[0], bits)
        return states


def by_level(tree: DraftTree) -> DraftTree:
    """The same tree, its nodes ordered by depth."""
    order = sorted(range(len(tree)), key=lambda node: tree.depths[node])
    place = {ROOT: ROOT, **{node: i for i, node in enumerate(order)}}
    return DraftTree(tuple(tree.tokens[n] for n in order), tuple(place[tree.parents[n]] for n in order))


@settings(max_examples=num_cases(8))
@example(tree=DraftTree((48,), (ROOT,)), seed=478)  # a norm of speculators_eagle3 gets a number half way between two
@given(tree=draft_trees(12, VOCAB, min_nodes=1), seed=seeds)
@torch.no_grad()
def test_logits_equal_the_definition_in_a_row_and_along_a_tree(heads: Heads, tree: DraftTree, seed: int) -> None:
    tree = by_level(tree)
    generator = random.Random(seed)
    tokens = [generator.randrange(VOCAB) for _ in range(generator.randint(2, 18))]
    torch.manual_seed(seed)
    final, *states = torch.randn(2 + TARGET_LAYERS, len(tokens), TARGET_HIDDEN, dtype=torch.float64)
    draft = heads.loaded.draft

    assert draft.readout.tokens is None or (draft.readout.tokens.diff() > 0).all()
    ours = draft.head.feature_of(TargetOutput(final, [states[tap] for tap in draft.head.taps]))
    features = heads.dense.features(final, states)
    assert (ours - features).abs().max() < 1e-9

    served = Served(draft, len(tokens) + len(tree), seed)
    rows = served.run(tokens[1:], ours[:-1], list(range(len(tokens) - 1)), 1, [])
    expected = heads.dense.logits(heads.dense.states(tokens[1:], features[:-1]))
    assert 0.5 < expected[expected.isfinite()].abs().max() < 200
    torch.testing.assert_close(served.logits(rows), expected, rtol=1e-9, atol=1e-9)

    paths = [tuple(tree.tokens[above] for above in path_to(tree, node)) for node in range(len(tree))]
    expected = heads.dense.tree_logits(tokens[1:], features[:-1], paths)
    torch.testing.assert_close(served.logits(served.tree(rows[-1], tree)), expected, rtol=1e-9, atol=1e-9)


KINDS = {
    "official_eagle": ("EAGLE-1/2", "official EAGLE"),
    "official_eagle_qwen2": ("EAGLE-1/2", "official EAGLE"),
    "vllm_eagle_nested": ("EAGLE-1/2", "vLLM"),
    "vllm_eagle_mapped": ("EAGLE-1/2", "vLLM"),
    "vllm_eagle": ("EAGLE-1/2", "vLLM"),
    "sglang_eagle": ("EAGLE-1/2", "SGLang"),
    "speculators_eagle": ("EAGLE-1/2", "speculators"),
    "official_eagle3": ("EAGLE-3", "official EAGLE"),
    "official_eagle3_own_size": ("EAGLE-3", "official EAGLE"),
    "official_eagle3_whole": ("EAGLE-3", "official EAGLE"),
    "specforge_eagle3": ("EAGLE-3", "SpecForge and SGLang"),
    "specforge_eagle31": ("EAGLE-3.1", "SpecForge and SGLang"),
    "sglang_eagle31_aliases": ("EAGLE-3.1", "SpecForge and SGLang"),
    "sglang_eagle3_tied": ("EAGLE-3", "SpecForge and SGLang"),
    "sglang_eagle3_deep": ("EAGLE-3", "SpecForge and SGLang"),
    "vllm_eagle3": ("EAGLE-3", "vLLM"),
    "speculators_eagle3": ("EAGLE-3.1", "speculators"),
    "speculators_eagle3_qwen3": ("EAGLE-3", "speculators"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_told_by_its_content_without_its_weights(name: str, tmp_path: Path) -> None:
    fixture = FORMATS[name]()
    found = describe_folder(fixture.write(tmp_path))
    assert (found.label, found.settings.layout) == KINDS[name]
    assert found.settings.verifier == fixture.facts.get("verifier", "org/target" if "speculators" in name else None)
    shapes = {spelling: tensor.shape for spelling, tensor in found.file_tensors.items()}
    assert shapes == {spelling: tensor.shape for spelling, tensor in fixture.tensors.items()}
    assert found.config.llama.max_position == fixture.facts.get("positions", 64)


def test_layers_are_those_that_the_format_means(heads: Heads) -> None:
    assert heads.loaded.draft.head.taps == heads.fixture.head.taps
    other = heads.loaded.other
    assert (other.head.taps if other else None) == heads.fixture.facts.get("other taps")


def test_weights_shared_with_the_target_are_not_copied(heads: Heads) -> None:
    draft, found = heads.loaded.draft, heads.loaded.description
    lent = {Source.TARGET: True, Source.FILE: False, Source.EMBEDDING: False}
    is_lent = draft.head.embed_tokens.weight.data_ptr() == PARTS.embedding.data_ptr()
    assert is_lent == lent[found.embedding]
    assert (draft.readout.projection is PARTS.output) == (lent[found.output] and found.tokens is None)


def test_weights_shared_with_the_target_take_no_memory_while_a_head_is_built() -> None:
    """A matrix that no machine could hold once more."""
    llama = replace(LlamaConfig.from_json({**TINY, "num_hidden_layers": 1}), vocab_size=1 << 40)
    with torch.device("meta"):
        parameters = EagleHead(EagleConfig(llama, fc_bias=False)).split_parameters()
    lent = {"embed_tokens.weight": torch.zeros(1, 1).expand(parameters.pop("embed_tokens.weight").shape)}
    tensors = {name: torch.zeros(parameter.shape) for name, parameter in parameters.items()}
    head = filled(lambda: EagleHead(EagleConfig(llama, fc_bias=False)), tensors, lent, PARTS)
    assert head.embed_tokens.weight.data_ptr() == lent["embed_tokens.weight"].data_ptr()


ASSUMED = {
    "official_eagle": "config.json is silent about a bias of fc: the file has one",
    "official_eagle_qwen2": "the file has no embedding: the target's",
    "vllm_eagle": "config.json does not count its layers: the file has 1",
    "sglang_eagle": "which 32 tokens are frequent, as config.json says, is not told: all are scored",
    "official_eagle3": "config.json has no rope_theta: 10000",
    "specforge_eagle31": "norm_output: it reads its own states normed, as vLLM and SGLang serve it",
    "sglang_eagle31_aliases": "the file has no output matrix: the target's",
    "sglang_eagle3_tied": "the file has no output matrix: its embedding",
    "vllm_eagle3": "later layers are plain ones behind input_layernorm, as in vLLM",
    "speculators_eagle3": "accept_tolerance 0.1 ignored: only the target's own tokens are accepted",
    "speculators_eagle3_qwen3": "config.json is silent about norm_before_residual: true",
}


@pytest.mark.parametrize("name", ASSUMED)
def test_assumed_settings_are_told(name: str, tmp_path: Path) -> None:
    said = describe_folder(FORMATS[name]().write(tmp_path)).assumptions
    assert any(sentence.startswith(ASSUMED[name]) for sentence in said), said


def test_a_head_of_all_tokens_without_an_output_matrix_takes_the_targets(tmp_path: Path) -> None:
    """Whether config.json says that it is one of all tokens, or nothing."""
    for size in (VOCAB, None):
        fixture = FORMATS["official_eagle3_whole"]()
        del fixture.tensors["lm_head.weight"]
        fixture.config["draft_vocab_size"] = size
        found = describe_folder(fixture.write(tmp_path / str(size)))
        assert found.output == Source.TARGET
        assert "the file has no output matrix: the target's" in found.assumptions


def test_a_midlayer_alone_is_one_layer_whatever_config_json_counts(tmp_path: Path) -> None:
    fixture = FORMATS["official_eagle3"]()
    expected = describe_folder(fixture.write(tmp_path / "one"))
    fixture.config["num_hidden_layers"] = 32
    found = load(fixture.write(tmp_path / "copied")).description
    assert found.config == expected.config
    assert "config.json says num_hidden_layers 32: one, as the file has midlayer alone" in found.assumptions


def test_tokens_of_a_head_are_counted_where_config_json_does_not(tmp_path: Path) -> None:
    fixture = FORMATS["specforge_eagle3"]()
    expected = describe_folder(fixture.write(tmp_path / "said"))
    del fixture.config["draft_vocab_size"]
    found = describe_folder(fixture.write(tmp_path / "silent"))
    assert found.config == expected.config
    assert torch.equal(found.tokens, expected.tokens)
    assert f"config.json has no draft_vocab_size: the {len(FEW)} tokens of d2t" in found.assumptions


def test_parts_that_config_json_does_not_mention_are_used(tmp_path: Path) -> None:
    for name, forget in {
        "speculators_eagle3": ["norm_before_fc", "fc_norm"],
        "speculators_eagle3_qwen3": ["model_type", "attention_bias"],
        "official_eagle_qwen2": ["qkv_bias"],
    }.items():
        fixture = FORMATS[name]()
        expected = describe_folder(fixture.write(tmp_path / name)).config
        for key in forget:
            fixture.config.pop(key, None)
            fixture.config.get("transformer_layer_config", {}).pop(key, None)
        assert describe_folder(fixture.write(tmp_path / name)).config == expected


@pytest.mark.parametrize(
    ("said", "windows"),
    [
        ({"layer_types": None}, (12, 12)),
        ({"layer_types": ["full_attention", "sliding_attention"]}, (0, 12)),
        ({"layer_types": ["full_attention"]}, (0, 0)),
        ({"use_sliding_window": False}, (0, 0)),
        ({"sliding_window": None}, (0, 0)),
    ],
)
def test_windows_are_those_of_the_layers_that_config_json_names(
    tmp_path: Path, said: dict[str, object], windows: tuple[int, ...]
) -> None:
    fixture = FORMATS["speculators_eagle3_qwen3"]()
    fixture.config["transformer_layer_config"] |= said
    llama = describe_folder(fixture.write(tmp_path)).config.llama
    assert llama.layer_windows == windows
    assert llama.with_window(9).layer_windows == (9, 9)
    assert llama.with_window(30).layer_windows == tuple(window or 30 for window in windows)


def test_both_safetensors_and_pickles_are_peeked_and_loaded_alike(tmp_path: Path) -> None:
    fixture = FORMATS["official_eagle3"]()
    pickled = load(fixture.write(tmp_path / "a"))
    fixture.pickled = False
    plain = load(fixture.write(tmp_path / "b"))
    for name, tensor in pickled.draft.head.module.state_dict().items():  # type: ignore[attr-defined]
        assert torch.equal(plain.draft.head.module.state_dict()[name], tensor)  # type: ignore[attr-defined]
    peeked = [describe_folder(tmp_path / folder).file_tensors for folder in "ab"]
    kinds = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} for tensors in peeked]
    assert kinds[0] == kinds[1]
