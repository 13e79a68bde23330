"""From settings to what drafts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specdec import LLM, DraftShape, SamplingParams
from specdec.config import CPU_SHAPE
from specdec.draft_heads.drafting.block_drafter import BlockDrafter
from specdec.draft_heads.drafting.draft_shape import BlockShape
from tests.fakes import edit_json
from tests.specdec.world import World

pytestmark = pytest.mark.slow


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


@pytest.mark.long
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
            given = shape if isinstance(shape, DraftShape) else replace(CPU_SHAPE, **(shape or {}))
            bounds = given.branching, given.nodes, given.min_reach
            assert llm.engine.worker.drafter.shape == BlockShape(wanted, *bounds, rows=5)


@pytest.mark.long
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
