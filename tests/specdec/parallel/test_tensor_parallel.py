"""An engine over several ranks says what one of a single rank says."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.building.draft_loader import load_drafts
from specdec.building.engine_builder import EngineBuilder
from specdec.building.worker_builder import WorkerBuilder
from specdec.draft_heads.heads.draft_head import DraftModel
from specdec.execution.split_verifier import best_of
from specdec.execution.worker import Worker
from specdec.kernels.types.types import NO_TOKEN
from specdec.models.sharded_llama import ShardedLlama
from specdec.parallel.ranks import RankDeadError
from tests.baichuan import NORMALISED, save_baichuan
from tests.fakes import save_random_head, save_random_llama
from tests.profiles import by_day
from tests.specdec.parallel.ranked_engine import PROMPTS, check_with_little_memory, engine, prompt_logits, texts
from tests.specdec.parallel.thread_ranks import thread_ranks
from tests.specdec.world import World

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("drafter", "ranks"),
    by_day(
        [("eagle3", 4), ("none", 2), ("dspark", 2), ("llama", 2), ("eagle", 2), ("eagle3", 2), ("dflash", 2)],
        4,
        short=1,
    ),
)
def test_tokens_are_those_of_one_rank(
    world: World, expected: list[list[int]], drafter: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory: requests are preempted, computed again, and meet each other's prefixes."""
    monkeypatch.setattr(EngineBuilder, "_num_blocks", lambda _: 16)
    with engine(world, drafter, ranks) as llm:
        assert isinstance(llm.model, ShardedLlama)
        check_with_little_memory(llm, expected, drafts=drafter != "none")


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8-channels", "int8"])
def test_quantised_weights_are_split(world: World, name: str) -> None:
    """Each rank has its columns' and rows' numbers with their scales."""
    found = []
    for ranks in (1, 2):
        with engine(world.stored(name), "eagle3", ranks) as llm:
            found.append(texts(llm))
    assert found[0] == found[1]


def test_quantised_groups_are_not_split(world: World) -> None:
    with (
        pytest.raises(
            ValueError, match=r"48 inputs are quantised in groups of 16, which ranks cannot split at 0 and 24"
        ),
        engine(world.stored("awq"), "none", 2),
    ):
        pass


@pytest.mark.long
def test_all_ranks_take_another_head(world: World, tmp_path: Path, expected: list[list[int]]) -> None:
    """Ranks with different heads would draft different trees. A head that does not fit is refused by all."""
    with engine(world, "eagle3", 1) as one:
        one.update_draft(world.other("eagle3"))
        assert texts(one) == expected
        verified = one.stats().trees_by_accepted
    with engine(world, "eagle3", 2) as llm:
        for folder, reason in ((world.folder / "head", "its kind is Eagle, not Eagle3"), (tmp_path, "config.json")):
            with pytest.raises(ValueError, match=reason):
                llm.update_draft(folder)
        llm.update_draft(world.other("eagle3"))
        assert texts(llm) == expected
        assert llm.stats().trees_by_accepted == verified


