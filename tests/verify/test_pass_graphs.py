"""Steps padded into memory that stays in its place: what is replayed computes what a pass of its own does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import LLM, SamplingParams
from specdec.draft_heads.drafting.draft_shape import DraftShape
from specdec.draft_heads.drafting.drafter import DraftRow, Proposal
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.execution.graph_capture import capture_drafting, capture_passes
from specdec.kernels.triton.attention_plan import Chip, chip_of
from specdec.kernels.types.draft_trees import DraftTrees, HostTrees
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.verify.pass_graphs import TOKEN_BUCKETS, GraphLimits, PassGraphs
from specdec.verify.sampling import Context, Sampling
from tests.fakes import save_random_eagle3, save_random_head, save_random_llama, save_shallow_llama
from tests.profiles import by_day, num_cases
from tests.strategies import draft_trees
from tests.verify.tree_probs import probs_of

pytestmark = pytest.mark.slow

BLOCK, CONTEXT, SEATS = 8, 40, 3


class Recorder:
    """A capture where there is no GPU: the replay runs the same work on the same memory."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, work: Callable[[], Any]) -> Callable[[], Any]:
        work()

        def replay() -> Any:
            self.replays += 1
            return work()

        return replay


def load(folder: Path, recorder: Recorder | None, head: str = "head", **settings: Any) -> LLM:
    llm = LLM(
        folder / "target",
        folder / head,
        dtype="float32",
        kernels="triton",
        shape=DraftShape(2, 2, 4),
        adaptive_drafts=False,
        prefill_stretch=0,
        max_model_len=CONTEXT,
        max_num_seqs=SEATS,
        block_size=BLOCK,
        **settings,
    )
    if recorder is not None:
        capture_all(llm, recorder)
    return llm


def capture_all(llm: LLM, recorder: Recorder, proposal: Proposal = Proposal.DRAWN) -> None:
    """Capture graphs for steps of all sizes, and for both kinds of trees."""
    runner, drafter = llm.engine.worker.runner, llm.engine.worker.drafter
    assert isinstance(drafter, ModelDrafter)
    limits = GraphLimits(SEATS, tokens=40, blocks=8, words=1, adapters=0)
    capture_passes(runner, recorder.capture, limits)
    drafter.proposal = proposal
    capture_drafting(drafter, runner, recorder.capture, limits)
    drafter.proposal = Proposal.COUPLED


