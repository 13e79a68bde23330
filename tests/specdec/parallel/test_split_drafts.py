"""A draft model that is split over the ranks drafts what a whole one drafts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import LLM, SamplingParams
from specdec.draft_heads.formats.head_kinds import fitting_head
from specdec.execution.worker import Worker
from specdec.models.split_head import HeadPart, head_plan
from specdec.models.tp_plan import Shard
from specdec.parallel.rank_group import lone_group
from tests.fakes import save_random_head
from tests.profiles import by_day
from tests.specdec.parallel.ranked_engine import engine
from tests.specdec.world import World

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20, 21, 22, 23]]
# Greedy, sampled, and sampled from edited and filtered logits.
PARAMS = [
    SamplingParams(max_tokens=10, ignore_eos=True, seed=i, **more)
    for i, more in enumerate([{"temperature": 0.0}, {}, {"top_p": 0.9, "repetition_penalty": 1.2}])
]
Outcome = tuple[list[list[int]], dict[int, int]]


def outcome(llm: LLM) -> Outcome:
    """Return the tokens, and how many draft trees had how many of theirs accepted, from which tau follows."""
    texts = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return texts, llm.stats().trees_by_accepted


def compare(world: World, drafter: str, ranks: int, **settings: Any) -> None:
    """Check that drafts of a split and of a whole draft model are alike, and some of them accepted."""
    with engine(world, drafter, **settings) as one:
        expected = outcome(one)
    with engine(world, drafter, ranks, draft_tensor_parallel_size=ranks, **settings) as llm:
        assert outcome(llm) == expected
    assert any(accepted and trees for accepted, trees in expected[1].items())


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "ranks"),
    by_day(
        [
            *(("eagle", 2), ("eagle3", 4), ("dspark", 2), ("llama", 4), ("domino", 2)),
            *(("eagle", 4), ("eagle3", 2), ("dspark", 4), ("llama", 2), ("dflash", 2), ("dflash2", 2)),
        ],
        5,
    ),
)
def test_drafts_are_those_of_one_rank(world: World, drafter: str, ranks: int) -> None:
    compare(world, drafter, ranks)


@pytest.mark.long
def test_drawn_drafts(world: World) -> None:
    """They need all logits of the draft model."""
    compare(world, "llama", 2, verify="rejection")


@pytest.mark.long
def test_a_head_with_a_token_map(world: World, tmp_path: Path) -> None:
    """Its output matrix is made of rows of the target's."""
    shutil.copytree(world.folder / "head", tmp_path / "head")
    shutil.copytree(world.folder / "target", tmp_path / "target")
    file, config = tmp_path / "head" / "model.safetensors", tmp_path / "head" / "config.json"
    save_file({**load_file(file), "token_map": torch.arange(96, 2, -2)}, file, {"format": "pt"})
    said = {"architectures": ["LlamaForCausalLMEagle"], "hot_vocab_size": 47}
    config.write_text(json.dumps({**json.loads(config.read_text()), **said}))
    compare(World(tmp_path, world.target, world.tokenizer), "eagle", 2)


@pytest.mark.long
def test_the_last_stage_splits_its_head(world: World) -> None:
    """It has no embedding of the target, and reads its part of it."""
    with engine(world, "eagle3") as one:
        expected = outcome(one)
    with engine(world, "eagle3", 2, pipeline_parallel_size=2, draft_tensor_parallel_size=2) as llm:
        assert outcome(llm) == expected


@pytest.mark.long
def test_all_ranks_take_another_head(world: World) -> None:
    with engine(world, "eagle3") as one:
        one.update_draft(world.other("eagle3"))
        expected = outcome(one)
    with engine(world, "eagle3", 2, draft_tensor_parallel_size=2) as llm:
        llm.update_draft(world.other("eagle3"))
        assert outcome(llm) == expected


def num_bytes(worker: Worker) -> int:
    """Return the bytes of a draft model's weights."""
    head = worker.drafter.head  # type: ignore[attr-defined]
    weights = head.module or head.model.weights
    return sum(weight.untyped_storage().nbytes() for weight in weights.parameters())


@pytest.mark.parametrize(("drafter", "most"), [("eagle", 0.6), ("eagle3", 0.6), ("dspark", 0.65), ("llama", 0.6)])
def test_a_rank_holds_its_part(world: World, drafter: str, most: float) -> None:
    """Half of all but norms, `fc` and the Markov head."""
    held = []
    for size in (1, 2):
        with engine(world, drafter, 2, draft_tensor_parallel_size=size) as llm:
            worker = llm.engine.worker
            held.append(num_bytes(worker))
            assert worker.cache.draft is not None
            # Of two key-value heads, with keys and values.
            assert worker.cache.draft.shape[2] == 4 // size
            assert worker.drafter.readout.is_whole == (size == 1)  # type: ignore[attr-defined]
    assert held[1] < most * held[0]


def test_only_the_part_is_read(world: World) -> None:
    """Parts are views of the mapped file, which together cover each split weight once; others are whole."""
    with engine(world, "none", 2) as llm:
        found = fitting_head(world.folder / "head3", llm.model.shard.whole)  # type: ignore[union-attr]
    whole = found.tensors.by_name
    group = lone_group(torch.device("cpu"))
    shards = [Shard.of(found.config.llama, rank, 2, head_plan(found.config.llama)) for rank in range(2)]
    parts = [HeadPart(shard, group).described(found).tensors.by_name for shard in shards]
    dims = {
        "q_proj": 0,
        "k_proj": 0,
        "v_proj": 0,
        "gate_proj": 0,
        "up_proj": 0,
        "o_proj": 1,
        "down_proj": 1,
        "lm_head": 0,
    }
    seen = set[str]()
    for name, weight in whole.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        both = [part[name] for part in parts]
        assert all(one.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for one in both)
        if module not in dims:
            assert all(one is weight for one in both)
            continue
        seen.add(module)
        assert torch.equal(torch.cat(both, dims[module]), weight)
    assert seen == set(dims)


def test_a_head_that_cannot_be_split(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.folder / "target", tmp_path / "target")
    save_random_head(tmp_path / "head", num_attention_heads=2, num_key_value_heads=2, head_dim=16)
    reason = (
        r"head: tensor_parallel_size is 4; it must divide the model's 2 attention heads; draft_tensor_parallel_size 1"
    )
    small = World(tmp_path, world.target, world.tokenizer)
    with pytest.raises(ValueError, match=reason):
        engine(small, "eagle", 4, draft_tensor_parallel_size=4).__enter__()


def test_only_all_ranks_share_a_draft_model(world: World) -> None:
    with pytest.raises(
        ValueError, match="draft_tensor_parallel_size is 2; it must be 1 or tensor_parallel_size, which"
    ):
        LLM(world.folder / "target", None, tensor_parallel_size=4, draft_tensor_parallel_size=2)
    config = {"method": "eagle", "model": str(world.folder / "head"), "draft_tensor_parallel_size": 2}
    with pytest.raises(
        ValueError, match="draft_tensor_parallel_size is 2; it must be 1 or tensor_parallel_size, which"
    ):
        LLM(world.folder / "target", speculative_config=config)


@pytest.mark.long
def test_costs_are_measured_by_all_ranks(world: World) -> None:
    """Adaptive trees go by costs of drafting, which no rank can do alone."""
    with engine(world, "eagle", 2, draft_tensor_parallel_size=2, adaptive_drafts=True) as llm:
        texts, _ = outcome(llm)
    with engine(world, "none") as one:
        assert outcome(one)[0] == texts
