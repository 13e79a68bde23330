"""Adapters over several ranks: the tokens of one rank, and loading by all ranks or by none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, CheckpointError, LoRARequest, SamplingParams
from specdec.building.worker_builder import WorkerBuilder
from specdec.models.lora_adapter import AdapterWeights
from tests.lora_adapters import save_draft_adapter
from tests.specdec.parallel.ranked_engine import PROMPTS, engine
from tests.specdec.world import World

pytestmark = pytest.mark.slow

NUMBERS = [1, 0, 2, 1, 2, 0, 1]
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=20, ignore_eos=True) for i in range(7)]


def adapted_texts(llm: LLM, given: Sequence[LoRARequest | None]) -> list[Sequence[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS, lora_request=list(given), use_tqdm=False)]


@pytest.fixture(scope="module")
def one_rank(world: World) -> list[Sequence[int]]:
    """Each request alone."""
    with engine(world, "none", max_num_seqs=1, enable_lora=True, max_lora_rank=17) as llm:
        found = adapted_texts(llm, [world.adapter(number) for number in NUMBERS])
        assert found != adapted_texts(llm, [None] * len(NUMBERS))
        return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "ranks", "stages"), [("eagle3", 2, 1), ("none", 4, 1), ("eagle", 1, 2), ("none", 2, 2)]
)
def test_tokens_are_those_of_one_rank(
    world: World, one_rank: list[Sequence[int]], drafter: str, ranks: int, stages: int
) -> None:
    """With 4 ranks, two of them share each key-value head."""
    settings: dict[str, Any] = {"pipeline_parallel_size": stages, "enable_lora": True, "max_lora_rank": 17}
    with engine(world, drafter, ranks, max_num_seqs=4, **settings) as llm:
        assert adapted_texts(llm, [world.adapter(number) for number in NUMBERS]) == one_rank


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafter", "ranks", "stages", "split"),
    [("eagle3", 2, 1, 1), ("eagle3", 1, 2, 1), ("eagle3", 2, 1, 2), ("dspark", 2, 1, 2), ("llama", 2, 1, 2)],
)
def test_the_draft_model_of_every_rank_is_adapted(
    world: World, tmp_path: Path, drafter: str, ranks: int, stages: int, split: int
) -> None:
    """Ranks that drafted other trees would not come to the same outcome; stages before the last have no head.

    Where the draft model is split, each rank has its part of the adapter.
    """
    head = world.draft(drafter)
    assert head is not None
    draft = str(save_draft_adapter(tmp_path, head))
    given = [LoRARequest("a", 1, str(world.adapters[0]), draft), None, LoRARequest("b", 2, "", draft), None] * 2
    found = []
    over: dict[str, Any] = {"ranks": ranks, "pipeline_parallel_size": stages, "draft_tensor_parallel_size": split}
    for own in ({}, over):
        with engine(world, drafter, enable_lora=True, max_lora_rank=17, **own) as llm:
            texts, stats = adapted_texts(llm, given[:7]), llm.stats()
            found.append((texts, stats.adapters, stats.trees_by_accepted, stats.drafts_verified))
    assert found[0] == found[1]
    assert found[0][1].keys() == {"a", "b"}


@pytest.mark.long
def test_an_adapter_that_one_rank_refuses_is_loaded_by_none(
    world: World, one_rank: list[Sequence[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = WorkerBuilder.read_adapter

    def failing(self: WorkerBuilder, *arguments: Any) -> AdapterWeights:
        if self.model.shard.rank:  # type: ignore[union-attr]
            raise CheckpointError("the disk of rank 1 is empty")
        return read(self, *arguments)

    given = [world.adapter(number) for number in NUMBERS]
    with engine(world, "none", 2, enable_lora=True, max_lora_rank=17) as llm:
        with pytest.raises(ValueError, match=r"x: no such folder"):
            llm.add_lora(LoRARequest("x", 3, str(tmp_path / "x")))
        with monkeypatch.context() as patch:
            patch.setattr(WorkerBuilder, "read_adapter", failing)
            with pytest.raises(ValueError, match="the disk of rank 1 is empty"):
                llm.generate([PROMPTS[0]], lora_request=given[0], use_tqdm=False)
            assert llm.list_loras() == []
        assert adapted_texts(llm, given) == one_rank
        assert llm.remove_lora(1)
        assert adapted_texts(llm, given) == one_rank