@pytest.fixture(autouse=True, scope="module")
def small_chip() -> Iterator[None]:
    """Few processors: the interpreter runs the programs of a plan one after another, unused ones as well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec.kernels.triton.attention_plan.H100", Chip(4, True))
        chip_of.cache_clear()
        yield
    chip_of.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    target = save_random_llama(folder / "target", head_dim=16)
    save_shallow_llama(folder / "small", target)
    save_random_head(folder / "head", head_dim=16)
    save_random_eagle3(folder / "head3", head_dim=16)
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[LLM, LLM, Recorder]:
    recorder = Recorder()
    return load(folder, None), load(folder, recorder), recorder


rows = st.lists(st.tuples(st.integers(0, 25), st.integers(1, 3), draft_trees(5, 97)), min_size=1, max_size=SEATS)


@pytest.mark.long
@settings(max_examples=num_cases(5))
@given(rows)
def test_logits_and_cache_are_those_of_a_pass_of_its_own(
    engines: tuple[LLM, LLM, Recorder], cases: list[tuple[int, int, DraftTree]]
) -> None:
    """Rows of any context, chain and tree, one step after another in the same graphs."""
    plain, graphed, recorder = engines
    parts = []
    for index, (cached, known, _) in enumerate(cases):
        table = list(range(index * 5, index * 5 + 5))
        parts.append(TreeRow(list(range(known)), cached, table, 1))
    generator = torch.Generator().manual_seed(sum(cached for cached, _, _ in cases))
    found = []
    before = recorder.replays
    for llm in (plain, graphed):
        cache = llm.engine.worker.cache
        generator.manual_seed(7)
        cache.target.copy_(torch.randn(cache.target.shape, generator=generator))
        assert cache.features is not None
        with torch.inference_mode():
            logits = llm.engine.worker.runner.forward(parts, HostTrees([tree for _, _, tree in cases]))
        kept = slice(0, cache.num_blocks * BLOCK)
        found.append((logits, cache.target[:, kept].clone()))
    assert recorder.replays == before + 1
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("head", "kv_cache_dtype"), by_day([("head3", "auto"), ("head", "int8"), ("head", "auto")], 1))
def test_tokens_are_those_of_an_engine_without_graphs(folder: Path, head: str, kv_cache_dtype: str) -> None:
    recorder = Recorder()
    plain, graphed = (load(folder, one, head, kv_cache_dtype=kv_cache_dtype) for one in (None, recorder))
    params = [SamplingParams(temperature=t, seed=i, max_tokens=4, ignore_eos=True) for i, t in enumerate((0, 1.0))]
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
    expected, found = ([o.token_ids for o in llm.generate(prompts, params, use_tqdm=False)] for llm in (plain, graphed))
    assert expected == found
    assert recorder.replays > 1


@pytest.mark.long
def test_a_step_beyond_the_buckets_is_run_as_it_is(engines: tuple[LLM, LLM, Recorder]) -> None:
    _, graphed, recorder = engines
    before = recorder.replays
    table = [0] * 17
    with torch.inference_mode():
        assert graphed.engine.worker.runner.forward([TreeRow([1], 3, table, 1)], HostTrees.empty(1)).shape == (1, 97)
    # More blocks than any request has.
    assert recorder.replays == before


def test_padding_is_small_and_leads_to_few_counts() -> None:
    most = TOKEN_BUCKETS[-1][0]
    counts = {tokens + PassGraphs.padding(tokens) for tokens in range(1, most + 1)}
    assert len(counts) < 20
    assert all(PassGraphs.padding(count) == 0 for count in counts)
    # Up to 64 tokens a pass takes as long as its weights are read.
    assert all(PassGraphs.padding(tokens) < tokens for tokens in range(1, 64 + 1))
    assert all(PassGraphs.padding(tokens) <= tokens // 2 + 31 for tokens in range(65, most + 1))
    assert PassGraphs.padding(most + 1) == 0


def test_graphs_share_their_inputs_and_outputs(engines: tuple[LLM, LLM, Recorder]) -> None:
    """So that a graph more costs hardly any memory, however long block tables and however large vocabularies are."""
    _, graphed, _ = engines
    runner, drafter = graphed.engine.worker.runner, graphed.engine.worker.drafter
    assert isinstance(drafter, ModelDrafter)
    assert runner.graphs is not None
    assert drafter.graphs is not None
    passes = [(graph.batch.rows.block_tables, graph.output) for graph in runner.graphs.captured.values()]
    loops = [
        [(graph.levels.tables, graph.batch.tokens, graph.levels.slots) for graph in loop.captured.values()]
        for loop in (drafter.graphs.search, drafter.graphs.draw)
    ]
    for graphs in (passes, *loops):
        assert len(graphs) > 1
        for shared in zip(*graphs, strict=True):
            assert len({tensor.untyped_storage().data_ptr() for tensor in shared}) == 1


@pytest.mark.long
@settings(max_examples=num_cases(4))
@given(
    st.sampled_from([Proposal.COUPLED, Proposal.DRAWN]),
    st.lists(
        st.tuples(
            st.integers(1, 20),
            st.sampled_from(
                [Sampling(), Sampling(0.6), Sampling(1.0), Sampling(1.0, top_p=0.6), Sampling(0.6, top_k=3)]
            ),
            st.integers(0, 4),
            st.integers(0, 2),
        ),
        min_size=1,
        max_size=SEATS,
    ),
)
def test_trees_are_those_of_a_loop_of_its_own(
    engines: tuple[LLM, LLM, Recorder], proposal: Proposal, cases: list[tuple[int, Sampling, int, int]]
) -> None:
    """Rows of any context, sampling, size and depth, with the position's noise or drawn."""
    before = engines[2].replays
    plain, graphed = (drafted(llm, cases, proposal) for llm in engines[:2])
    assert plain.read() == graphed.read()
    assert plain.is_drawn == graphed.is_drawn
    for row, tree in enumerate(plain.read()):
        if plain.is_drawn[row]:
            # Of the nodes that children were drawn from: a graph always drafts all levels, the loop only those needed.
            drawn_from = [0, *(1 + node for node in tree.children_of)]
            probs = [probs_of(trees, row)[drawn_from] for trees in (plain, graphed)]
            # A graph reads in tiles of another height, which rounds other sums.
            torch.testing.assert_close(*probs, rtol=1e-4, atol=1e-6)
    kinds = {
        proposal == Proposal.DRAWN and not sampling.is_greedy for _, sampling, nodes, depth in cases if nodes * depth
    }
    assert engines[2].replays == before + len(kinds)


def drafted(llm: LLM, cases: list[tuple[int, Sampling, int, int]], proposal: Proposal = Proposal.COUPLED) -> DraftTrees:
    """Return trees of rows with these known tokens, nodes and levels, over a cache of random numbers."""
    rows = []
    for index, (known, sampling, nodes, depth) in enumerate(cases):
        context = Context(replace(sampling, seed=index), list(range(3, 4 + known)), known)
        table = list(range(index * 5, index * 5 + 5))
        rows.append(DraftRow(table, known, known + 1, nodes, depth, context))
    cache, generator = llm.engine.worker.cache, torch.Generator().manual_seed(1)
    for part in (cache.draft, cache.features):
        if part is not None:
            part.copy_(torch.randn(part.shape, generator=generator))
    drafter = llm.engine.worker.drafter
    assert isinstance(drafter, ModelDrafter)
    drafter.proposal = proposal
    try:
        with torch.inference_mode():
            return drafter.propose(rows)
    finally:
        drafter.proposal = Proposal.COUPLED


@pytest.mark.long
def test_trees_of_a_small_model_are_those_of_a_loop_of_its_own(folder: Path) -> None:
    recorder = Recorder()
    plain, graphed = (load(folder, one, "small") for one in (None, recorder))
    before = recorder.replays
    warm = Sampling(0.7)
    for cases in ([(3, Sampling(), 4, 2), (20, warm, 4, 2), (9, Sampling(1.0), 3, 2)], [(17, warm, 4, 2)]):
        expected = drafted(plain, cases).read()
        assert expected == drafted(graphed, cases).read()
        assert all(map(len, expected))
    assert recorder.replays == before + 2


@pytest.mark.long
def test_rows_that_ask_for_more_are_drafted_without_a_graph(engines: tuple[LLM, LLM, Recorder]) -> None:
    before = engines[2].replays
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=5, repetition_penalty=1.2, ignore_eos=True)
    expected, found = (llm.generate([[5, 6, 7, 8]], params, use_tqdm=False)[0].token_ids for llm in engines[:2])
    assert expected == found
    # The steps.
    assert engines[2].replays <= before + 5
