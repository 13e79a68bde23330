"""From settings to what drafts: which tokens can be drafted, and by what their logits are computed."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from specdec import LLM, DraftShape, SamplingParams
from specdec.config import CPU_SHAPE
from specdec.draft_heads.drafting.block_drafter import BlockDrafter
from specdec.draft_heads.drafting.draft_shape import BlockShape
from specdec.draft_heads.drafting.model_drafter import ModelDrafter
from specdec.draft_heads.heads.readout import CandidateReadout, MatrixReadout, Readout
from tests.fakes import edit_json
from tests.specdec.world import World


def readout(llm: LLM) -> Readout:
    assert isinstance(llm.engine.worker.drafter, ModelDrafter)
    return llm.engine.worker.drafter.readout


@pytest.fixture
def target(world: World, tmp_path: Path) -> Path:
    """The world's, with ends of its own."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in (world.folder / "target").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    edit_json(folder / "generation_config.json", eos_token_id=[2, 90])
    return folder


@pytest.mark.parametrize("draft", ["eagle", "llama"])
def test_ends_and_special_tokens_can_always_be_drafted(world: World, target: Path, draft: str) -> None:
    found = readout(LLM(target, world.draft(draft), draft_vocab=1))
    assert isinstance(found, MatrixReadout)
    assert found.tokens is not None
    # <unk>, <s> and </s> are special, and 90 is an end.
    assert found.tokens.tolist() == [0, 1, 2, 90]


@pytest.mark.parametrize("as_text", [False, True])
def test_a_token_map_is_given_by_its_path(world: World, target: Path, tmp_path: Path, as_text: bool) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps([50, 40]))
    found = readout(LLM(target, world.draft("eagle"), draft_vocab=str(file) if as_text else file))
    assert isinstance(found, MatrixReadout)
    assert found.tokens is not None
    assert found.tokens.tolist() == [0, 1, 2, 40, 50, 90]


def test_a_number_may_be_text(world: World) -> None:
    found = readout(LLM(world.folder / "target", world.draft("eagle"), draft_vocab="7"))
    assert found.size == 7


def test_the_head_of_a_vocabulary_of_its_own_is_trimmed_further(world: World) -> None:
    target, draft = world.folder / "target", world.draft("eagle3")
    whole, some = readout(LLM(target, draft)), readout(LLM(target, draft, draft_vocab=20))
    assert isinstance(whole, MatrixReadout)
    assert isinstance(some, MatrixReadout)
    assert whole.tokens is not None
    assert some.tokens is not None
    assert set(some.tokens.tolist()) == set(whole.tokens[:20].tolist()) | ({0, 1, 2} & set(whole.tokens.tolist()))
    with pytest.raises(ValueError, match="draft_vocab is 61; it must be from 1 to 60"):
        LLM(target, draft, draft_vocab=61)


def test_a_rank_picks_among_the_trimmed(world: World) -> None:
    found = readout(LLM(world.folder / "target", world.draft("llama"), dtype="float64", draft_vocab=40, draft_rank=3))
    assert isinstance(found, CandidateReadout)
    scored = found(torch.ones(2, 32, dtype=torch.float64))
    assert scored.tokens is not None
    assert scored.tokens.shape == (2, 10)
    assert scored.tokens.max() < 40


def test_without_a_draft_they_are_of_no_meaning(world: World) -> None:
    assert not isinstance(
        LLM(world.folder / "target", draft=None, draft_vocab=3, draft_rank=2).engine.worker.drafter, ModelDrafter
    )


@pytest.mark.parametrize(("rank", "draft"), [(0, "eagle"), (33, "llama")])
def test_a_rank_beyond_the_states_is_refused(world: World, rank: int, draft: str) -> None:
    with pytest.raises(ValueError, match=f"draft_rank is {rank}; it must be from 1 to 32"):
        LLM(world.folder / "target", world.draft(draft), draft_rank=rank)


@pytest.mark.parametrize("setting", [{"draft_vocab": 9}, {"draft_rank": 9}])
def test_text_has_no_logits(world: World, setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="draft 'ngram' has none; leave them out"):
        LLM(world.folder / "target", "ngram", **setting)


@pytest.mark.parametrize("draft", ["eagle", "eagle3", "llama"])
def test_fewer_positions_than_the_target_has_are_told(
    world: World, tmp_path: Path, draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = world.folder / "target"
    LLM(target, world.draft(draft))
    assert not caplog.records
    shutil.copytree(world.draft(draft), tmp_path / "short")
    edit_json(tmp_path / "short" / "config.json", max_position_embeddings=64)
    LLM(target, tmp_path / "short")
    assert "short has 64 positions, fewer than the 256 tokens of a request: beyond them nothing is" in caplog.text
    caplog.clear()
    LLM(target, tmp_path / "short", max_model_len=64)
    assert not caplog.records


def test_the_default_depth_of_a_block_head_is_that_of_its_block(world: World) -> None:
    """Rows of 5 draft 4 or 5 tokens; a depth that is asked for holds."""
    depths = {"dflash": 4, "dspark": 5}
    for draft, depth in depths.items():
        shapes = (
            (None, depth),
            ({"nodes": 8}, depth),
            ({"depth": 2}, 2),
            (DraftShape(2, 3, 8), 2),
            (DraftShape(9, 3, 8), depth),
        )
        for shape, wanted in shapes:
            llm = LLM(world.folder / "target", world.draft(draft), shape=shape, adaptive_drafts=False)
            assert isinstance(llm.engine.worker.drafter, BlockDrafter)
            reach = shape.min_reach if isinstance(shape, DraftShape) else CPU_SHAPE.min_reach
            assert llm.engine.worker.drafter.shape == BlockShape(wanted, 3, 8, reach, rows=5)


def test_drafts_of_a_prefix_that_another_request_has_read_are_the_same(world: World) -> None:
    """Alone, after a prefix hit, as a fork and in a batch: the head's entries come along."""
    llm = LLM(world.folder / "target", world.draft("dspark"), dtype="float64", block_size=8, adaptive_drafts=False)
    prompt = list(range(3, 40))
    one = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    first, again = (llm.generate([prompt], one, use_tqdm=False)[0] for _ in range(2))
    assert llm.stats().prefix_hits > 0
    others = [list(range(50, 50 + count)) for count in (3, 17, 30)]
    together = llm.generate([*others, prompt], one, use_tqdm=False)[-1]
    assert first.stats.accepted_per_depth
    for other in (again, together):
        assert other.token_ids == first.token_ids
        assert other.stats.accepted_per_depth == first.stats.accepted_per_depth
        assert (other.stats.steps, other.stats.drafted) == (first.stats.steps, first.stats.drafted)