@pytest.mark.long
def test_a_rank_that_cannot_load_a_head_keeps_it_from_all(
    world: World, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = WorkerBuilder.load_draft

    def failing(self: WorkerBuilder, *arguments: Any) -> DraftModel:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("the file is not here")
        return load(self, *arguments)

    monkeypatch.setattr(WorkerBuilder, "load_draft", failing)
    with engine(world, "eagle3", 2) as llm:
        worker = llm.engine.worker
        with pytest.raises(ValueError, match="the file is not here"):
            llm.update_draft(world.other("eagle3"))
        assert llm.engine.worker is worker
        assert texts(llm) == expected


def test_scores_of_choices_are_those_of_one_rank(world: World) -> None:
    params = SamplingParams(choices=[[5], [5, 6], [5, 6, 7], [5, 9, 9], [8, 6]])
    found = []
    for ranks in (1, 2):
        with engine(world, "eagle", ranks) as llm:
            (output,) = llm.generate([PROMPTS[0]], params)
            assert output.choices is not None
            found.append([score.logprobs for score in output.choices])
    for own, other in zip(*found, strict=True):
        assert own == pytest.approx(other, abs=1e-9)


@pytest.mark.long
def test_a_rule_that_weighs_all_probabilities(world: World) -> None:
    found = []
    for ranks in (1, 2):
        with engine(world, "eagle", ranks, verify="rejection") as llm:
            found.append(texts(llm))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("more", "ranks"), [({"tie_word_embeddings": True}, 2), ({"attention_bias": True, "mlp_bias": True}, 4)]
)
def test_logits_are_those_of_one_rank(
    more: dict[str, Any], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random_llama(tmp_path, **more)
    found = []
    for size in (1, ranks):
        with thread_ranks(), LLM(tmp_path, None, dtype="float64", prefill_stretch=0, tensor_parallel_size=size) as llm:
            found.append(prompt_logits(llm, monkeypatch))
    assert found[0].shape == (37, 97)
    assert (found[1] - found[0]).abs().max() < 1e-9


@pytest.mark.long
def test_slopes_and_a_normalised_head_are_those_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six heads each rank has three; an EAGLE-1 head reads the whole output matrix."""
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 1, **NORMALISED}
    save_baichuan(tmp_path / "target", **sizes)
    save_random_head(tmp_path / "head", num_key_value_heads=6, **sizes)
    found, drafted = [], []
    for size in (1, 2):
        settings: dict[str, Any] = {"prefill_stretch": 0, "tensor_parallel_size": size, "adaptive_drafts": False}
        with thread_ranks(), LLM(tmp_path / "target", tmp_path / "head", dtype="float64", **settings) as llm:
            found.append(prompt_logits(llm, monkeypatch))
            output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
            drafted.append((output.token_ids, output.stats.drafted, output.stats.steps))
    assert (found[1] - found[0]).abs().max() < 1e-9
    assert drafted[0] == drafted[1]


def test_a_rank_holds_its_part(world: World) -> None:
    with engine(world, "none", 2) as llm:
        model = llm.model
        assert model.embed_tokens.weight.shape == (49, 32)
        assert model.weights.decoder_layers[0].o_proj.weight.shape == (32, 16)
        # One of two key-value heads, with keys and values.
        assert llm.engine.worker.cache.target.shape[2] == 2


def test_the_lowest_of_equal_tokens_is_taken() -> None:
    values = torch.tensor([[2.0, 5.0, -torch.inf, 1.0], [2.0, 7.0, -torch.inf, torch.nan]])
    tokens = torch.tensor([[4.0, 1.0, 0.0, 0.0], [60.0, 50.0, 50.0, 51.0]])
    parts = torch.stack([values, tokens], 1).double()
    assert best_of(parts).tolist() == [4, 50, NO_TOKEN, NO_TOKEN]


def test_a_rank_that_fails_ends_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is the error's, and later calls say it again."""
    with engine(world, "eagle", 2) as llm:
        launch = Worker.launch

        def failing(self: Worker) -> None:
            if self is not llm.engine.worker:
                raise MemoryError("no memory is left")
            launch(self)

        monkeypatch.setattr(Worker, "launch", failing)
        reason = "rank 1 of 2 failed: MemoryError: no memory is left; the engine must be started anew"
        for _ in range(2):
            with pytest.raises(RankDeadError, match=reason):
                llm.generate([[5, 6]], use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_tensor_parallel_size": 4}, "draft_tensor_parallel_size is 4; it must be 1 or tensor_parallel_size"),
    ],
)
def test_settings_that_several_ranks_do_not_support(world: World, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(world.folder / "target", None, tensor_parallel_size=2, **settings)


def test_a_model_that_cannot_be_split_ends_all_ranks(world: World) -> None:
    with thread_ranks(), pytest.raises(ValueError, match="tensor_parallel_size is 3; it must divide the model's 4"):
        LLM(world.folder / "target", None, dtype="float64", tensor_parallel_size=3)


def test_a_rank_that_fails_while_it_loads_says_why(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*loaded: Any) -> DraftModel | None:
        if threading.current_thread() is threading.main_thread():
            return load_drafts(*loaded)
        raise MemoryError("no memory is left")

    monkeypatch.setattr("specdec.building.build.load_drafts", failing)
    with pytest.raises(RankDeadError, match="rank 1 of 2 failed: MemoryError: no memory is left; the engine"):
        engine(world, "eagle", 2).__enter__()
