"""An engine whose layers are split over pipeline stages says what one process says."""

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec import SamplingParams
from specdec.building.engine_builder import EngineBuilder
from specdec.core.sampling_params import StructuredOutputsParams
from specdec.engine.step_observer import StepObserver
from specdec.execution.model_runner import micro_batches
from specdec.execution.stages import StageWorker
from specdec.kernels.types.draft_trees import HostTrees
from specdec.kernels.types.tree import DraftTree, TreeRow
from specdec.models.checkpoint import read_weights
from specdec.models.llama import read_llama_config
from specdec.models.tp_plan import Shard, TPPlan
from specdec.parallel.rank_layout import RankLayout
from specdec.parallel.ranks import RankDeadError
from tests.fakes import save_random_llama
from tests.specdec.parallel.ranked_engine import check_with_little_memory, engine, prompt_logits, texts
from tests.specdec.world import World

pytestmark = pytest.mark.slow


def is_first() -> bool:
    """Whether the first rank calls this; the others are threads."""
    return threading.current_thread() is threading.main_thread()


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "stages", "ranks"),
    [
        ("none", 2, 1),
        ("eagle", 2, 1),
        ("eagle3", 2, 1),
        ("dflash", 2, 1),
        ("llama", 2, 1),
        ("ngram", 2, 1),
        ("eagle3", 2, 2),
    ],
)
def test_tokens_are_those_of_one_process(
    world: World, expected: list[list[int]], drafter: str, stages: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory: requests are preempted, computed again, forked, and meet each other's prefixes."""
    monkeypatch.setattr(EngineBuilder, "_num_blocks", lambda _: 16)
    with engine(world, drafter, ranks, pipeline_parallel_size=stages) as llm:
        assert llm.model.num_stages == stages
        assert len(llm.model.layers) == 1
        check_with_little_memory(llm, expected, drafts=drafter != "none")


@pytest.fixture
def deep(world: World, tmp_path: Path) -> World:
    """A target of four layers, so that three stages have two, one and one, with a head of the world's target."""
    folder = tmp_path
    shutil.copytree(world.folder / "head3", folder / "head3")
    target = save_random_llama(folder / "target", num_hidden_layers=4, tie_word_embeddings=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world.folder / "target" / file, folder / "target" / file)
    return World(folder, target, world.tokenizer)


class Said(NamedTuple):
    """What an engine says: texts, an answer that follows a grammar, draft trees with their values, and logits."""

    texts: list[list[int]]
    answer: Sequence[int]
    trees: list[tuple[int, ...]]
    values: list[float]
    logits: Tensor


def said(world: World, drafter: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Said:
    structured = SamplingParams(temperature=1, seed=5, structured_outputs=StructuredOutputsParams(regex="[a-d ]{9}"))
    with engine(world, drafter, **settings) as llm:
        own = texts(llm)
        output = list(llm.stream([[7, 8, 9]], structured, trace=True))[-1].outputs[0]
        traces = [step.trace for step in output.steps if step.trace is not None]
        trees = [trace.tokens for trace in traces]
        values = [value or 0.0 for trace in traces for value in trace.values]
        return Said(own, output.token_ids, trees, values, prompt_logits(llm, monkeypatch))


@pytest.mark.long
def test_three_stages(deep: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are within rounding, and so are drafts: tapped layers of the first stage pass the second."""
    plain, one = said(deep, "none", monkeypatch), said(deep, "eagle3", monkeypatch)
    staged = said(deep, "eagle3", monkeypatch, pipeline_parallel_size=3)
    assert staged.texts == plain.texts
    assert staged.answer == plain.answer
    assert len(staged.answer) >= 5
    assert staged.trees == one.trees
    assert any(staged.trees)
    assert staged.values == pytest.approx(one.values, abs=1e-9)
    assert staged.logits.shape == (37, 97)
    assert (staged.logits - plain.logits).abs().max() < 1e-9


@pytest.mark.long
def test_a_rule_that_weighs_all_probabilities(world: World) -> None:
    found = []
    for settings in ({}, {"pipeline_parallel_size": 2}):
        with engine(world, "eagle", verify="rejection", **settings) as llm:
            found.append(texts(llm))
    assert found[0] == found[1]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_each_tensor_is_held_by_one_stage(tmp_path: Path, stages: int, is_tied: bool) -> None:
    """But for an embedding that is the output matrix as well; and the order of layers is that of the stages."""
    save_random_llama(tmp_path, num_hidden_layers=5, tie_word_embeddings=is_tied)
    config = read_llama_config(tmp_path)
    names = set(read_weights(tmp_path, torch.float64))
    shards = [Shard.of(config, 0, 1, TPPlan({}), stage, stages) for stage in range(stages)]
    held = [name for shard in shards for name in names if shard.own_name(name) is not None]
    assert set(held) == names
    assert len(held) == len(names) + (is_tied and stages > 1)
    assert [shard.layers.start for shard in shards] == [0, *accumulate(shard.layers.size for shard in shards)][:-1]
    sizes = [shard.config.num_layers for shard in shards]
    assert sum(sizes) == 5
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert shards[-1].own_name("layers.4.mlp.up_proj.weight") == f"layers.{sizes[-1] - 1}.mlp.up_proj.weight"


def test_the_first_ranks_hold_the_last_stage() -> None:
    layout = RankLayout(tensor=2, stages=3)
    assert [layout.stage_of(rank) for rank in range(layout.size)] == [2, 2, 0, 0, 1, 1]
    assert [layout.in_last_stage(rank) for rank in range(layout.size)] == [True, True, False, False, False, False]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), min_size=1, max_size=9), st.integers(1, 4))
def test_micro_batches_are_the_rows_in_their_order(sizes: list[tuple[int, int]], count: int) -> None:
    parts = [TreeRow([row] * known, 0, [0], 1) for row, (known, _) in enumerate(sizes)]
    trees = HostTrees([DraftTree(tuple(range(nodes)), (-1,) * nodes) for _, nodes in sizes])
    groups = micro_batches(parts, trees, count)
    assert [part for own, _ in groups for part in own] == parts
    assert [tree for _, own in groups for tree in own.trees] == trees.trees
    assert 1 <= len(groups) <= count
    tokens = [sum(len(part.tokens) for part in own) + sum(own_trees.sizes) for own, own_trees in groups]
    largest = max(known + nodes for known, nodes in sizes)
    assert max(tokens) < sum(tokens) / count + largest or len(parts) == 1
    assert all(tokens)


@pytest.mark.long
def test_the_cache_has_as_many_blocks_as_the_smallest_rank_holds(deep: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage has two of four layers here, so its blocks are the largest."""
    block = 2 * 8 * 2 * 2 * 8 * 8
    with engine(deep, "none", pipeline_parallel_size=3, kv_cache_memory=9 * block) as llm:
        assert llm.engine.worker.cache.num_blocks == 9
    with pytest.raises(ValueError, match=f"kv_cache_memory {block - 1} is less than one block of {block} bytes"):
        engine(deep, "none", pipeline_parallel_size=3, kv_cache_memory=block - 1).__enter__()
    monkeypatch.setattr(
        "specdec.building.engine_builder.cache_bytes",
        lambda config, _: config.kv_cache_memory if is_first() else 7 * block,
    )
    with engine(deep, "none", pipeline_parallel_size=3, kv_cache_memory=9 * block) as llm:
        assert llm.engine.worker.cache.num_blocks == 7


@pytest.mark.parametrize("sizes", [{"pipeline_parallel_size": 2}, {"ranks": 2}])
def test_every_rank_runs_the_largest_steps_where_memory_is_measured(
    world: World, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. The second rank has less left."""
    rehearsed: list[int] = []

    def cache_bytes(left: int, rehearse: Callable[[], int]) -> int:
        rehearsed.append(rehearse())
        return left

    # One of two layers, or one of two key-value heads in both layers.
    block = 8 * 2 * 2 * 8 * 8
    monkeypatch.setattr(
        "specdec.building.engine_builder.cache_bytes",
        lambda _, rehearse: cache_bytes(60 * block if is_first() else 50 * block, rehearse),
    )
    with engine(world, "none", max_num_seqs=9, max_num_batched_tokens=90, **sizes) as llm:
        assert llm.engine.worker.cache.num_blocks == 50
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        assert len(llm.generate([[5, 6]], params, use_tqdm=False)[0].outputs[0].token_ids) == 3
    assert len(rehearsed) == 2
    assert rehearsed[0] == rehearsed[1] > 0


def test_a_step_that_the_host_breaks_off_ends_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks have run it."""
    use_wait = StepObserver.use_wait

    def breaking(self: StepObserver, measured: Any) -> None:
        if is_first():
            raise MemoryError("the host has no memory")
        use_wait(self, measured)

    monkeypatch.setattr(StepObserver, "use_wait", breaking)
    with engine(world, "llama", pipeline_parallel_size=2) as llm:
        for _ in range(2):
            with pytest.raises(RankDeadError, match="rank 0 of 2 could not go on: the host has no memory; the engine"):
                llm.generate([[5, 6]], use_tqdm=False)


def test_a_stage_that_fails_ends_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(world, "eagle", pipeline_parallel_size=2) as llm:

        def failing(*_: Any) -> None:
            raise MemoryError("no memory is left")

        monkeypatch.setattr(StageWorker, "draft", failing)
        with pytest.raises(RankDeadError, match="rank 1 of 2 failed: MemoryError: no memory is left; the engine"):
            llm.generate([[5, 6]], use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size is 3; the model has 2 layers; lower it"),
    ],
)
def test_features_without_stages_are_refused(world: World, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(world, "none", **settings).__enter__()


def test_layer_ids_that_a_trial_would_settle_are_refused(deep: World) -> None:
    """Until config.json settles them."""
    file = deep.folder / "head3" / "config.json"
    config = json.loads(file.read_text())
    del config["eagle_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="layer_ids can be counted in two ways, which is settled by a trial with"):
        engine(deep, "eagle3", pipeline_parallel_size=2).__enter__()
